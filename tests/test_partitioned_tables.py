"""Tables in parts, by a partitioner: several devices do as one, and each part stays where it is."""

import re
from collections import Counter

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import check_rule
from estimator_mgpu.partition.rules import selections
from models import LazyAdam, floats, sgd, spec_of, step, weights
from test_rules import SAMPLES as SAMPLES_OF_RULES
from test_rules import Batch
from test_samples import run_python
from towers import compare, compare_predictions, nodes_of_a_step, session

ROWS_OF_TABLE = 11
PARTS = tf.fixed_size_partitioner(3)


def ids_and_labels(rows, steps=3):
    """Batches of three ids and one label for each example; the first leaves out a part."""
    made = []
    for i in range(steps):
        ids = np.random.RandomState(i).randint(0, ROWS_OF_TABLE, [rows, 3])
        if i == 0:
            ids -= ids % 3 == 2
        made.append((ids, floats(rows, 1, seed=i) + 2))
    return made


def adagrad(loss):
    return tf.train.AdagradOptimizer(0.1).minimize(loss, step())


def adam(loss):
    return tf.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss, step())


def lazy_adam(loss):
    return LazyAdam(0.01, epsilon=1e-3).minimize(loss, step())


def from_rows(rows, labels):
    """The loss of a small network on the rows that were looked up for each example."""
    hidden = tf.nn.tanh(tf.reduce_sum(rows, 1) @ weights('hidden', 4, 4))
    return tf.reduce_mean(tf.square(hidden @ weights('output', 4, 1) - labels))


