"""What's fetched from the middle of a graph is the whole batch's, of this very step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.liveness import Liveness
from models import batches, floats, sgd, spec_of, step
from towers import TRAIN, assert_close, nodes_of_a_step, session, tower_of

ROWS, CLASSES = 10, 3


def classifier(features, labels, mode):
    """Dropout, an embedding that the step changes, a softmax, clipped gradients and summaries."""
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
    tf.reduce_max(tf.reshape(hidden, [-1, 2]), 1, name='of_halves')  # two entries an example
    tf.reduce_max(tf.transpose(hidden), 0, name='of_columns')  # examples along dimension 1
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    grads, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(grads, 0.1)
    tf.identity(norm, name='norm')
    for grad, variable in zip(grads, variables):
        tf.identity(tf.convert_to_tensor(grad), f'gradient/{variable.op.name}')
    tf.summary.scalar('largest', tf.reduce_max(features))
    tf.summary.histogram('inputs', tf.identity(features, 'copied'))
    tf.summary.text('count', tf.as_string(tf.shape(features)[0]))
    tf.identity(tf.summary.merge_all(), 'summaries')
    train_op = optimizer.apply_gradients(zip(clipped, variables), step())
    return spec_of(mode, loss, train_op)


NAMES = ['rows', 'hidden', 'dropped', 'logits', 'softmax', 'losses', 'loss', 'best', 'norm']
NAMES += ['gradient/table', 'gradient/w', 'gradient/v', 'summaries', 'of_halves', 'of_columns']


def built(model_fn, towers, rows, **options):
    """The graph of a model_fn, its batch and what a step runs."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(5)
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [rows, 3]), tf.placeholder(tf.float32, [rows, 1])
        if towers:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
        return graph, batch, model_fn(*batch, TRAIN)


@pytest.mark.parametrize('turns', [1, 2])
@pytest.mark.parametrize('rows', [1, 2, 5])
def test_what_is_fetched_has_the_random_numbers_of_the_step(rows, turns):
    """A device without an example computes one that another device has, with other numbers."""

    def noisy(features, labels, mode):
        output = tf.matmul(features, tf.get_variable('w', [3, 2]))
        noise = tf.random_uniform(tf.shape(output))  # without a seed
        loss = tf.reduce_sum(tf.multiply(output, noise, name='noisy'))
        return spec_of(mode, loss, sgd(loss))

    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        spec = estimator_mgpu.replicate(noisy, devices=3, microbatches=turns)(*batch, TRAIN)
        with session(3, microbatches=turns) as sess:
            sess.run(tf.global_variables_initializer())
            feeds = [dict(zip(batch, values)) for values in batches(rows, 3)]
            for feed in feeds:
                fetched, loss = sess.run([graph.get_tensor_by_name('noisy:0'), spec.loss], feed)
                # Numbers of both signs are summed: what is rounded is as large as these.
                assert_close(loss, np.sum(fetched), 1e-5, floor=np.abs(fetched).sum())


@pytest.mark.parametrize(
    'static, towers, rows, turns',
    [
        (True, 3, ROWS, 1),
        (False, 3, ROWS, 1),
        (False, 7, 5, 1),
        (True, 2, ROWS, 2),
        (False, 2, 3, 2),
    ],
    ids=[
        'static',
        'dynamic',
        'fewer rows than devices',
        'static, in turns',
        'fewer rows than towers, in turns',
    ],
)
def test_values_are_those_of_one_device(static, towers, rows, turns):
    found = []
    for devices in (towers, 0):
        rows_known = rows if static else None
        graph, batch, spec = built(classifier, devices, rows_known, microbatches=turns)
        with graph.as_default(), session(devices, microbatches=turns) as sess:
            sess.run(tf.global_variables_initializer())
            tensors = {name: graph.get_tensor_by_name(f'{name}:0') for name in NAMES}
            feeds = [dict(zip(batch, values)) for values in batches(rows, 3)]
            found.append([sess.run([tensors, spec.loss, spec.train_op], f)[:2] for f in feeds])
    assert_close(*found, 1e-5)
    [(first, loss), *others] = found[0]
    assert_close(loss, first['loss'], 1e-6)  # The same losses are added in another order.
    assert 0.1 < np.mean(first['dropped'] != 0) < 0.9
    assert not any(np.array_equal(first['rows'], other['rows']) for other, _ in others)


def random_ops(features, labels, mode):
    """Layers, loops, branches and random numbers, some of them with seeds of their own."""
    net = tf.layers.dense(features, 4, tf.nn.tanh)
    net = tf.layers.batch_normalization(tf.layers.dropout(net, 0.5, training=True), training=True)
    net += tf.random.normal(tf.shape(net), seed=3) + tf.random.uniform([4])
    _, net = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.sin(x)), [0, net])
    net = tf.cond(tf.reduce_mean(net) > 0, lambda: net, lambda: 2 * tf.nn.dropout(net, rate=0.5))
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, tf.train.AdamOptimizer().minimize(loss, step()))


