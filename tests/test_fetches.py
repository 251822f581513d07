"""What's fetched from the middle of a graph is the whole batch's, of this very step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, floats, spec_of, step
from towers import TRAIN, behavior_of, session

ROWS, CLASSES = 10, 3
SIZES = [(True, 3), (False, 3), (False, 7)]
BATCH = pytest.mark.parametrize(
    'static, towers', SIZES, ids=['static', 'dynamic', 'fewer rows than devices']
)


def classifier(features, labels, mode):
    """Unseeded dropout, an embedding that the step changes, a softmax and clipped gradients."""
    ids = tf.cast(tf.abs(features[:, 0]) * 10, tf.int32) % 7
    table = tf.get_variable('table', initializer=floats(7, 4))
    rows = tf.nn.embedding_lookup(table, ids, name='rows')
    w = tf.get_variable('w', initializer=floats(3, 4))
    v = tf.get_variable('v', initializer=floats(4, CLASSES))
    hidden = tf.identity(tf.tanh(features @ w), 'hidden')
    dropped = tf.identity(tf.nn.dropout(hidden + rows, rate=0.5), name='dropped')
    logits = tf.matmul(dropped, v, name='logits')
    tf.nn.softmax(logits, name='softmax')
    classes = tf.cast(tf.abs(labels[:, 0]) * 10, tf.int32) % CLASSES
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
    loss = tf.reduce_mean(tf.identity(losses, 'losses'), name='loss')
    tf.argmax(logits, 1, name='best')
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    grads, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(grads, 0.1)
    tf.identity(norm, name='norm')
    for grad, variable in zip(grads, variables):
        tf.identity(tf.convert_to_tensor(grad), f'gradient/{variable.op.name}')
    train_op = optimizer.apply_gradients(zip(clipped, variables), step())
    return spec_of(mode, loss, train_op)


NAMES = ['rows', 'hidden', 'dropped', 'logits', 'softmax', 'losses', 'loss', 'best', 'norm']


def softmax(x):
    shares = np.exp(x - x.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def run(model_fn, towers, fetches, static=True, steps=3, rows=ROWS):
    """Yields, for each step, the batch, variables before it and what was fetched in it by name."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        size = rows if static else None
        batch = tf.placeholder(tf.float32, [size, 3]), tf.placeholder(tf.float32, [size, 1])
        spec = estimator_mgpu.replicate(model_fn, devices=towers)(*batch, TRAIN)
        variables = {v.op.name: v for v in tf.global_variables()}
        tensors = {name: graph.get_tensor_by_name(f'{name}:0') for name in fetches}
        with session(towers) as sess:
            sess.run(tf.global_variables_initializer())
            for values in batches(rows, steps):
                before = sess.run(variables)
                found = sess.run([tensors, spec.loss, spec.train_op], dict(zip(batch, values)))
                yield values, before, found[0], found[1]


@BATCH
def test_values_of_one_step_fit_together(static, towers):
    """All is worked out again from what was fetched and what variables were before."""
    rows = 5 if towers > 5 else ROWS
    shown = [*NAMES, 'gradient/v', 'gradient/w', 'gradient/table']
    for (x, y), before, found, loss in run(classifier, towers, shown, static, rows=rows):
        ids = (np.abs(x[:, 0]) * 10).astype(int) % 7
        np.testing.assert_allclose(found['hidden'], np.tanh(x @ before['w']), rtol=1e-4, atol=1e-6)
        # Not those of the next step: the lookup isn't ordered before the update.
        np.testing.assert_array_equal(found['rows'], before['table'][ids])
        dropped = found['dropped']
        kept = dropped != 0
        assert 0.1 < kept.mean() < 0.9
        expected = 2 * (found['hidden'] + found['rows'])
        np.testing.assert_allclose(dropped[kept], expected[kept], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found['logits'], dropped @ before['v'], rtol=1e-4, atol=1e-5)
        shares = softmax(found['logits'])
        np.testing.assert_allclose(found['softmax'], shares, rtol=1e-4)
        np.testing.assert_array_equal(found['best'], found['logits'].argmax(1))
        classes = (np.abs(y[:, 0]) * 10).astype(int) % CLASSES
        losses = -np.log(shares[np.arange(rows), classes])
        np.testing.assert_allclose(found['losses'], losses, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found['loss'], losses.mean(), rtol=1e-4)
        np.testing.assert_allclose(loss, losses.mean(), rtol=1e-4)
        upstream = (shares - np.eye(CLASSES)[classes]) / rows
        of_v = dropped.T @ upstream
        np.testing.assert_allclose(found['gradient/v'], of_v, rtol=1e-3, atol=1e-5)
        of_sum = upstream @ before['v'].T * 2 * kept
        of_w = x.T @ (of_sum * (1 - found['hidden'] ** 2))
        np.testing.assert_allclose(found['gradient/w'], of_w, rtol=1e-3, atol=1e-5)
        of_table = np.zeros([7, 4])
        np.add.at(of_table, ids, of_sum)
        np.testing.assert_allclose(found['gradient/table'], of_table, rtol=1e-3, atol=1e-5)