def lookup(strategy, optimize=adagrad, **options):
    """Returns a model_fn that looks rows up in a table of three parts."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [ROWS_OF_TABLE, 4], partitioner=PARTS)
        rows = tf.nn.embedding_lookup(table, features, strategy, **options)
        loss = from_rows(rows, labels)
        return spec_of(mode, loss, optimize(loss))

    return model_fn


@pytest.mark.parametrize(
    ('rows', 'devices', 'static'),
    [(7, 2, True), (7, 4, False), (2, 4, False)],
    ids=['static', 'dynamic', 'fewer examples than devices'],
)
@pytest.mark.parametrize(
    ('strategy', 'optimize'), [('mod', adagrad), ('div', adam)], ids=['mod', 'div']
)
def test_lookup(strategy, optimize, rows, devices, static, behavior):
    compare(lookup(strategy, optimize), ids_and_labels(rows), devices, static=static)


def test_only_rows_that_are_looked_up_are_sent():
    """Ids and rows, and the gradients of these: about as much from each device."""
    width, ids = 64, np.random.RandomState(0).randint(0, 900, [12, 8])

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [900, width], partitioner=tf.fixed_size_partitioner(4))
        rows = tf.nn.embedding_lookup(table, features)
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, [1, 2]) - labels))
        return spec_of(mode, loss, adagrad(loss))

    sent = Counter()
    with tf.Graph().as_default() as graph, session(4) as sess:
        tf.train.get_or_create_global_step()
        batch = tf.constant(ids), tf.zeros([12])
        spec = estimator_mgpu.replicate(model_fn, devices=4)(*batch, tf.estimator.ModeKeys.TRAIN)
        sess.run(tf.global_variables_initializer())
        for node in nodes_of_a_step(sess, spec.train_op):
            name = re.sub(r'edge_\d+_', '', node.attr['tensor_name'].s.decode())
            op, _, index = name.partition(':')
            if node.op == '_Recv' and graph.get_operation_by_name(op).outputs:
                value = sess.run(f'{op}:{index or 0}')
                sent[node.attr['send_device'].s] += value.nbytes

    # Three of four rows are another device's. An id is sent for its row, and for its gradient.
    rows = ids.size * 3 / 4 * (8 + 4 * width)
    assert 1.8 * rows < sum(sent.values()) < 2.2 * rows
    assert max(sent.values()) < 1.5 * sum(sent.values()) / 4


@pytest.mark.parametrize('microbatches', [1, 2])
def test_lookup_with_more_to_do(microbatches):
    """Rows clipped by their norm, ids of [batch, 3], and moments of the rows looked up alone."""
    model_fn = lookup('mod', lazy_adam, max_norm=1.0)
    compare(model_fn, ids_and_labels(9), 2, static=False, microbatches=microbatches)


def experts(features, labels, mode):
    """A mixture of experts: each example goes to one of three networks, and back to its place."""
    which = tf.argmax(features, 1, output_type=tf.int32)
    examples = tf.dynamic_partition(features, which, 3)
    positions = tf.dynamic_partition(tf.range(tf.shape(features)[0]), which, 3)
    outputs = []
    for i, part in enumerate(examples):
        part = part - tf.reduce_mean(part, 0) + tf.sort(part, 0) + tf.ones_like(part)
        part += tf.reduce_sum(tf.gather(features, positions[i]), 1, keepdims=True)
        outputs.append(tf.nn.tanh(part @ weights(f'expert{i}', 3, 4)))
    output = tf.dynamic_stitch(positions, outputs) @ weights('output', 4, 1)
    loss = tf.reduce_mean(tf.square(output - labels))
    return spec_of(mode, loss, sgd(loss))


def examples_for_experts(rows):
    """Batches with examples for each expert, but on some devices for only one or two of them."""
    features = floats(rows, 3)
    features[np.arange(rows), np.arange(rows) * 3 // rows] += 9
    return [(features, floats(rows, 1))] * 2


@pytest.mark.parametrize(
    ('rows', 'devices', 'static', 'microbatches'),
    [(8, 3, True, 1), (8, 3, False, 2), (3, 4, False, 1)],
    ids=['static', 'micro-batches', 'fewer examples than devices'],
)
def test_experts(rows, devices, static, microbatches, behavior):
    compare(experts, examples_for_experts(rows), devices, static=static, microbatches=microbatches)


def test_parts_of_parts():
    """Each part is divided again, and its rows are put together before those of all parts are."""

    def parts_and_positions(rows, column):
        which = tf.cast(rows[:, column] > 0, tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.shape(rows)[0]), which, 2)
        return tf.dynamic_partition(rows, which, 2), positions

    def model_fn(features, labels, mode):
        outputs = []
        outer, positions = parts_and_positions(features, 0)
        for i, part in enumerate(outer):
            inner, positions_in_part = parts_and_positions(part, 1)
            scaled = [rows * weights(f'scale{i}{j}', 3) for j, rows in enumerate(inner)]
            outputs.append(tf.dynamic_stitch(positions_in_part[::-1], scaled[::-1]))
        output = tf.dynamic_stitch(positions, outputs) @ weights('output', 3, 1)
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, [(floats(9, 3), floats(9, 1))] * 2, 4, static=False)


def of_parts_of_ids(features):
    """What belongs to a part of different ids; that of several ids may be the same."""
    ids, places = tf.unique(tf.reshape(features, [-1]))
    part, _ = tf.dynamic_partition(ids % 3, tf.cast(ids // 2 % 2, tf.int32), 2)
    different, places_in_part = tf.unique(part)
    rows = tf.nn.embedding_lookup(tf.get_variable('table', [ROWS_OF_TABLE, 4]), ids)
    more = tf.gather(tf.get_variable('more', [3, 4]), different)
    loss = tf.reduce_sum(tf.square(tf.gather(more, places_in_part) + 1)) + tf.reduce_sum(more)
    return tf.gather(rows, places), loss, different, part


def of_parts_of_parts(features):
    """A table in two parts of two parts each: the gradient is summed by id in each."""
    ids, places = tf.unique(tf.reshape(features, [-1]))
    positions, rows = [], []
    is_odd = tf.cast(ids % 2, tf.int32)
    halves = tf.dynamic_partition(ids, is_odd, 2)
    for i, half in enumerate(tf.dynamic_partition(tf.range(tf.size(ids)), is_odd, 2)):
        which = tf.cast(halves[i] // 2 % 2, tf.int32)
        quarters = tf.dynamic_partition(halves[i], which, 2)
        for j, quarter in enumerate(tf.dynamic_partition(half, which, 2)):
            positions.append(quarter)
            rows.append(tf.gather(tf.get_variable(f'table{i}{j}', [3, 4]), quarters[j] // 4))
    of_ids = tf.dynamic_stitch(positions, rows)
    return tf.gather(of_ids, places), tf.reduce_sum(rows[1]), halves[0], of_ids


@pytest.mark.parametrize('forward', [of_parts_of_ids, of_parts_of_parts])
@pytest.mark.parametrize(('rows', 'devices'), [(7, 3), (2, 3)], ids=['3 towers', 'an empty one'])
def test_parts_of_different_ids(forward, rows, devices, behavior):
    def model_fn(features, labels, mode):
        found, more_loss, *fetched = forward(features)
        loss = from_rows(tf.reshape(found, [-1, 3, 4]), labels) + more_loss
        if mode == tf.estimator.ModeKeys.PREDICT:
            outputs = {f'output{i}': tensor for i, tensor in enumerate(fetched)}
            return tf.estimator.EstimatorSpec(mode, predictions=outputs)
        return spec_of(mode, loss, adagrad(loss))

    _, one = compare(model_fn, ids_and_labels(rows), devices, static=False)
    compare_predictions(model_fn, ids_and_labels(rows), devices, static=False, values=one.values)


def test_positions_are_put_where_they_say():
    def numbers(x):
        which = tf.cast(x > 0, tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.shape(x)[0]), which, 2)
        return tf.dynamic_stitch(positions, positions)

    assert 'DynamicStitch' in check_rule(numbers, floats(7), types=[])


def test_parts_of_two_blocks():
    """A part has the first block's rows of all towers before any of the second block."""

    def part(x):
        both = tf.concat([x, -x], 0)
        return tf.dynamic_partition(both, tf.cast(both > 0, tf.int32), 2)[1]

    sharded = check_rule(part, floats(7), types=[])
    assert sharded and 'DynamicPartition' not in sharded


