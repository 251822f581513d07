"""Each machine reads its own part of a batch: three servers, of two devices each."""

import zlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import machine_input, saving
from estimator_mgpu.tf_internals import graphs
from models import adam, floats, regression, sgd, spec_of, weights
from test_samples import SAMPLES
from towers import assert_close, session_config

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import benchmark_models

TASKS = ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1']
DEVICES = [f'{task}/device:CPU:{i}' for task in TASKS for i in range(2)]
TRAIN = tf.estimator.ModeKeys.TRAIN
# How many rows each machine reads in each step.
PARTS = {
    'even': [[4, 4], [4, 4], [4, 4]],
    'uneven': [[5, 1, 2], [3, 7], [4]],
    'of one machine': [[], [5, 3], []],
    'few': [[1], [], [1]],
    'more steps on the last': [[2], [3, 3], [1, 4, 6, 1]],
}


def steps(sizes):
    """One machine's features and labels, step by step."""
    return [
        ({'x': floats(n, 3, seed=10 * i), 'name': np.full([n], f'row{n}')}, floats(n, 1, seed=i))
        for i, n in enumerate(sizes)
    ]


def dataset_of(elements, like=None):
    """A dataset of batches of several sizes, of which there may be none."""
    found = tf.data.Dataset.from_tensors(like or steps([2])[0]).take(0)
    for element in elements:
        found = found.concatenate(tf.data.Dataset.from_tensors(element))
    return found


def joined(parts):
    """What one device reads: in each step all machines' rows."""
    return concatenated([steps(sizes) for sizes in parts], steps([0])[0])


def concatenated(parts, empty):
    """The elements of all machines; one that has no more has empty ones."""
    count = max(map(len, parts))
    padded = [part + [empty] * (count - len(part)) for part in parts]
    return [
        tf.nest.map_structure(lambda *rows: np.concatenate(rows), *each) for each in zip(*padded)
    ]


def model_fn(features, labels, mode):
    """A loss over pairs of rows, batch normalization, dropout, and strings."""
    known = tf.strings.length(features['name'])
    net = tf.matmul(features['x'], weights('w', 3, 8)) + tf.cast(known, tf.float32)[:, None] / 10
    net = tf.nn.dropout(net - tf.reduce_mean(net, 0), rate=0.3, seed=4)
    out = tf.matmul(tf.nn.tanh(net), weights('v', 8, 1))
    loss = tf.reduce_mean(tf.square(out - labels)) + tf.reduce_mean(tf.abs(out - tf.transpose(out)))
    loss += 0.1 * tf.reduce_sum(out) / tf.cast(tf.shape(features['x'])[0], tf.float32)
    # Of two rows without their mean, some gradients cancel, and Adam would blow up their rounding.
    return spec_of(mode, loss, sgd(loss))


def until_the_end(target, fetches, at_end=()):
    """Runs steps of the default graph until input ends; returns what each gave, and `at_end`."""
    initializers = [tf.global_variables_initializer(), tf.tables_initializer()]
    if target:
        saving.place_on_chief(tf.get_default_graph())
    seen = []
    with tf.Session(target, config=session_config(2 if target else 0)) as session:
        session.run(initializers)
        with pytest.raises(tf.errors.OutOfRangeError):
            while True:
                seen.append(session.run(fetches))
        return seen, session.run(at_end)