def listed(graph, count=None):
    """The names, types and seeds of a graph's ops, in the order in which they were made."""
    seeds = ('seed', 'seed2')
    return [
        (op.name, op.type, *[op.get_attr(seed) for seed in seeds if seed in op.node_def.attr])
        for op in graph.get_operations()[:count]
    ]


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
@pytest.mark.parametrize('model_fn', [classifier, random_ops], ids=lambda f: f.__name__)
def test_ops_are_those_of_an_undecorated_call(model_fn, rows, behavior):
    one = listed(built(model_fn, 0, rows)[0])
    assert len(one) > 100
    for towers in (1, 2):
        graph, _, _ = built(model_fn, towers, rows)
        assert listed(graph, len(one)) == one
        copied = [op for op in graph.get_operations() if tower_of(op.name) == 1]
        assert (len(copied) > 20) == (towers > 1)


@pytest.mark.parametrize('turns', [1, 2])
@pytest.mark.parametrize('rows', [24, None], ids=['static', 'dynamic'])
def test_products_are_gathered_for_fetches_and_activations_computed_again(rows, turns):
    graph, _, spec = built(classifier, 2, rows, microbatches=turns)
    of_step = graphs.ancestors([spec.train_op, spec.loss.op])
    hidden = graphs.ancestors([graph.get_operation_by_name('hidden')])
    by_users_ops = {op.type for op in hidden - of_step if tower_of(op.name) is None}
    assert 'Tanh' in by_users_ops and 'MatMul' not in by_users_ops

    copies = {op.type for op in graph.get_operations() if tower_of(op.name) == 1}
    gathered = {t.op.type for op in hidden - of_step for t in op.inputs if tower_of(t.op.name) == 1}
    assert gathered == {'MatMul'} and copies > {'MatMul', 'Tanh'}


@pytest.mark.parametrize('rows', [24, None], ids=['static', 'dynamic'])
def test_more_turns_add_no_gathers_for_fetches(rows):
    """Each device gathers the shards of its turns, however many, and one gathers those of all."""
    counts = []
    for turns in (1, 2, 4):
        graph, _, spec = built(random_ops, 2, rows, microbatches=turns)
        of_step = graphs.ancestors([spec.train_op])
        gathers = {op for op in graph.get_operations() if op.type == 'ConcatV2'}
        counts.append(len(gathers - of_step))
    assert 0 < counts[0] <= counts[1] == counts[2]


def stateful(features, labels, mode):
    """Variables are read by a product, by a lookup, in a loop and by a function, which writes."""
    ids = tf.cast(tf.abs(features[:, 0]) * 10, tf.int32) % 7
    table = tf.get_variable('table', initializer=floats(7, 4))
    count = tf.get_variable('count', initializer=0.0, use_resource=True, trainable=False)
    w = tf.get_variable('w', initializer=floats(4, 4), use_resource=True)

    @tf.function
    def counted(net):
        count.assign_add(1.0)
        return tf.matmul(net, w)

    ones = tf.ones_initializer()
    dense = tf.layers.dense(features, 4, kernel_initializer=ones, name='dense')
    net = tf.gather(table, ids, name='rows') + dense
    _, net = tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w))), [0, net], name='loop'
    )
    called = counted(net)
    output = tf.layers.dense(called, 1, kernel_initializer=ones, name='output')
    loss = tf.losses.mean_squared_error(labels, output)
    tensors = [net, called, *tf.gradients(loss, [net, features])]
    for tensor in tensors:
        tf.add_to_collection('made', tensor)
    with tf.control_dependencies([tf.group(*tensors)]):
        return spec_of(mode, loss, sgd(loss, 0.5))


FETCHED = ['rows', 'dense/BiasAdd', 'dense/MatMul', 'output/BiasAdd']
STATEFUL = {
    'v2': {'rows', 'StatefulPartitionedCall'},
    'v1': {'rows', 'StatefulPartitionedCall', 'loop/Exit_1', *FETCHED},  # by reference variables
}


@pytest.mark.parametrize('finalized, turns', [(True, 1), (False, 2)])
def test_what_touches_state_does_not_run_again_if_it_is_fetched(behavior, finalized, turns):
    """An op that reads variables might do so after the update, and one that writes would again."""
    found = []
    for towers in (2, 0):
        graph, batch, spec = built(stateful, towers, None, microbatches=turns)
        with graph.as_default(), session(towers, microbatches=turns) as sess:
            sess.run(tf.global_variables_initializer())
            fetches = [[f'{name}:0' for name in FETCHED], tf.get_collection('made')]
            call = graph.get_operation_by_name('StatefulPartitionedCall')
            with tf.control_dependencies([call]):
                later = [tf.reduce_sum(graph.get_tensor_by_name(name)) for name in fetches[0]]
            if finalized:
                graph.finalize()
            feeds = [dict(zip(batch, values)) for values in batches(ROWS, 3)]
            fetches = [*fetches, later, call, spec.train_op]
            found.append([sess.run(fetches, feed)[:3] for feed in feeds])
            [count] = [v for v in tf.global_variables() if v.op.name == 'count']
            assert sess.run(count) == len(feeds)
            ran = {node.name for node in nodes_of_a_step(sess, fetches, feeds[0])}
            assert ran.isdisjoint(STATEFUL[behavior]) if towers else ran >= STATEFUL[behavior]
    assert_close(*found, 1e-5)


