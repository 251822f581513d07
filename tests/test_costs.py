"""What several devices add to a graph and to a step."""

import gc
import weakref
from collections import Counter

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import graphs
from models import floats, spec_of, step
from towers import NAMES, tower_of

ROWS = 24


def network(features, labels, mode):
    """Three layers, with batch normalization whose updates come before the gradients."""
    net = features
    for size in (5, 7):
        net = tf.layers.dense(net, size, use_bias=False)
        net = tf.nn.relu(tf.layers.batch_normalization(net, training=True))
    loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))


def perceptron(features, labels, mode):
    net = tf.nn.dropout(tf.layers.dense(features, 5, tf.nn.tanh), rate=0.2, seed=3)
    net = tf.layers.dense(net, 7, tf.nn.tanh)
    loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))


def ops_of_a_step(model_fn, towers, rows=ROWS, sparse=False, **options):
    """Returns the ops that a step runs, constants aside."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        made = tf.sparse.placeholder(tf.int32, [None, None])
        features = made if sparse else tf.placeholder(tf.float32, [rows, 3])
        batch = features, tf.placeholder(tf.float32, [rows, 1])
        if towers:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
        spec = model_fn(*batch, tf.estimator.ModeKeys.TRAIN)
        return [op for op in graphs.ancestors([spec.train_op, spec.loss.op]) if op.type != 'Const']


def types(ops):
    return Counter(op.type for op in ops)


def of_tower(ops, i):
    return types(op for op in ops if tower_of(op.name) == i)


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
@pytest.mark.parametrize('model_fn', [perceptron, network], ids=lambda f: f.__name__)
def test_towers_run_what_one_device_runs(model_fn, rows):
    """All towers the same, and no heavy op of one device is run but in towers."""
    ops = ops_of_a_step(model_fn, 4, rows)
    one = types(ops_of_a_step(model_fn, 0, rows))
    own = of_tower(ops, 1)
    assert own == of_tower(ops, 2) == of_tower(ops, 3)
    # One device has the features' gradient, too, which nobody asked for.
    unused = {'MatMul': 1}
    assert own['MatMul'] + 1 == one['MatMul'] == 3 + 2 * 3
    heavy = ('MatMul', 'BiasAdd', 'BiasAddGrad', 'Tanh', 'TanhGrad', 'Relu', 'ReluGrad', 'Rsqrt')
    assert own['SelectV2'] == (2 if model_fn is perceptron else 0)  # Dropout's, and its gradient's.
    for kind in heavy:
        whole = sum(op.type == kind and tower_of(op.name) is None for op in ops)
        assert own[kind] + whole == one[kind] - unused.get(kind, 0), kind
        assert not whole or kind == 'Rsqrt', kind


@pytest.mark.parametrize('towers', [2, 4, 8])
def test_a_step_slices_and_sums(towers):
    """Beyond the towers' own: slices of features and labels, packs, a sum of each variable."""
    ops = ops_of_a_step(perceptron, towers)
    added = [op for op in ops if NAMES.is_added(op.name) and tower_of(op.name) is None]
    sums = [op for op in added if op.type == 'AddN']
    # Three layers' kernels and biases, and the loss; those of a device share a sum.
    assert sum(op.outputs[0].shape.num_elements() for op in sums) == 20 + 42 + 8 + 1
    assert len(sums) <= 6 + 1 and all(len(op.inputs) == towers for op in sums)
    packs = ('ConcatV2', 'Reshape', 'SplitV')
    rest = [op for op in added if op not in sums and op.type not in ('StridedSlice', *packs)]
    assert all(t.shape.rank == 0 for op in rest for t in op.outputs)