def train(read, model_fn, target=''):
    """Returns each step's loss, and the variables at the end."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        spec = model_fn(*read(), TRAIN)
        variables = {v.op.name: v for v in tf.global_variables()}
        seen, values = until_the_end(target, [spec.loss, spec.train_op], variables)
        return [loss for loss, _ in seen], values


def read_by_machine(input_fn, tasks=TASKS):
    return machine_input.read(lambda fn: fn(), input_fn, tasks)


def read_parts(parts):
    return read_by_machine(
        lambda input_context: dataset_of(steps(parts[input_context.input_pipeline_id]))
    )


@pytest.mark.parametrize('name', PARTS)
def test_as_one_device_that_reads_the_same_rows(name, three_machines):
    replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES, input='machine')
    losses, ours = train(read_parts(PARTS[name]), replicated, three_machines)
    whole = tf.data.make_one_shot_iterator
    one = train(lambda: whole(dataset_of(joined(PARTS[name]))).get_next(), model_fn)
    assert len(losses) == max(map(len, PARTS[name]))
    assert_close([losses, ours], list(one), 1e-5)


@pytest.mark.parametrize('name', ['few', 'more steps on the last'])
def test_micro_batches(name, three_machines):
    """A machine's turns share what it has read."""

    def model_fn(features, labels, mode):
        net = tf.nn.dropout(tf.matmul(features['x'], weights('w', 3, 8)), rate=0.3, seed=4)
        out = tf.matmul(tf.nn.tanh(net), weights('v', 8, 1))
        loss = tf.reduce_mean(tf.square(out - labels))
        return spec_of(mode, loss, sgd(loss))

    replicated = estimator_mgpu.replicate(
        model_fn, devices=DEVICES, input='machine', microbatches=2
    )
    ours = train(read_parts(PARTS[name]), replicated, three_machines)
    whole = tf.data.make_one_shot_iterator
    one = train(lambda: whole(dataset_of(joined(PARTS[name]))).get_next(), model_fn)
    assert_close(list(ours), list(one), 1e-5)