def test_ops_that_do_without_rows():
    """Each type of op by which parts are sharded takes a batch without rows."""
    samples = [
        sample for name in selections.DO_WITHOUT_ROWS for sample in SAMPLES_OF_RULES.get(name, [])
    ]
    with tf.Graph().as_default() as graph, session(1) as sess:
        results = []
        feed = {}
        for i, sample in enumerate(samples):
            before = len(graph.get_operations())
            batch = Batch()
            with tf.variable_scope(f'sample_{i}'):
                results.append(sample(batch))
            added = graph.get_operations()[before:]
            placeholders = [op.outputs[0] for op in added if op.type == 'Placeholder']
            feed.update(zip(placeholders, [rows[:0] for rows in batch.rows]))
        sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
        flat = tf.nest.flatten(results, expand_composites=True)
        sess.run([result.op for result in flat if isinstance(result, tf.Tensor)], feed)


def pooled(features, labels, mode):
    """Parts that are pooled, by a kernel that ends the process if there are no examples."""
    which = tf.argmax(features, 1, output_type=tf.int32)
    examples = tf.dynamic_partition(features, which, 3)
    positions = tf.dynamic_partition(tf.range(tf.shape(features)[0]), which, 3)
    images = [part[:, :, None, None] * weights('images', 1, 4, 2) for part in examples]
    pools = [tf.layers.flatten(tf.nn.max_pool(image, 2, 2, 'VALID')) for image in images]
    output = tf.dynamic_stitch(positions, pools) @ weights('output', 4, 1)
    loss = tf.reduce_mean(tf.square(output - labels))
    return spec_of(mode, loss, sgd(loss, 0.01))


def test_pooled_parts():
    """Where one device has examples for each part, and another has none for some."""
    compare(pooled, examples_for_experts(8), 3)


def positions_as_numbers(features, which, positions):
    """What positions are in the global batch counts, beyond the order of rows."""
    return tf.reduce_sum(tf.cast(positions[0], tf.float32))


def some_parts_only(features, which, positions):
    """Without the last part, the rows of others are zero."""
    parts = tf.dynamic_partition(features, which, 3)
    return tf.reduce_sum(tf.square(tf.dynamic_stitch(positions[:2], parts[:2])))


def of_another_table(features, which, positions):
    """Rows of a table that has more rows than the batch has examples."""
    return tf.reduce_sum(tf.gather(weights('more', 20, 2), positions[1]))