def test_a_hook_that_fetches_by_name(tmp_path):
    """Under an Estimator: the loss is the mean of the losses that the hook was given."""
    seen = []

    class Hook(tf.train.SessionRunHook):
        def before_run(self, run_context):
            return tf.train.SessionRunArgs(['losses:0', 'softmax:0', 'loss:0'])

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    def input_fn():
        x, y = map(np.concatenate, zip(*batches(ROWS, 4)))
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS - 1)

    estimator = estimator_mgpu.Estimator(classifier, str(tmp_path), devices=3)
    logged = tf.train.LoggingTensorHook({'mean': 'loss:0', 'rows': 'best:0'}, every_n_iter=1)
    estimator.train(input_fn, hooks=[Hook(), logged])
    assert [len(losses) for losses, _, _ in seen] == [9, 9, 9, 9, 4]
    for losses, shares, loss in seen:
        assert shares.shape == (len(losses), CLASSES)
        np.testing.assert_allclose(losses.mean(), loss, rtol=1e-5)


def test_summaries_are_of_the_whole_batch():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(features @ tf.get_variable('w', initializer=floats(3, 1)))
        tf.summary.scalar('largest', tf.reduce_max(features))
        tf.summary.histogram('rows', tf.identity(features, 'copied'))
        tf.summary.text('count', tf.as_string(tf.shape(features)[0]))
        tf.get_default_graph().add_to_collection('merged', tf.summary.merge_all())
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.5).minimize(loss, step()))

    with tf.Graph().as_default() as graph, session(3) as sess:
        tf.train.get_or_create_global_step()
        x = tf.placeholder(tf.float32, [None, 3])
        estimator_mgpu.replicate(model_fn, devices=3)(x, None, TRAIN)
        sess.run(tf.global_variables_initializer())
        [merged] = graph.get_collection('merged')
        given = floats(8, 3)
        summary = tf.Summary.FromString(sess.run(merged, {x: given}))
    found = {value.tag: value for value in summary.value}
    assert found['largest'].simple_value == pytest.approx(given.max())
    assert found['rows'].histo.num == given.size
    assert found['rows'].histo.sum == pytest.approx(given.sum(), rel=1e-4)
    assert found['count'].tensor.string_val[0] == b'8'


def random_ops(features, labels, mode):
    """Layers, loops, branches and random numbers, some of them with seeds of their own."""
    net = tf.layers.dense(features, 4, tf.nn.tanh)
    net = tf.layers.batch_normalization(tf.layers.dropout(net, 0.5, training=True), training=True)
    net += tf.random.normal(tf.shape(net), seed=3) + tf.random.uniform([4])
    _, net = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.sin(x)), [0, net])
    net = tf.cond(tf.reduce_mean(net) > 0, lambda: net, lambda: 2 * tf.nn.dropout(net, rate=0.5))
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    tf.summary.scalar('loss', loss)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, tf.train.AdamOptimizer().minimize(loss, step()))


def listed(graph, count=None):
    """The names, types and seeds of a graph's ops, in the order in which they were made."""
    seeds = ('seed', 'seed2')
    return [
        (op.name, op.type, *[op.get_attr(seed) for seed in seeds if seed in op.node_def.attr])
        for op in graph.get_operations()[:count]
    ]


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('model_fn', [classifier, random_ops], ids=lambda f: f.__name__)
@pytest.mark.parametrize('version', ['v2', 'v1'])
def test_ops_are_those_of_an_undecorated_call(model_fn, static, version):
    def build(fn):
        with tf.Graph().as_default() as graph, behavior_of(version):
            tf.set_random_seed(5)
            tf.train.get_or_create_global_step()
            rows = ROWS if static else None
            batch = tf.placeholder(tf.float32, [rows, 3]), tf.placeholder(tf.float32, [rows, 1])
            fn(*batch, TRAIN)
            return graph

    one = listed(build(model_fn))
    assert len(one) > 100
    for towers in (1, 2, 5):
        graph = build(estimator_mgpu.replicate(model_fn, devices=towers))
        assert listed(graph, len(one)) == one
        copied = [op for op in graph.get_operations() if op.name.startswith('replicate/tower_1/')]
        assert (len(copied) > 20) == (towers > 1)
