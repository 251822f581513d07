"""What replicate() does around the numbers: names, shapes, placement, threads, errors."""

import functools
import inspect
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.devices import resolve
from models import batches, predict, regression, spec_of, step
from towers import TRAIN, compare, session, train


def adam(loss):
    return tf.train.AdamOptimizer(0.05).minimize(loss, step())


def build(model_fn, devices=2, rows=4, **options):
    """Returns the spec and the graph of a replicated model_fn."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        spec = estimator_mgpu.replicate(model_fn, devices=devices, **options)(
            features=tf.zeros([rows, 3]), labels=tf.zeros([rows, 1]), mode=TRAIN
        )
        return spec, graph


def test_all_three_forms():
    @estimator_mgpu.replicate
    def bare(features, labels, mode):
        return regression(adam)(features, labels, mode)

    @estimator_mgpu.replicate(devices=2)
    def with_options(features, labels, mode):
        return regression(adam)(features, labels, mode)

    called = estimator_mgpu.replicate(regression(adam), devices=['/cpu:0', '/cpu:0'])
    for fn, copies in ((bare, 0), (with_options, 1), (called, 1)):
        with tf.Graph().as_default() as graph:
            tf.train.get_or_create_global_step()
            fn(features=tf.zeros([4, 3]), labels=tf.zeros([4, 1]), mode=TRAIN)
            assert (
                any(op.name.startswith('replicate/tower_1/') for op in graph.get_operations())
                == copies
            )


def test_hooks_and_scaffold_are_passed_on():
    class Hook(tf.train.SessionRunHook):
        pass

    hook, scaffold = Hook(), tf.train.Scaffold()

    def model_fn(features, labels, mode):
        spec = regression(adam)(features, labels, mode)
        return spec._replace(training_hooks=[hook], scaffold=scaffold)

    spec, _ = build(model_fn)
    assert spec.training_hooks == (hook,)
    assert spec.scaffold is scaffold


def test_spec_loss_is_of_the_whole_batch():
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(features[:, 0] - w))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.5).minimize(loss, step()))

    # By hand: rows 1, 2, 6 over 2 towers; w = 0 gives (1 + 4 + 36) / 3, then w = 3 the mean,
    # which gives (4 + 1 + 9) / 3.
    rows = (np.array([[1.0], [2.0], [6.0]], 'f'), None)
    run = train(model_fn, [rows, rows], 2)
    np.testing.assert_allclose(run.losses, [41 / 3, 14 / 3], rtol=1e-6)
    np.testing.assert_allclose(run.values['w'], 3.0, rtol=1e-6)


def test_towers_run_on_their_devices():
    """Read from what the run itself executed on each device, without soft placement."""
    model_fn = regression(adam)
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features, labels = batches(8, steps=1)[0]
        fed = tf.placeholder(tf.float32, [8, 3]), tf.placeholder(tf.float32, [8, 1])
        spec = estimator_mgpu.replicate(model_fn, devices=4)(*fed, TRAIN)
        with session(4) as sess:
            sess.run(tf.global_variables_initializer())
            metadata = tf.RunMetadata()
            options = tf.RunOptions(output_partition_graphs=True)
            sess.run(
                [spec.loss, spec.train_op], dict(zip(fed, (features, labels))), options, metadata
            )
    multiplied = {i: set() for i in range(4)}
    for partition in metadata.partition_graphs:
        for node in partition.node:
            device = int(node.device.rpartition(':')[2])
            tower = re.match(r'replicate/tower_(\d)/', node.name)
            if node.op.endswith('MatMul'):  # or fused with what follows
                multiplied[device].add(node.name)
            if tower and node.op not in ('_Send', '_Recv', '_HostSend', '_HostRecv'):
                assert device == int(tower[1]), node
    # The forward pass and the gradient of each tower, two layers: 5 products on each device.
    assert [len(names) for names in multiplied.values()] == [5] * 4
    assert {name.split('/')[1] for name in multiplied[3]} == {'tower_3'}


@pytest.fixture
def four_gpus(monkeypatch):
    real = tf.config.list_physical_devices
    gpus = [f'/physical_device:GPU:{i}' for i in range(4)]
    monkeypatch.setattr(
        tf.config, 'list_physical_devices', lambda kind=None: gpus if kind == 'GPU' else real(kind)
    )
    monkeypatch.setattr(tf.config, 'get_logical_device_configuration', lambda gpu: None)


# Which GPU each variable is on.
PLACES = {
    'first': {'table': 0, 'kernel': 0, 'bias': 0},
    'spread': {'table': 0, 'kernel': 1, 'bias': 2},
}


# What lies between a gradient's sum and its use.
KEPT = 'Identity', 'Mul', 'Reshape', 'SplitV', 'Unique', 'UnsortedSegmentSum'


@pytest.mark.parametrize('variables', PLACES)
@pytest.mark.parametrize('devices', [None, 4, [f'/gpu:{i}' for i in range(4)]], ids=repr)
def test_placement_on_gpus(devices, variables, four_gpus):
    """Of every op in the graph: tower i on GPU i, what uses or updates a variable with that."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [9, 3])
        ids = tf.cast(features, tf.int32)
        with tf.device('/cpu:0'):
            pinned = tf.reduce_sum(features, 1, keepdims=True, name='pinned')
        output = tf.layers.dense(tf.reduce_sum(tf.gather(table, ids), 1) + pinned, 1)
        loss = tf.losses.mean_squared_error(labels, output)
        return spec_of(mode, loss, adam(loss))

    _, graph = build(model_fn, devices=devices, rows=8, variables=variables)
    places = {name: f'/device:GPU:{i}' for name, i in PLACES[variables].items()}
    found = {kind: 0 for kind in ('ResourceGather', 'VarHandleOp', 'ResourceApplyAdam')}
    sums = {name: set() for name in places}
    for op in graph.get_operations():
        tower = re.match(r'replicate/tower_(\d)/', op.name)
        variable = re.search(r'table|kernel|bias', op.name)
        if re.search(r'(^|/)pinned(/|$)', op.name):
            assert op.device == '/device:CPU:0', op
        elif op.type == 'ResourceGather':
            found[op.type] += bool(tower)
            assert op.device == places['table'] or not tower and not op.device, op
        elif tower and op.type != 'NoOp':
            assert op.device == f'/device:GPU:{tower[1]}', op
        elif op.type in found and variable:
            found[op.type] += 1
            if op.type == 'VarHandleOp':  # Its users have to be where it is.
                assert op.device == places[variable[0]], op
        if op.type in ('ResourceApplyAdam', 'ResourceScatterAdd') and variable:
            waiting = [t.op for t in op.inputs]
            while waiting:  # for the sum that the gradient is
                before = waiting.pop()
                if before.name.startswith('replicate/') and before.type in ('AddN', 'ConcatV2'):
                    sums[variable[0]].add(before.device)
                elif before.type in KEPT:
                    waiting += [t.op for t in before.inputs]
    assert found == {'ResourceGather': 4, 'VarHandleOp': 9, 'ResourceApplyAdam': 2}
    assert sums['kernel'] == {places['kernel']} and sums['bias'] == {places['bias']}
    copied = [op.name for op in graph.get_operations() if op.name.startswith('replicate/tower_3/')]
    assert len(copied) > 20