def test_a_sum_of_sums_is_reduced_once():
    def regularized(features, labels, mode):
        loss = tf.reduce_sum(tf.square(features)) + tf.reduce_sum(tf.abs(labels))
        return spec_of(mode, loss, tf.no_op())

    ops = ops_of_a_step(regularized, 2)
    assert [op.type for op in ops].count('AddN') == 1


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
def test_no_tower_waits_for_another(rows):
    """But for sums that the model asks for: with clipping, of gradients only."""

    def clipped(features, labels, mode):
        net = tf.layers.dense(tf.layers.dense(features, 5, tf.nn.tanh), 7, tf.nn.tanh)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
        optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
        grads, variables = zip(*optimizer.compute_gradients(loss))
        grads, _ = tf.clip_by_global_norm(grads, 1.0)
        return spec_of(mode, loss, optimizer.apply_gradients(zip(grads, variables), step()))

    ops = ops_of_a_step(clipped, 3, rows)
    kinds = ('MatMul', 'BiasAddGrad', 'TanhGrad')
    ends = [op for op in ops if tower_of(op.name) is not None and op.type in kinds]
    assert len(ends) == 3 * (8 + 3 + 2)
    for op in ends:
        others = {tower_of(other.name) for other in graphs.ancestors([op]) if other in ends}
        assert others <= {tower_of(op.name)}, op.name


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
def test_no_images_are_gathered_for_their_size(rows):
    """Which gradients of convolutions ask for by one op along with the kernel's."""

    def convolutional(features, labels, mode):
        images = tf.tile(features[:, :, None, None], [1, 1, 3, 2])
        for filters in (4, 5):
            images = tf.nn.tanh(tf.layers.conv2d(images, filters, 2))
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(images, [1, 2, 3])[:, None] - labels))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    ops = ops_of_a_step(convolutional, 4, rows)
    gathered = [op for op in ops if op.type == 'ConcatV2' and tower_of(op.name) is None]
    assert all(op.outputs[0].shape.rank < 2 for op in gathered)
    of_model = [op for op in ops if not op.name.startswith('batch/')]  # which counts the examples
    assert not any(op.type == 'ShapeN' for op in of_model)


@pytest.mark.parametrize('sparse', [False, True], ids=['dense', 'sparse'])
@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
def test_what_follows_from_ops_without_a_rule_is_divided_again(rows, sparse):
    """Where it's known to be of rows: here behind embeddings, which are made whole."""

    def embedded(features, labels, mode):
        words = tf.feature_column.categorical_column_with_hash_bucket('word', 10, tf.int32)
        column = tf.feature_column.embedding_column(words, 4)
        ids = features if sparse else tf.cast(features, tf.int32)
        net = tf.feature_column.input_layer({'word': ids}, [column])
        net = tf.layers.dense(tf.layers.dense(net, 5, tf.nn.tanh), 1)
        loss = tf.reduce_mean(tf.square(net - labels))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    ops = ops_of_a_step(embedded, 4, rows, sparse)
    products = [tower_of(op.name) for op in ops if op.type == 'MatMul']
    assert sorted(products) == sorted([*range(4)] * 6)


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
def test_nodes_grow_by_the_same_for_each_tower(rows):
    on_first = {'variables': 'first'}  # Where they are spread, packs grow with their devices, too.
    counts = {n: len(ops_of_a_step(network, n, rows, **on_first)) for n in (2, 3, 4, 8)}
    further = counts[3] - counts[2]
    assert counts[4] - counts[3] == further
    assert counts[8] - counts[4] == 4 * further
    assert further < 0.7 * len(ops_of_a_step(network, 0, rows))


def test_no_graph_is_left(tmp_path):
    """All that was made for a model goes with its graph."""
    graphs = []

    class Hook(tf.train.SessionRunHook):
        def begin(self):
            graphs.append(weakref.ref(tf.get_default_graph()))

    def input_fn():
        return tf.data.Dataset.from_tensors((floats(ROWS, 3), floats(ROWS, 1))).repeat()

    estimator = estimator_mgpu.Estimator(network, str(tmp_path), devices=3)
    for _ in range(2):
        estimator.train(input_fn, [Hook()], steps=1)
        estimator.evaluate(input_fn, 1, [Hook()])
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 4