def test_no_machine_reads_for_others():
    """Nothing but rows of its own, or none, goes to the devices of a machine."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features, labels = read_parts(PARTS['even'])()
        replicated = estimator_mgpu.replicate(regression(adam), devices=DEVICES)
        spec = replicated(features['x'], labels, TRAIN)
        needed = graphs.ancestors([spec.train_op, spec.loss.op])
        assert not {features['x'].op, labels.op} & needed
        read = [op.device for op in needed if op.type == 'IteratorGetNext']
        assert [on for on in sorted(read) if 'CPU:0' in on] == [f'{t}/device:CPU:0' for t in TASKS]


def test_writes_wait_for_all_parts_where_these_are():
    """A counter waits for the parts of all machines, which send no more than a message for that."""

    def model_fn(features, labels, mode):
        spec = regression(sgd)(features, labels, mode)
        counter = tf.get_variable('counter', [], initializer=tf.zeros_initializer())
        return spec._replace(train_op=tf.group(spec.train_op, tf.assign_add(counter, 1.0)))

    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        features, labels = read_parts(PARTS['even'])()
        replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES)
        spec = replicated(features['x'], labels, TRAIN)
        counted = graph.get_operation_by_name('AssignAddVariableOp')
        waiting = [op for op in graphs.ancestors([counted]) if op.name.startswith('batch/is_there')]
        values = [op for op in waiting if op.type == 'Identity']
        assert sorted(op.device for op in values) == sorted(
            2 * [f'{t}/device:CPU:0' for t in TASKS]
        )
        assert all(op.inputs[0].device == op.device for op in values)
        assert spec.train_op


def from_names(next_creator, **options):
    """Creates a variable; one that is trained begins with values that depend on its name."""
    if options['trainable']:
        shape = options['initial_value']().shape.as_list()
        seed = zlib.crc32(options['name'].encode())
        options['initial_value'] = lambda: tf.constant(0.1 * floats(*shape, seed=seed))
    return next_creator(**options)


def test_columns_of_words(three_machines, behavior):
    """Tables, from which each machine looks up what it needs; shares are even, and then uneven."""
    shares = [[4, 4, 4], [5, 1, 2]]
    model = benchmark_models.Model(
        logits=benchmark_models.deepfm(buckets=20, width=4, layers=[8]),
        optimizer=lambda: tf.train.AdagradOptimizer(0.1),
        features=benchmark_models.click_features(words=50),
        classes=2,
        batch=12,
    )

    def model_fn(features, labels, mode):
        with tf.variable_creator_scope(from_names):
            return model.model_fn(features, labels, mode)

    def part_of(machine):
        even, uneven = [model.dataset(sizes[machine], seed=machine).take(2) for sizes in shares]
        return even.concatenate(uneven)

    def read_all():
        parts = tf.data.Dataset.zip(tuple(part_of(machine) for machine in range(3)))
        join = lambda *parts: tf.nest.map_structure(lambda *x: tf.concat(x, 0), *parts)  # noqa: E731
        return tf.data.make_one_shot_iterator(parts.map(join)).get_next()

    replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES, input='machine')
    read = read_by_machine(lambda input_context: part_of(input_context.input_pipeline_id))
    ours = train(read, replicated, three_machines)
    one = train(read_all, model_fn)
    assert len(one[0]) == 4 and len(one[1]) > 4 * 26
    assert_close(list(ours), list(one), 1e-5)


WORDS = np.array(['', 'a', 'bc', 'def', 'gh', 'i'])


def sparse_steps(sizes, seed=0):
    """Features of which some rows are empty, and maybe all; 0 and '' stand for no entry."""
    elements = []
    for step, n in enumerate(sizes):
        random = np.random.RandomState(100 * seed + step)
        ids = random.randint(0, 50, [n, 4]) * random.randint(0, 2, [n, 1])
        words = WORDS[random.randint(0, len(WORDS), [n, 3])]
        elements.append(({'id': ids, 'word': words.astype(object)}, floats(n, 1, seed=seed)))
    return elements


def to_sparse(features, labels):
    """Sparse tensors; one is as wide as its longest row."""
    rows = tf.RaggedTensor.from_tensor(features['id'], padding=tf.constant(0, tf.int64))
    ids = rows.to_sparse()
    weights = ids.with_values(0.1 + tf.cast(ids.values % 7, tf.float32))
    words = tf.sparse.from_dense(features['word'])
    return {'id': ids, 'weight': weights, 'word': words}, labels


def read_sparse(sizes, prepare=to_sparse):
    parts = [sparse_steps(sizes_of_part, seed) for seed, sizes_of_part in enumerate(sizes)]
    [like] = sparse_steps([2])
    return read_by_machine(
        lambda input_context: dataset_of(parts[input_context.input_pipeline_id], like).map(prepare)
    )


def compare_to_one(model_fn, prepare, name, microbatches, target):
    """Trains on machines, and on one device that reads what all of them read."""
    parts = [sparse_steps(sizes, seed) for seed, sizes in enumerate(PARTS[name])]
    [like] = sparse_steps([2])

    def read_all():
        dataset = dataset_of(concatenated(parts, sparse_steps([0])[0]), like).map(prepare)
        return tf.data.make_one_shot_iterator(dataset).get_next()

    replicated = estimator_mgpu.replicate(
        model_fn, devices=DEVICES, input='machine', microbatches=microbatches
    )
    ours = train(read_sparse(PARTS[name], prepare), replicated, target)
    assert_close(list(ours), list(train(read_all, model_fn)), 1e-5)


def lookups(features, labels, mode):
    """Sums of a table's rows, of words, and of values, and what depends on sizes."""
    ids, word_ids = features['id'], tf.sparse.reorder(features['word'])
    table = weights('table', 50, 4)
    of_words = weights('of_words', 20, 4)
    word_ids = word_ids.with_values(tf.strings.to_hash_bucket_fast(word_ids.values, 20))
    lookup = tf.nn.safe_embedding_lookup_sparse
    net = lookup([table], ids, features['weight'], combiner='mean')
    net += lookup([of_words], word_ids, combiner='sqrtn')
    lengths = word_ids.with_values(tf.strings.length(features['word'].values))
    net += tf.cast(tf.sparse.reduce_sum(lengths, 1, keepdims=True), tf.float32)
    width = tf.cast(tf.shape(tf.sparse.to_dense(ids))[1], tf.float32)
    entries = tf.cast(tf.size(ids.values), tf.float32)
    out = tf.matmul(tf.nn.tanh(net), weights('v', 4, 1)) * width
    loss = tf.reduce_mean(tf.square(out - labels)) + tf.reduce_sum(out) / (1 + entries)
    return spec_of(mode, loss, sgd(loss, 0.01))


@pytest.mark.parametrize('microbatches', [1, 2])
@pytest.mark.parametrize('name', PARTS)
def test_sparse_as_one_device(name, microbatches, three_machines, behavior):
    """Machines' parts may differ in width, too."""
    compare_to_one(lookups, to_sparse, name, microbatches, three_machines)


