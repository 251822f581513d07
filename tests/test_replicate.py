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
from estimator_mgpu import gradients, private
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
            assert any(op.name.startswith('tower_1/') for op in graph.get_operations()) == copies


def test_names_are_those_of_one_device():
    """Tower 0 has the ops of one device by their names; what's added lives in scopes of its own."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
        tf.summary.scalar('loss', loss)
        return spec_of(mode, loss, adam(loss))

    with tf.Graph().as_default() as one:
        tf.train.get_or_create_global_step()
        model_fn(tf.zeros([4, 3]), tf.zeros([4, 1]), TRAIN)
    _, ours = build(model_fn, devices=3, rows=6, variables='first')

    def names(graph):
        return {op.name for op in graph.get_operations() if not op.name.startswith('gradients/')}

    ours_alone = re.compile(r'(replicate|reduced(_\d+)?|tower_[12])/')
    added = {name for name in names(ours) if not ours_alone.match(name)} - names(one)
    constants = {name for name in added if re.fullmatch(r'(zeros|Const)(_\d+)?', name)}
    sizes = {
        name for name in added if name.endswith('/ones_like/Shape')
    }  # Constants on one device.
    assert added - constants - sizes == set()
    missing = names(one) - names(ours)
    assert {name for name in missing if 'mean_squared_error' not in name} == set()
    for graph in (one, ours):
        with graph.as_default():
            assert [v.op.name for v in tf.trainable_variables()] == ['dense/kernel', 'dense/bias']
            assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 1
            assert len(tf.get_collection(tf.GraphKeys.LOSSES)) == 1


def test_copies_do_not_grow_with_what_is_shared():
    """Two optimizers on one forward pass: each tower has one copy of each forward op."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels), name='loss')
        first = tf.train.AdamOptimizer(0.1).minimize(loss, var_list=tf.trainable_variables('net/w'))
        rest = tf.trainable_variables('net/[bv]')
        return spec_of(mode, loss, first, tf.train.AdamOptimizer(0.1).minimize(loss, step(), rest))

    _, graph = build(model_fn)
    copies = [op.name for op in graph.get_operations() if op.name.startswith('tower_1/net/MatMul')]
    assert sorted(copies) == ['tower_1/net/MatMul', 'tower_1/net/MatMul_1']


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


def test_current_tower():
    seen = []

    def model_fn(features, labels, mode):
        index, count = estimator_mgpu.current_tower()
        seen.append(count)
        w = tf.get_variable('w', [3], initializer=tf.zeros_initializer())
        mine = tf.one_hot(index, 3)
        loss = tf.reduce_sum(mine * w) * tf.reduce_mean(features)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(1.0).minimize(loss, step()))

    # Each of 3 towers has 2 of 6 rows, all of them 1, and its own entry of w: a third of 1 each.
    run = train(model_fn, [(np.ones([6, 1], 'f'), None)], 3)
    assert seen == [3]
    np.testing.assert_allclose(run.values['w'], [-1 / 3] * 3, rtol=1e-6)
    with tf.Graph().as_default(), session(1) as sess:
        index, count = estimator_mgpu.current_tower()
        assert (sess.run(index), count) == (0, 1)


@pytest.mark.parametrize('layer', ['tf.nn', 'tf.layers', 'keras', 'in a loop'])
def test_dropout_masks_differ(layer):
    """8 rows of 64 ones: under one mask a tower, no two towers' masks are equal."""

    def drop(x):
        if layer == 'tf.nn':
            return tf.nn.dropout(x, rate=0.5)
        if layer == 'tf.layers':
            return tf.layers.dropout(x, 0.5, training=True)
        if layer == 'keras':
            return tf.keras.layers.Dropout(0.5)(x, training=True)
        return tf.while_loop(
            lambda i, x: i < 1, lambda i, x: (i + 1, tf.nn.dropout(x, rate=0.5)), [0, x]
        )[1]

    def model_fn(features, labels, mode):
        index, count = estimator_mgpu.current_tower()
        masks = tf.get_variable('masks', [count, 64], initializer=tf.zeros_initializer())
        mask = drop(features)[0]
        loss = tf.reduce_sum(tf.gather(masks, index) * mask)
        train_op = tf.train.GradientDescentOptimizer(1.0).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    run = train(model_fn, [(np.ones([8, 64], 'f'), None)], 4, loss_reduction='sum')
    masks = run.values['masks']
    assert set(np.unique(masks)) == {-2.0, 0.0}
    assert len({tuple(mask) for mask in masks}) == 4
    again = train(model_fn, [(np.ones([8, 64], 'f'), None)], 4, loss_reduction='sum')
    if layer != 'keras':  # Keras may draw seeds of its own
        np.testing.assert_array_equal(again.values['masks'], masks)