def test_a_device_may_be_listed_twice():
    values = compare(regression(adam), batches(6, steps=2), 2)[0].values
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        estimator_mgpu.replicate(regression(adam), devices=['/cpu:0', '/cpu:0'])(
            tf.zeros([4, 3]), tf.zeros([4, 1]), TRAIN
        )
        copied = [op for op in graph.get_operations() if op.name.startswith('replicate/tower_1/')]
    assert copied
    assert {op.device for op in copied} <= {'/device:CPU:0', ''}
    assert values['global_step'] == 2


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
        with tf.Graph().as_default() as graph:
            tf.train.get_or_create_global_step()
            model_fn(features=tf.zeros([4, 3]), labels=tf.zeros([4, 1]), mode=TRAIN)
            graphs[name] = {op.name for op in graph.get_operations()}

    before = tf.train.Optimizer.__init__
    threads = [
        threading.Thread(target=run, args=args)
        for args in (('ours', estimator_mgpu.replicate(waiting, devices=2)), ('plain', waiting))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tf.train.Optimizer.__init__ is before
    barrier = threading.Barrier(1)
    run('alone', waiting)
    assert graphs['plain'] == graphs['alone']
    assert any(name.startswith('replicate/tower_1/') for name in graphs['ours'])


SIGNATURES = {
    'features, labels, mode': lambda f: lambda features, labels, mode: f(features, labels, mode),
    'no mode': lambda f: lambda features, labels: f(features, labels, TRAIN),
    'params and config': lambda f: (
        lambda features, labels, mode, params, config: f(features, labels, mode)
    ),
    'partial': lambda f: functools.partial(
        lambda extra, features, labels, mode: f(features, labels, mode), 3
    ),
    'bound method': lambda f: _Model(f).model_fn,
    'callable object': lambda f: _Model(f),
}


class _Model:
    def __init__(self, f):
        self._f = f

    def model_fn(self, features, labels, mode):
        return self._f(features, labels, mode)

    __call__ = model_fn


@pytest.mark.parametrize('make', SIGNATURES.values(), ids=SIGNATURES.keys())
def test_any_signature_under_estimator(make, tmp_path):
    calls = []

    def model(features, labels, mode):
        calls.append(mode)
        return regression(adam)(features, labels, mode)

    model_fn = estimator_mgpu.replicate(make(model), devices=2)
    features, labels = batches(4, steps=1)[0]

    def input_fn():
        return tf.data.Dataset.from_tensors((features, labels)).repeat()

    config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(2))
    params = {'rate': 0.1} if 'params' in inspect.signature(model_fn).parameters else None
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path), config, params)
    estimator.train(input_fn, steps=2)
    assert calls == [TRAIN]