def up_to_last_id(features, labels, mode):
    """A lookup that ends with the last row that has an id."""
    out = tf.nn.embedding_lookup_sparse([weights('table', 50, 1)], features['id'], None)
    loss = tf.reduce_mean(tf.square(out - labels))
    return spec_of(mode, loss, sgd(loss, 0.01))


@pytest.mark.parametrize('model_fn', [lookups, up_to_last_id])
def test_no_machine_reads_sparse_tensors_for_others(model_fn):
    """What joins them, for whoever fetches them, isn't needed."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features, labels = read_sparse(PARTS['even'])()
        spec = estimator_mgpu.replicate(model_fn, devices=DEVICES)(features, labels, TRAIN)
        needed = graphs.ancestors([spec.train_op, spec.loss.op])
        joined = [
            part.op for sparse in features.values() for part in (sparse.indices, sparse.values)
        ]
        assert len(joined) == 6 and not needed.intersection(joined)


def in_other_order(features, labels):
    """Sparse tensors whose entries come last one first."""
    features, labels = to_sparse(features, labels)
    backwards = {
        name: tf.SparseTensor(
            tf.reverse(sparse.indices, [0]), tf.reverse(sparse.values, [0]), sparse.dense_shape
        )
        for name, sparse in features.items()
    }
    return backwards, labels


@pytest.mark.parametrize('prepare', [to_sparse, in_other_order])
def test_entries_of_all_machines(prepare, three_machines):
    """Whoever asks for those of all has them in the order in which machines have them."""

    def model_fn(features):
        ids, words = features['id'], features['word']
        table = tf.reshape(tf.range(100.0), [50, 2])
        different, places = tf.unique(ids.values)
        weighted = tf.nn.safe_embedding_lookup_sparse([table], ids, features['weight'])
        predictions = {
            'shape': tf.identity(ids.dense_shape),
            'indices': tf.identity(ids.indices),
            'words': tf.identity(words.values),
            'rows': tf.gather(table, ids.values),
            'lengths': tf.strings.length(words.values),
            'sorted': tf.sort(ids.values),
            'different': different,
            'places': places,
            'count': tf.shape(ids.indices)[0],
            'weights': tf.sparse.reduce_sum(features['weight'], 1),
            'weighted': weighted,
        }
        return tf.estimator.EstimatorSpec('infer', predictions=predictions)

    found = []
    for fn in (model_fn, estimator_mgpu.replicate(model_fn, devices=DEVICES)):
        with tf.Graph().as_default():
            predictions = fn(read_sparse(PARTS['uneven'], prepare)()[0]).predictions
            found.append(until_the_end(three_machines, predictions)[0])
    one, ours = found
    assert len(one) == 3 and one[0]['shape'][0] == 12
    assert_close(ours, one, 0)


def test_as_many_weights_as_ids_on_each_machine(three_machines):
    """Otherwise those of one machine would belong to ids of another one."""

    def unequal(features, labels):
        features, labels = to_sparse(features, labels)
        weights = features['weight']
        others = tf.sparse.retain(weights, tf.range(tf.size(weights.values)) > 0)
        return {**features, 'weight': others}, labels

    replicated = estimator_mgpu.replicate(lookups, devices=DEVICES, input='machine')
    message = r'same number of entries.*feature .+id.+, feature .+weight.+ \[(\d+) (?!\1)\d+\]'
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(read_sparse(PARTS['even'], unequal), replicated, three_machines)


def to_ragged(features, labels):
    """Ragged tensors; values may have a dimension more, and row splits may be int32."""
    ids = tf.RaggedTensor.from_tensor(features['id'], padding=tf.constant(0, tf.int64))
    words = tf.RaggedTensor.from_tensor(features['word'], padding='')
    vectors = ids.with_values(tf.cast(tf.stack([ids.values, -ids.values], 1), tf.float32) / 50)
    return {'id': ids, 'word': words.with_row_splits_dtype(tf.int32), 'vector': vectors}, labels


def of_ragged(features, labels, mode):
    """Sums of a table's rows, of words, and of vectors, and what depends on sizes."""
    ids, words, vectors = (features[name] for name in ('id', 'word', 'vector'))
    of_ids = tf.gather(weights('table', 50, 4), ids)
    net = tf.reduce_sum(of_ids, 1) + tf.reduce_max(of_ids.to_tensor(shape=[None, 3, 4]), 1)
    word_ids = tf.ragged.map_flat_values(tf.strings.to_hash_bucket_fast, words, 20).to_sparse()
    of_words = weights('of_words', 20, 4)
    net += tf.nn.safe_embedding_lookup_sparse([of_words], word_ids, combiner='sqrtn')
    net += tf.matmul(tf.reduce_sum(vectors.to_tensor(), 1), weights('u', 2, 4))
    width = tf.cast(tf.shape(ids.to_tensor())[1], tf.float32)
    values = tf.cast(tf.size(ids.values) + tf.cast(words.nrows(), tf.int32), tf.float32)
    out = tf.matmul(tf.nn.tanh(net), weights('v', 4, 1)) * width
    loss = tf.reduce_mean(tf.square(out - labels)) + tf.reduce_sum(out) / (1 + values)
    return spec_of(mode, loss, sgd(loss, 0.01))