def test_later_ops_have_values_of_each_model_of_a_graph():
    def read(name):
        def model_fn(features):
            table = tf.get_variable(name, initializer=floats(7, 4), use_resource=True)
            ids = tf.cast(features[:, 0], tf.int32)
            rows = tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=tf.float32)
            return tf.estimator.EstimatorSpec('infer', predictions=rows)

        return estimator_mgpu.replicate(model_fn, devices=2)

    with tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [None, 1])
        later = []
        for name in ('one', 'two'):
            read(name)(features)
            rows = graph.get_operation_by_name('ResourceGather' + ('_1' if name == 'two' else ''))
            later.append(tf.reduce_sum(rows.outputs[0]))
        graph.finalize()
        for total in later:
            assert 'replicate' in total.op.inputs[0].name


def recurrent(features, labels, mode):
    """Loops and branches, batch normalization, dropout and Adam."""
    steps = tf.reshape(tf.tile(features, [1, 4]), [-1, 4, 3])
    cell = tf.nn.rnn_cell.LSTMCell(5, initializer=tf.constant_initializer(floats(8, 20)))
    net = tf.nn.dynamic_rnn(cell, steps, dtype=tf.float32)[0][:, -1]
    net = tf.layers.batch_normalization(net, training=True)
    w = tf.get_variable('w', initializer=floats(5, 5))
    _, net = tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w))), [0, net]
    )
    net = tf.nn.dropout(net, rate=0.5, seed=3)
    double = lambda: 2 * tf.matmul(net, w)  # noqa: E731
    net = tf.cond(tf.reduce_mean(net) > 0, double, lambda: tf.matmul(net, w))
    loss = tf.losses.mean_squared_error(labels, tf.reduce_sum(net, 1, keepdims=True))
    with tf.control_dependencies([tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))]):
        return spec_of(mode, loss, tf.train.AdamOptimizer().minimize(loss, step()))


def tensors_of_a_step(graph, train_op):
    """Names the numbers that a step computes and that can be fetched.

    What is in a variable isn't among them: on one device, too, it may be fetched after the update.
    """
    liveness = Liveness(graph.get_operations())
    names = []
    for op in graphs.ancestors([train_op]):
        is_read = op.type == 'ReadVariableOp' or any(map(graphs.is_reference_variable, op.inputs))
        if is_read or op.type in ('Enter', 'Placeholder') or not graph.is_fetchable(op):
            continue
        for tensor in op.outputs:
            is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
            is_value = is_number and not graphs.is_reference_variable(tensor)
            if is_value and not liveness.output_may_be_dead(tensor):
                names.append(tensor.name)
    return sorted(names)


@pytest.mark.parametrize('turns', [1, 2])
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('model_fn', [classifier, stateful, recurrent], ids=lambda f: f.__name__)
def test_any_tensor_can_be_fetched(model_fn, static, turns, behavior):
    rows = ROWS if static else None
    one = built(model_fn, 0, rows)
    names = tensors_of_a_step(one[0], one[2].train_op)
    assert len(names) > 100

    found = []
    for graph, batch, spec in (built(model_fn, 2, rows, microbatches=turns), one):
        with graph.as_default(), session(2, microbatches=turns) as sess:
            sess.run(tf.global_variables_initializer())
            feeds = [dict(zip(batch, values)) for values in batches(ROWS, 2)]
            found.append([sess.run([names, spec.train_op], feed)[0] for feed in feeds])
    for ours, expected in zip(*found):
        for name, value, expected_value in zip(names, ours, expected):
            assert_close(value, expected_value, 1e-4, name, floor=0.3)


def test_a_function_writes_though_only_its_output_is_fetched(behavior):
    def model_fn(features):
        count = tf.get_variable('count', initializer=0.0, use_resource=True)

        @tf.function
        def counted(net):
            count.assign_add(1.0)
            return net * 2.0

        return tf.estimator.EstimatorSpec('infer', predictions=counted(features))

    with tf.Graph().as_default(), session(3) as sess:
        doubled = estimator_mgpu.replicate(model_fn, devices=3)(tf.ones([6, 1])).predictions
        [count] = tf.global_variables()
        sess.run(count.initializer)
        for _ in range(2):
            assert sess.run(doubled).tolist() == [[2.0]] * 6
        assert sess.run(count) == 2.0
