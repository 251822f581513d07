"""What replicate() does around the numbers: names, shapes, placement, threads, errors."""

import functools
import gc
import inspect
import re
import threading

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.devices import resolve
from forks import output_of
from models import adam, batches, predict, regression, spec_of
from towers import NAMES, TRAIN, assert_close, tower_of, train


def built(model_fn, rows=4):
    """The ops of a model_fn's graph."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        model_fn(features=tf.zeros([rows, 3]), labels=tf.zeros([rows, 1]), mode=TRAIN)
        return graph.get_operations()


def of_tower_1(ops):
    return [op for op in ops if tower_of(op.name) == 1]


def test_all_three_forms():
    """A device may be listed twice."""
    bare = estimator_mgpu.replicate(regression(adam))
    with_options = estimator_mgpu.replicate(devices=2)(regression(adam))
    twice = estimator_mgpu.replicate(regression(adam), devices=['/cpu:0', '/cpu:0'])
    assert not of_tower_1(built(bare))
    assert of_tower_1(built(with_options))
    assert {op.device for op in of_tower_1(built(twice))} - {''} == {'/device:CPU:0'}


def embedded(features, labels, mode):
    """A table that is looked up, a layer's kernel and bias, and an op that is put on the CPU."""
    table = tf.get_variable('table', [9, 3])
    ids = tf.cast(features, tf.int32)
    vectors = tf.reduce_sum(tf.gather(table, ids), 1)

    with tf.device('/cpu:0'):
        pinned = tf.reduce_sum(features, 1, keepdims=True, name='pinned')

    output = tf.layers.dense(vectors + pinned, 1)
    loss = tf.losses.mean_squared_error(labels, output)
    return spec_of(mode, loss, adam(loss))


# On which GPU each variable of this model is.
PLACES = {
    'first': {'table': 0, 'kernel': 0, 'bias': 0},
    'spread': {'table': 0, 'kernel': 1, 'bias': 2},
}


def is_added(op):
    return NAMES.is_added(op.name)


def variable_of(op):
    """Returns the variable that an op's name names, or None."""
    found = re.search('table|kernel|bias', op.name)
    return found[0] if found else None


def sums_before(update):
    """Returns the ops that sum, or concatenate, what towers gave for the gradient of an update."""
    between = 'Identity', 'Mul', 'Reshape', 'SplitV', 'Unique', 'UnsortedSegmentSum'
    sums = []
    remaining = [tensor.op for tensor in update.inputs]
    while remaining:
        op = remaining.pop()
        if is_added(op) and op.type in ('AddN', 'ConcatV2'):
            sums.append(op)
        elif op.type in between:
            remaining += [tensor.op for tensor in op.inputs]
    return sums


@pytest.mark.parametrize('variables', PLACES)
@pytest.mark.parametrize('devices', [None, 4, [f'/gpu:{i}' for i in range(4)]], ids=repr)
def test_placement_on_gpus(devices, variables, gpus):
    """Tower i is on GPU i. What makes, looks up or updates a variable is where that is."""
    gpus(None, None, None, None)
    places = {name: f'/device:GPU:{i}' for name, i in PLACES[variables].items()}
    ops = built(estimator_mgpu.replicate(embedded, devices=devices, variables=variables), 8)

    pinned = [op for op in ops if re.search(r'(^|/)pinned(/|$)', op.name)]
    pinned = [op for op in pinned if tower_of(op.name) is not None or not is_added(op)]
    assert {op.device for op in pinned} == {'/device:CPU:0'}

    # The lookups of four towers, and the model_fn's own, which nothing uses any more.
    lookups = [op for op in ops if op.type == 'ResourceGather']
    assert len([op for op in lookups if tower_of(op.name) is not None]) == 4
    for op in lookups:
        assert op.device == places['table'] or tower_of(op.name) is None and not op.device, op

    for op in ops:
        if tower_of(op.name) is not None and op.type != 'NoOp' and op not in [*pinned, *lookups]:
            assert op.device == f'/device:GPU:{tower_of(op.name)}', op

    # Each variable and Adam's two moments of it. What uses a handle has to be where that is.
    handles = [op for op in ops if op.type == 'VarHandleOp' and variable_of(op)]
    assert len(handles) == 3 * len(places)
    for op in handles:
        assert op.device == places[variable_of(op)], op

    updates = [op for op in ops if op.type == 'ResourceApplyAdam' and variable_of(op)]
    assert {variable_of(op) for op in updates} == {'kernel', 'bias'}
    assert len(updates) == 2
    for op in updates:
        assert {sum.device for sum in sums_before(op)} == {places[variable_of(op)]}, op

    assert len(of_tower_1(ops)) > 15


def test_nothing_is_left_of_a_call():
    """Another one in the same graph is none within the first; and garbage is collected again."""
    model_fn = estimator_mgpu.replicate(regression(lambda loss: tf.no_op()), devices=2)
    with tf.Graph().as_default():
        for _ in range(2):
            model_fn(features=tf.zeros([4, 3]), labels=tf.zeros([4, 1]), mode=TRAIN)
        assert len(tf.trainable_variables()) == 3
    assert gc.isenabled()


def test_variables_start_from_their_initial_values(behavior):
    """Which the tests that compare take for what variables start from."""
    run = train(regression(adam), batches(), 3, steps=0)
    assert_close(run.values, run.start, 0.0)