@pytest.mark.parametrize('microbatches', [1, 2])
@pytest.mark.parametrize('name', PARTS)
def test_ragged_as_one_device(name, microbatches, three_machines, behavior):
    """Some rows have no values, nor have some machines, which may differ in their longest row."""
    compare_to_one(of_ragged, to_ragged, name, microbatches, three_machines)


def sums_of_rows(features, labels, mode):
    """Sums of rows, also filled up, and what asks for their lengths, and how many there are."""
    ids = features['id']
    net = tf.gather(weights('table', 7, 1), ids % 7).to_tensor(default_value=0.5)
    net = tf.reduce_sum(net, 1) + tf.reduce_sum(features['vector'].to_tensor(), [1, 2])[:, None]
    lengths = tf.strings.length(features['word'].to_tensor())
    net += tf.cast(tf.reduce_sum(lengths, 1, keepdims=True), tf.float32)
    lengths = tf.cast(ids.row_lengths(), tf.float32)[:, None]
    net += tf.reduce_sum(features['vector'], 1)[:, :1] / (1 + lengths)
    rows = tf.cast(tf.shape(ids.row_splits)[0] - 1, tf.float32)
    loss = tf.reduce_mean(tf.square(net - labels)) + tf.reduce_sum(net) / rows
    return spec_of(mode, loss, sgd(loss, 0.01))