def test_batch_norm_averages_move_once_a_step():
    def model_fn(features, labels, mode):
        hidden = tf.layers.batch_normalization(features, momentum=0.5, training=True, name='norm')
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, adam(loss))

    # The towers' means are 2 and 15, and the average goes from 0 half the way to that of the batch.
    features = np.array([[1.0], [3.0], [10.0], [20.0]], 'f')
    run = train(model_fn, [(features, np.zeros([4, 1], 'f'))], 2)
    np.testing.assert_allclose(run.values['norm/moving_mean'], [4.25], rtol=1e-6)


def placement(graph_def):
    return {node.name: node.device for node in graph_def.node}


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
            tower = re.match(r'tower_(\d)/', node.name)
            if node.op.endswith('MatMul'):  # or fused with what follows
                multiplied[device].add(node.name)
            if tower and node.op not in ('_Send', '_Recv', '_HostSend', '_HostRecv'):
                assert device == int(tower[1]), node
    # The forward pass and the gradient of each tower, two layers: 5 products on each device.
    assert [len(names) for names in multiplied.values()] == [5] * 4
    assert {name.split('/')[0] for name in multiplied[3]} == {'tower_3'}


@pytest.fixture
def four_gpus(monkeypatch):
    real = tf.config.list_physical_devices
    gpus = [f'/physical_device:GPU:{i}' for i in range(4)]
    monkeypatch.setattr(
        tf.config, 'list_physical_devices', lambda kind=None: gpus if kind == 'GPU' else real(kind)
    )


# Which GPU each variable is on.
PLACES = {
    'first': {'table': 0, 'kernel': 0, 'bias': 0},
    'spread': {'table': 0, 'kernel': 1, 'bias': 2},
}


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
    for op in graph.get_operations():
        tower = re.match(r'tower_(\d)/', op.name)
        variable = re.search(r'table|kernel|bias', op.name)
        if re.search(r'(^|/)pinned(/|$)', op.name):
            assert op.device == '/device:CPU:0', op
        elif op.type == 'ResourceGather':
            found[op.type] += 1
            assert op.device == places['table'], op
        elif tower and op.device:
            assert op.device == f'/device:GPU:{tower[1]}', op
        elif op.type in found and variable:
            found[op.type] += 1
            assert op.device == places[variable[0]], op
        if tower:
            assert op.device or op.type in ('ReadVariableOp', 'Const', 'VariableShape'), op
    assert found == {'ResourceGather': 4, 'VarHandleOp': 9, 'ResourceApplyAdam': 2}
    copied = [op.name for op in graph.get_operations() if op.name.startswith('tower_3/')]
    assert len(copied) > 20
    sums = [op for op in graph.get_operations() if re.match(r'replicate/gradient', op.name)]
    dense = {op.device for op in sums if op.type == 'AddN'}
    assert dense == {places['kernel'], places['bias']}
    assert {op.device for op in sums if op.type == 'ConcatV2'} == {places['table']}


def test_a_device_may_be_listed_twice():
    values = compare(regression(adam), batches(6, steps=2), 2)[0].values
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        estimator_mgpu.replicate(regression(adam), devices=['/cpu:0', '/cpu:0'])(
            tf.zeros([4, 3]), tf.zeros([4, 1]), TRAIN
        )
        copied = [op for op in graph.get_operations() if op.name.startswith('tower_1/')]
    assert copied
    assert {op.device for op in copied} <= {'/device:CPU:0', ''}
    assert values['global_step'] == 2


def hooked():
    return [getattr(module, name) for module, name in (private.GRADIENTS, private.TAPE_GRADIENTS)]


def test_an_exception_leaves_nothing_patched():
    before = hooked()

    def model_fn(features, labels, mode):
        assert hooked() != before
        raise KeyError('in the model_fn')

    with pytest.raises(KeyError, match='in the model_fn'):
        build(model_fn)
    assert hooked() == before
    build(regression(adam))
    assert hooked() == before
    assert not gradients._active


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

    before = hooked()
    threads = [
        threading.Thread(target=run, args=args)
        for args in (('ours', estimator_mgpu.replicate(waiting, devices=2)), ('plain', waiting))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hooked() == before
    barrier = threading.Barrier(1)
    run('alone', waiting)
    assert graphs['plain'] == graphs['alone']
    assert any(name.startswith('tower_1/') for name in graphs['ours'])


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
    assert '2 towers, /device:CPU:0, /device:CPU:1: 3 rows each.' in caplog.text
    build(regression(adam), devices=2, rows=5)
    assert 'evenly, to within one row.' in caplog.text


def test_session_config_keeps_what_it_is_given():
    base = tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(3, base)
    assert config.log_device_placement
    assert config.device_count['CPU'] == 7
    assert base == tf.ConfigProto(log_device_placement=True, device_count={'CPU': 7})
    config = estimator_mgpu.session_config(['/cpu:0', '/cpu:4'])
    assert config.device_count['CPU'] == 5
    assert config.allow_soft_placement


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