@pytest.mark.parametrize('part_of_loss', [positions_as_numbers, some_parts_only, of_another_table])
def test_positions_for_something_else(part_of_loss):
    """Each tower's own would be wrong here, so the op that makes them runs once."""

    def model_fn(features, labels, mode):
        which = tf.argmax(features, 1, output_type=tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.shape(features)[0]), which, 3)
        loss = tf.reduce_mean(tf.square(features @ weights('w', 3, 1) - labels))
        loss += part_of_loss(features * weights('scale', 3), which, positions)
        return spec_of(mode, loss, sgd(loss, 0.01))

    compare(model_fn, examples_for_experts(8), 3)


def sparse_ids(features, labels):
    """Sparse ids and their weights; some examples have none."""
    dense = tf.where(features % 4 > 0, features, -tf.ones_like(features))
    ids = tf.sparse.from_dense(dense + 1)
    return tf.SparseTensor(ids.indices, ids.values - 1, ids.dense_shape), labels


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('safe', [True, False], ids=['safe', 'not safe'])
def test_sparse_ids(safe, static):
    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [ROWS_OF_TABLE, 4], partitioner=PARTS)
        if safe:
            rows = tf.nn.safe_embedding_lookup_sparse(table, features, default_id=1)
        else:
            rows = tf.nn.embedding_lookup_sparse(table, features, None, combiner='sum')
        loss = from_rows(rows[:, None], labels)
        return spec_of(mode, loss, adagrad(loss))

    data = ids_and_labels(7)
    if not safe:
        for ids, _ in data:
            ids[:, 0] = 1  # Each example has an id.
    compare(model_fn, data, 3, preprocess=sparse_ids, static=static)


fc = tf.feature_column


def columns(features):
    """An embedding, two that share a table, and a linear model, all with tables of two parts."""
    names = 'abc'
    features = {name: features[:, i : i + 1] for i, name in enumerate(names)}
    a, b, c = (fc.categorical_column_with_identity(name, ROWS_OF_TABLE) for name in names)
    with tf.variable_scope('columns', partitioner=tf.fixed_size_partitioner(2)):
        shared = fc.shared_embedding_columns([b, c], 2)
        rows = fc.input_layer(features, [fc.embedding_column(a, 4), *shared])
        return tf.layers.dense(rows, 1) + fc.linear_model(features, [a, b])


def dense_features(features):
    """A Keras layer of feature columns, which takes the partitioner itself."""
    column = fc.categorical_column_with_identity('a', ROWS_OF_TABLE)
    layer = tf.keras.layers.DenseFeatures([fc.embedding_column(column, 4)], partitioner=PARTS)
    return tf.layers.dense(layer({'a': features}), 1)


@pytest.mark.parametrize('forward', [columns, dense_features])
def test_feature_columns(forward, behavior):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(forward(features) - labels))
        return spec_of(mode, loss, adagrad(loss))

    compare(model_fn, ids_and_labels(7), 2, static=False)


def test_no_device_has_the_whole_table():
    """Neither to initialize, nor to train or save it; with four devices, a part is 25%."""
    lines = run_python('large_table.py', '--megabytes=8', '--devices=4')[-3:]
    percent = {
        phase: int(of_table.rstrip('%')) for phase, _, _, of_table, *_ in map(str.split, lines)
    }
    assert set(percent) == {'initialize', 'train', 'save'}
    assert all(25 <= peak < 32 for peak in percent.values()), percent


def test_warm_start_from_a_whole_table(tmp_path):
    """Each part is cut from the saved table."""
    table = floats(ROWS_OF_TABLE, 4)
    with tf.Graph().as_default(), session(1) as sess:
        saver = tf.train.Saver({'saved': tf.get_variable('saved', initializer=table)})
        sess.run(tf.global_variables_initializer())
        path = saver.save(sess, str(tmp_path / 'model'))

    def model_fn(features, labels, mode):
        spec = lookup('div')(features, labels, mode)
        tf.train.init_from_checkpoint(path, {'saved': 'table'})
        return spec

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        [(ids, labels), *_] = ids_and_labels(7)
        replicated = estimator_mgpu.replicate(model_fn, devices=3)
        spec = replicated(tf.constant(ids), tf.constant(labels), tf.estimator.ModeKeys.TRAIN)
        spec.scaffold.finalize()
        with session(3) as sess:
            sess.run(spec.scaffold.init_op)
            parts = sorted(tf.trainable_variables('table'), key=lambda part: part.op.name)
            found = np.concatenate(sess.run(parts))
        np.testing.assert_array_equal(found, table)