def test_no_machine_reads_ragged_tensors_for_others():
    """Neither values nor row splits are joined."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features, labels = read_sparse(PARTS['even'], to_ragged)()
        spec = estimator_mgpu.replicate(sums_of_rows, devices=DEVICES)(features, labels, TRAIN)
        needed = graphs.ancestors([spec.train_op, spec.loss.op])
        joined = [t.op for ragged in features.values() for t in (ragged.values, ragged.row_splits)]
        assert len(joined) == 6 and not needed.intersection(joined)


def test_values_of_ragged_tensors_of_all_machines(three_machines):
    """Whoever asks for those of all has them in the order in which machines have them."""

    def model_fn(features):
        ids, words = features['id'], features['word']
        predictions = {
            'splits': tf.identity(words.row_splits),
            'words': tf.identity(words.values),
            'rows': tf.gather(tf.reshape(tf.range(100.0), [50, 2]), ids.values),
            'sorted': tf.sort(ids.values),
            'lengths': ids.row_lengths(),
            'numbers': words.value_rowids(),
            'sums': tf.reduce_sum(features['vector'], 1),
            'first': ids[:, :2].to_tensor(),
            'longest': ids.bounding_shape(),
            'dense': tf.square(features['dense']),
        }
        return tf.estimator.EstimatorSpec('infer', predictions=predictions)

    found = []
    for fn in (model_fn, estimator_mgpu.replicate(model_fn, devices=DEVICES)):
        with tf.Graph().as_default():
            features, labels = read_sparse(PARTS['uneven'], to_ragged)()
            predictions = fn({**features, 'dense': labels}).predictions
            found.append(until_the_end(three_machines, predictions)[0])
    one, ours = found
    assert len(one) == 3 and len(one[0]['splits']) == 13
    assert_close(ours, one, 0)


def test_values_with_row_splits_of_another_feature(three_machines):
    """Some belong to rows of the next machine then, so they go through the chief."""
    rows = [[[1, 2], [3]], [[4]], [[5], []]], [[[0], [0]], [[0, 0]], [[], [0]]]

    def input_fn(input_context=None):
        own = [of_machines[input_context.input_pipeline_id] for of_machines in rows]
        x, y = (tf.ragged.constant(of_rows, tf.float32, ragged_rank=1) for of_rows in own)
        dense = np.ones(len(own[0]), np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y, dense)).batch(2)

    def model_fn(features):
        ragged = features['ragged']
        lengths = tf.cast(ragged.row_lengths(), tf.float32)
        sums = tf.reduce_sum(ragged.to_tensor() ** 2, 1) + lengths * features['dense']
        return tf.estimator.EstimatorSpec('infer', predictions={'sums': sums})

    replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES)
    with tf.Graph().as_default():
        x, y, dense = read_by_machine(input_fn)()
        ragged = tf.RaggedTensor.from_row_splits(x.values, y.row_splits, validate=False)
        features = {'ragged': ragged, 'dense': dense}
        [found], _ = until_the_end(three_machines, replicated(features).predictions)
    assert found['sums'].tolist() == [1 + 1, 4 + 1, 9 + 16 + 2, 0, 25 + 1]


def test_rows_of_rows(three_machines):
    """They are computed on once, as if one machine had read them."""
    rows = [[[[1, 2], []], [], [[3]]], [[[4], [5, 6]]], []]

    def input_fn(input_context=None):
        own = rows[input_context.input_pipeline_id]
        ragged = tf.ragged.constant(own, tf.float32, ragged_rank=2)
        dataset = tf.data.Dataset.from_tensor_slices((ragged, np.ones([len(own), 1], np.float32)))
        return dataset.batch(2)

    def model_fn(features, labels, mode):
        net = tf.reduce_sum(tf.reduce_max(features, 2) * weights('w', 1, 1)[0, 0], 1)
        net = tf.where_v2(tf.math.is_finite(net), net, tf.zeros_like(net))
        loss = tf.reduce_mean(tf.square(net[:, None] - labels))
        return spec_of(mode, loss, sgd(loss, 0.01))

    replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES, input='machine')
    read = read_by_machine(input_fn)
    found = [train(read, fn, three_machines) for fn in (model_fn, replicated)]
    assert len(found[0][0]) == 2
    assert_close(list(found[1]), list(found[0]), 1e-5)


@pytest.mark.parametrize('labels_of_machines', [[6, 4, 5], [4, 6, 6]])
def test_as_many_examples_on_each_machine(labels_of_machines, three_machines):
    """Otherwise towers would pair rows of other examples, or leave some out."""

    def input_fn(input_context=None):
        number = input_context.input_pipeline_id
        counts = [4, 6, 5][number], labels_of_machines[number]
        return tf.data.Dataset.from_tensors(tuple(floats(n, 1, seed=n) for n in counts))

    def model_fn(features, labels, mode):
        loss = tf.reduce_sum(features * weights('w', 1, 1)) + tf.reduce_sum(labels)
        return spec_of(mode, loss, sgd(loss))

    replicated = estimator_mgpu.replicate(model_fn, devices=DEVICES, input='machine')
    message = (
        r'same number of examples.*on each machine.*features, labels on /job.* are\] \[\d \d\]'
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(read_by_machine(input_fn), replicated, three_machines)


def test_sparse_and_ragged(three_machines):
    """Whoever fetches them has those of all machines, of which one ends before the others."""
    rows = [[[1, 2], [], [3]], [[4]], []]

    def input_fn(input_context=None):
        own = rows[input_context.input_pipeline_id]
        ragged = tf.ragged.constant(own, tf.int32, ragged_rank=1)
        dataset = tf.data.Dataset.from_tensor_slices((ragged, np.ones([len(own), 1], np.float32)))
        return dataset.batch(2).map(lambda r, y: ({'r': r, 's': r.to_sparse()}, y))

    with tf.Graph().as_default():
        features, labels = read_by_machine(input_fn)()
        ids, counts = features['r'].to_tensor(-1), tf.sparse.to_dense(features['s'])
        seen, _ = until_the_end(three_machines, [ids, counts, labels])
    assert [[found.tolist() for found in each] for each in seen] == [
        [[[1, 2], [-1, -1], [4, -1]], [[1, 2], [0, 0], [4, 0]], [[1.0], [1.0], [1.0]]],
        [[[3]], [[3]], [[1.0]]],
    ]


def test_names_and_seeds_are_those_of_one_device():
    """The chief's part is read by ops of the names that one device has for all."""

    def input_fn(input_context=None):
        return dataset_of(steps([1])).repeat(2)

    def names(graph):
        return {op.name for op in graph.get_operations()}

    with tf.Graph().as_default() as one:
        tf.data.make_initializable_iterator(input_fn()).get_next()
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(3)
        read_by_machine(input_fn)()
        assert all(name.startswith('machine_input') for name in names(graph) - names(one))
        assert tf.random.uniform([]).op.get_attr('seed2') == 0