def test_estimator_checkpoint_is_that_of_one_device(tmp_path):
    features, labels = batches(10, steps=1)[0]

    def input_fn():
        data = tf.data.Dataset.from_tensor_slices((features, labels))
        return data.repeat().batch(7)

    def run(name, model_fn, devices):
        config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(devices))
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / name), config)
        estimator.train(input_fn, max_steps=5)
        reader = tf.train.load_checkpoint(str(tmp_path / name))
        return reader.get_variable_to_shape_map(), reader.get_tensor('global_step')

    one = run('one', regression(adam), 1)
    ours = run('ours', estimator_mgpu.replicate(regression(adam), devices=4), 4)
    assert ours == one
    assert ours[1] == 5


def test_missing_devices_are_warned_of(tmp_path, caplog):
    features, labels = batches(4, steps=1)[0]
    model_fn = estimator_mgpu.replicate(regression(adam), devices=2)
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensors((features, labels)), steps=1)
    line = 'RunConfig(session_config=estimator_mgpu.session_config({}))'
    assert line.format(['/device:CPU:0', '/device:CPU:1']) in caplog.text


def test_the_log_says_how_the_batch_is_divided(caplog):
    build(regression(adam), devices=2, rows=6)
    assert 'its rows go to /device:CPU:0 (3), /device:CPU:1 (3).' in caplog.text
    build(regression(adam), devices=2, rows=5)
    assert 'its rows go to /device:CPU:0 (3), /device:CPU:1 (2).' in caplog.text


def test_session_config_keeps_what_it_is_given():
    base = tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(3, base)
    assert config.log_device_placement
    assert config.device_count['CPU'] == 7
    assert base == tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(['/cpu:0', '/cpu:4'])
    assert config.device_count['CPU'] == 5
    assert config.allow_soft_placement


def test_gpus_that_are_split(monkeypatch):
    part = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    split = {'one': [part] * 3, 'two': None}
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: list(split))
    monkeypatch.setattr(tf.config, 'get_logical_device_configuration', split.get)
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
    assert rewriting(estimator_mgpu.session_config(2)).disable_meta_optimizer
    gpus = rewriting(estimator_mgpu.session_config(['/job:a/device:GPU:0', '/job:a/device:GPU:1']))
    assert not gpus.disable_meta_optimizer
    assert gpus.constant_folding == gpus.OFF
    assert gpus.layout_optimizer == gpus.remapping == gpus.DEFAULT
    own = tf.ConfigProto(allow_soft_placement=True)
    assert rewriting(estimator_mgpu.session_config(2, own)) == rewriting(own)
    for config, disabled in (
        (None, True),
        (tf.estimator.RunConfig(), True),
        (tf.estimator.RunConfig(session_config=own), False),
    ):
        estimator = estimator_mgpu.Estimator(regression(adam), str(tmp_path), config, devices=2)
        assert rewriting(estimator.config.session_config).disable_meta_optimizer == disabled


def test_gpus_are_not_initialised():
    """Listing them goes by tf.config alone; nothing makes a session or an eager context."""
    program = (
        'import estimator_mgpu, tensorflow as tf\n'
        'from tensorflow.python.eager import context\n'
        'estimator_mgpu.session_config(2)\n'
        'with tf.Graph().as_default():\n'
        '  tf.compat.v1.train.get_or_create_global_step()\n'
        '  w = lambda: tf.compat.v1.get_variable("w", [3, 1])\n'
        '  def model_fn(features, labels, mode):\n'
        '    loss = tf.reduce_mean(features @ w())\n'
        '    train = tf.compat.v1.train.AdamOptimizer().minimize(loss)\n'
        '    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)\n'
        '  estimator_mgpu.replicate(model_fn, devices=2)(tf.zeros([4, 3]), None, "train")\n'
        'assert context.context()._context_handle is None\n'
    )
    subprocess.run([sys.executable, '-c', program], check=True)