def test_two_threads_at_once():
    """One replicates, one doesn't; each waits for the other between forward pass and gradient."""
    barrier = threading.Barrier(2, timeout=60)
    graphs = {}

    def waiting(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        barrier.wait()
        train_op = adam(loss)
        barrier.wait()
        return spec_of(mode, loss, train_op)

    def run(name, model_fn):
        graphs[name] = {op.name for op in built(model_fn)}

    before = tf.train.Optimizer.__init__
    both = {'ours': estimator_mgpu.replicate(waiting, devices=2), 'plain': waiting}
    threads = [threading.Thread(target=run, args=args) for args in both.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tf.train.Optimizer.__init__ is before
    barrier = threading.Barrier(1)
    run('alone', waiting)
    assert graphs['plain'] == graphs['alone']
    assert any(tower_of(name) == 1 for name in graphs['ours'])


SIGNATURES = {
    'params, config': lambda f: (
        lambda features, labels, mode, params, config: f(features, labels, mode)
    ),
    'partial': lambda f: functools.partial(
        lambda x, features, labels: f(features, labels, TRAIN), 3
    ),
    'callable object': lambda f: type(
        'Model', (), {'__call__': lambda self, features, labels, mode: f(features, labels, mode)}
    )(),
}


def train_by_estimator(model_fn, path, config=None, params=None):
    batch = batches(4, steps=1)[0]
    input_fn = lambda: tf.data.Dataset.from_tensors(batch).repeat()  # noqa: E731
    tf.estimator.Estimator(model_fn, str(path), config, params).train(input_fn, steps=2)


@pytest.mark.parametrize('make', SIGNATURES.values(), ids=SIGNATURES)
def test_any_signature_under_estimator(make, tmp_path):
    model_fn = estimator_mgpu.replicate(make(regression(adam)), devices=2)
    config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(2))
    params = {'rate': 0.1} if 'params' in inspect.signature(model_fn).parameters else None
    train_by_estimator(model_fn, tmp_path, config, params)


def test_missing_devices_are_warned_of(tmp_path, caplog):
    train_by_estimator(estimator_mgpu.replicate(regression(adam), devices=2), tmp_path)
    line = 'RunConfig(session_config=estimator_mgpu.session_config({}))'
    assert line.format(['/device:CPU:0', '/device:CPU:1']) in caplog.text


def test_session_config_keeps_what_it_is_given():
    base = tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(3, base)
    assert config.log_device_placement
    assert config.device_count['CPU'] == 7
    assert base == tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(['/cpu:0', '/cpu:4'])
    assert config.device_count['CPU'] == 5
    assert config.allow_soft_placement


def test_gpus_that_are_split(gpus):
    part = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    gpus([part] * 3, None)
    assert resolve(None) == [f'/device:GPU:{i}' for i in range(4)]
    own = tf.ConfigProto()
    for config in (estimator_mgpu.session_config(), estimator_mgpu.session_config(2, own)):
        found = config.gpu_options.experimental.virtual_devices
        assert [list(gpu.memory_limit_mb) for gpu in found] == [[1024] * 3, []]
    own.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[7])
    assert estimator_mgpu.session_config(2, own).gpu_options == own.gpu_options
    with pytest.raises(ValueError, match='this machine has 4 GPUs'):
        resolve(5)


def rewriting(config):
    return config.graph_options.rewrite_options


def test_graph_optimizers(tmp_path):
    """Several towers' default leaves out what takes long, but on GPUs layout and remapping."""
    default = tf.estimator.Estimator(regression(adam), str(tmp_path)).config.session_config
    assert rewriting(estimator_mgpu.session_config(1)) == rewriting(default)
    cpus = rewriting(estimator_mgpu.session_config(2))
    assert cpus.disable_meta_optimizer
    assert cpus.constant_folding == cpus.DEFAULT  # One line is enough: Estimator logs the config.
    gpus = rewriting(estimator_mgpu.session_config(['/job:a/device:GPU:0', '/job:a/device:GPU:1']))
    assert not gpus.disable_meta_optimizer
    assert gpus.constant_folding == gpus.OFF
    assert gpus.layout_optimizer == gpus.remapping == gpus.DEFAULT
    own = tf.ConfigProto(allow_soft_placement=True)
    assert rewriting(estimator_mgpu.session_config(2, own)) == rewriting(own)
    configs = None, tf.estimator.RunConfig(), tf.estimator.RunConfig(session_config=own)
    for config, disabled in zip(configs, (True, True, False)):
        estimator = estimator_mgpu.Estimator(regression(adam), str(tmp_path), config, devices=2)
        assert rewriting(estimator.config.session_config).disable_meta_optimizer == disabled


PROGRAM = """
import estimator_mgpu, tensorflow.compat.v1 as tf
from tensorflow.python.eager import context
estimator_mgpu.session_config(2)
def model_fn(features):
    loss = tf.reduce_mean(features @ tf.get_variable("w", [3, 1]))
    return tf.estimator.EstimatorSpec("train", loss=loss, train_op=tf.no_op())
with tf.Graph().as_default():
    estimator_mgpu.replicate(model_fn, devices=2)(tf.zeros([4, 3]))
assert context.context()._context_handle is None
"""


def test_gpus_are_not_initialised():
    """Listing them goes by tf.config alone; nothing makes a session or an eager context."""
    output_of(['-c', PROGRAM])


def test_each_run_builds_the_same_graph():
    """TensorFlow has control inputs in the order of their addresses in memory."""

    def model_fn(features, labels, mode):
        for _ in range(6):
            features = tf.layers.dense(features, 4)
        loss = tf.reduce_mean(tf.square(features - labels))
        return spec_of(mode, loss, adam(loss))

    replicated = estimator_mgpu.replicate(model_fn, devices=3)
    graphs = [
        {(op.name, op.device, *sorted(op.node_def.input)) for op in built(replicated)}
        for _ in range(6)
    ]
    assert all(graph == graphs[0] for graph in graphs)