def test_only_features_and_an_empty_batch_in_between(three_machines):
    """Input ends where all datasets do, not where all give no rows."""

    def input_fn(input_context=None):
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(6.0)).batch(2)
        return dataset.map(lambda x: tf.boolean_mask(x, x < 2)).concatenate(dataset.take(1))

    with tf.Graph().as_default():
        seen, _ = until_the_end(three_machines, read_by_machine(input_fn)())
    assert [each.tolist() for each in seen] == [[0.0, 1.0] * 3, [], [], [0.0, 1.0] * 3]


def test_each_machine_is_told_which_it_is(tmp_path):
    told = []

    def input_fn(input_context=None):
        told.append((input_context.input_pipeline_id, input_context.num_input_pipelines))
        assert input_context.get_per_replica_batch_size(12) == 12 // told[-1][1]
        return dataset_of(steps([4, 3]))

    with tf.Graph().as_default():
        read_by_machine(input_fn)()
        # Where only one has towers, it reads all.
        features, labels = read_by_machine(input_fn, TASKS[1:2])()
        assert features['x'].device == labels.device == f'{TASKS[1]}/device:CPU:0'
    assert told == [(0, 3), (1, 3), (2, 3), (0, 1)]
    estimator = estimator_mgpu.Estimator(model_fn, tmp_path, devices=2, input='machine')
    assert estimator.train(input_fn).get_variable_value('global_step') == 2
    assert told[4:] == [(0, 1)]


def mapped(function):
    return lambda input_context: dataset_of(steps([1, 2])).map(function)


def hidden(tensor):
    """The tensor, of whose shape nothing is known."""
    return tf.numpy_function(lambda value: value, [tensor], tensor.dtype)


def hidden_in_sparse(x, y):
    return x, tf.SparseTensor([[0, 0]], [1.0], hidden(tf.constant([1, 1], tf.int64)))


WRONG = {
    'needs an input_fn with an argument input_context=None': lambda: None,
    'returns a tf.data.Dataset, and this one gives': lambda input_context: (1, 2),
    r'gives TensorSpec\(shape=\(\), .*Use batch\(\)': mapped(lambda x, y: (x, tf.reduce_sum(y))),
    r'gives TensorSpec\(shape=<unknown>.*Use batch\(\)': mapped(lambda x, y: (x, hidden(y))),
    r'gives SparseTensorSpec\(TensorShape\(None\)': mapped(hidden_in_sparse),
    r'gives RaggedTensorSpec\(TensorShape\(None\)': mapped(
        lambda x, y: (x, tf.RaggedTensor.from_row_lengths(hidden(y), tf.constant([1, 0])))
    ),
    r'gives NoneTensorSpec\(\)': mapped(lambda x, y: (x, None)),
    r'gives TensorSpec\(shape=\(1, None\).*padded_batch': mapped(lambda x, y: tf.transpose(y)),
}


@pytest.mark.parametrize('message', WRONG)
def test_what_cannot_be_joined(message):
    with tf.Graph().as_default(), pytest.raises((TypeError, ValueError), match=message):
        read_by_machine(WRONG[message])()
