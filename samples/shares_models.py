"""The models whose kernels shares.py counts, and how it counts them.

Each model is a function of a batch's features, which returns a loss to be trained on, or a dict of
predictions.
"""

from __future__ import annotations

import collections
import re

import benchmark_models
import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu

MODELS = {}

ROWS, STEPS, UNITS = 16, 6, 8
_random = np.random.RandomState(0)


def _floats(*shape):
    return _random.randn(ROWS, *shape).astype(np.float32)


def _ids(below, *shape):
    return _random.randint(0, below, [ROWS, *shape]).astype(np.int32)


def model(**features):
    """Registers a model by its function's name, with a batch of its features."""

    def register(forward):
        MODELS[forward.__name__] = forward, features
        return forward

    return register


SEQUENCES = {'x': _floats(STEPS, UNITS), 'length': _ids(STEPS) + 1}
LABELS = {'y': _floats(1)}
TOKENS = {'ids': _ids(50, STEPS)}


def _loss(net, y):
    return tf.losses.mean_squared_error(y, tf.layers.dense(net, 1))


def _dynamic_rnn(cell, features):
    outputs, _ = tf.nn.dynamic_rnn(cell, features['x'], features['length'], dtype=tf.float32)
    return outputs


@model(**SEQUENCES, **LABELS)
def lstm(features):
    outputs = _dynamic_rnn(tf.nn.rnn_cell.LSTMCell(UNITS), features)
    return _loss(outputs[:, -1], features['y'])


@model(**SEQUENCES, **LABELS)
def gru(features):
    outputs = _dynamic_rnn(tf.nn.rnn_cell.GRUCell(UNITS), features)
    return _loss(outputs[:, -1], features['y'])


@model(**SEQUENCES, **LABELS)
def fused_block_cell(features):
    outputs = _dynamic_rnn(tf.nn.rnn_cell.LSTMCell(UNITS), features)
    weights = tf.get_variable('w', [2 * UNITS, 4 * UNITS])
    zeros = tf.zeros([UNITS])
    start = tf.zeros([tf.shape(outputs)[0], UNITS])
    block = tf.raw_ops.BlockLSTM(
        seq_len_max=tf.cast(tf.shape(outputs)[1], tf.int64),
        x=tf.transpose(outputs, [1, 0, 2]),
        cs_prev=start,
        h_prev=start,
        w=weights,
        wci=zeros,
        wcf=zeros,
        wco=zeros,
        b=tf.zeros([4 * UNITS]),
        use_peephole=False,
    )
    return _loss(block.h[-1], features['y'])


@model(**SEQUENCES, **LABELS)
def keras_lstm(features):
    return _loss(tf.keras.layers.LSTM(UNITS)(features['x']), features['y'])


@model(**SEQUENCES, **LABELS)
def keras_gru(features):
    return _loss(tf.keras.layers.GRU(UNITS)(features['x']), features['y'])


@model(**SEQUENCES, **LABELS)
def scan(features):
    weights = tf.get_variable('w', [UNITS, UNITS])
    start = tf.zeros([tf.shape(features['x'])[0], UNITS])
    sequence = tf.transpose(features['x'], [1, 0, 2])
    states = tf.scan(lambda h, x: tf.tanh(tf.matmul(h, weights) + x), sequence, start)
    return _loss(states[-1], features['y'])


@model(**SEQUENCES, **LABELS)
def while_loop(features):
    weights = tf.get_variable('w', [UNITS, UNITS])
    body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, weights) + features['x'][:, i]))  # noqa: E731
    start = tf.zeros_like(features['x'][:, 0])
    return _loss(tf.while_loop(lambda i, h: i < STEPS, body, (0, start))[1], features['y'])


@model(x=_floats(UNITS), **LABELS)
def branches(features):
    x, w = features['x'], tf.get_variable('w', [UNITS, UNITS])
    shallow = lambda: tf.tanh(tf.matmul(x, w))  # noqa: E731
    deep = lambda: tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, w)), w))  # noqa: E731
    return _loss(tf.cond(tf.reduce_sum(x) > 0, shallow, deep), features['y'])


@model(x=_floats(UNITS), **LABELS)
def network_in_a_branch(features):
    """Layers, seeded dropout and the loss, which is a mean over the batch."""
    weights = [tf.get_variable(f'w{k}', [UNITS, UNITS]) for k in range(4)]

    def loss():
        net = features['x']
        for w in weights:
            net = tf.nn.dropout(tf.tanh(tf.matmul(net, w)), rate=0.2, seed=7)
        return _loss(net - tf.reduce_mean(net, 0), features['y'])

    step = tf.train.get_or_create_global_step()
    return tf.cond(step >= 0, loss, lambda: 0.0)


@model(x=_floats(UNITS), **LABELS)
def functions(features):
    """One calls another, in a loop."""
    w = tf.get_variable('w', [UNITS, UNITS])

    @tf.function
    def inner(h):
        return tf.tanh(tf.matmul(h, w))

    @tf.function
    def outer(h):
        return tf.while_loop(lambda i, h: i < STEPS, lambda i, h: (i + 1, inner(h)), (0, inner(h)))

    return _loss(outer(features['x'])[1], features['y'])


def _crf_scores(features, tags=5):
    cells = [tf.nn.rnn_cell.LSTMCell(UNITS) for _ in range(2)]
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(
        *cells, features['x'], features['length'], dtype=tf.float32
    )
    scores = tf.layers.dense(tf.concat(outputs, -1), tags)
    return scores, tf.get_variable('transitions', [tags, tags])


@model(**SEQUENCES, tags=_ids(5, STEPS))
def bidirectional_crf(features):
    scores, transitions = _crf_scores(features)
    mask = tf.sequence_mask(features['length'], STEPS, tf.float32)
    own = tf.reduce_sum(tf.one_hot(features['tags'], 5) * scores, -1)
    pairs = tf.gather_nd(
        transitions, tf.stack([features['tags'][:, :-1], features['tags'][:, 1:]], -1)
    )
    path = tf.reduce_sum(own * mask, 1) + tf.reduce_sum(pairs * mask[:, 1:], 1)

    def body(i, alphas):
        new = tf.reduce_logsumexp(alphas[:, :, None] + transitions, 1) + scores[:, i]
        return i + 1, tf.where_v2(
            (i < features['length'])[:, None] & tf.ones_like(new, tf.bool), new, alphas
        )

    _, alphas = tf.while_loop(lambda i, _: i < STEPS, body, (1, scores[:, 0]))
    return tf.reduce_mean(tf.reduce_logsumexp(alphas, 1) - path)


@model(**SEQUENCES)
def viterbi(features):
    scores, transitions = _crf_scores(features)
    sequence = tf.transpose(scores[:, 1:], [1, 0, 2])

    def forward(state, score):
        best, _ = state
        through = best[:, :, None] + transitions
        return tf.reduce_max(through, 1) + score, tf.argmax(through, 1, output_type=tf.int32)

    start = scores[:, 0], tf.zeros_like(scores[:, 0], tf.int32)
    best, back = tf.scan(forward, sequence, start)
    last = tf.argmax(best[-1], -1, output_type=tf.int32)

    def backward(tag, pointers):
        return tf.gather(pointers, tag, batch_dims=1)

    tags = tf.scan(backward, back, last, reverse=True)
    return {'tags': tf.transpose(tags), 'last': last}


@model(**SEQUENCES, **LABELS)
def last_step(features):
    net = tf.layers.dense(tf.tanh(tf.layers.dense(features['x'], UNITS)), UNITS)
    rows = tf.range(tf.shape(net)[0])
    return _loss(tf.gather_nd(net, tf.stack([rows, features['length'] - 1], 1)), features['y'])


@model(image=_floats(12, 12, 3), **LABELS)
def convolutions(features):
    net = features['image']
    for filters in (4, 8, 8):
        net = tf.layers.conv2d(net, filters, 3, padding='same', use_bias=False)
        net = tf.nn.relu(tf.layers.batch_normalization(net, training=True))
        net = tf.layers.max_pooling2d(net, 2, 2, padding='same')
    return _loss(tf.layers.flatten(net), features['y'])


@model(image=_floats(16, 16, 3), labels=_ids(4, 16, 16))
def dilated_convolutions(features):
    """Segmentation, with a pyramid of dilations."""
    net = tf.layers.conv2d(features['image'], 8, 3, 2, 'same', activation=tf.nn.relu)
    branches = [tf.layers.conv2d(net, 4, 1, use_bias=False)]
    for rate in (2, 3):
        branch = tf.layers.conv2d(net, 4, 3, padding='same', dilation_rate=rate, use_bias=False)
        branches.append(branch)
    net = tf.layers.batch_normalization(tf.concat(branches, -1), training=True)
    kernel = tf.get_variable('depthwise', [3, 3, 12, 1])
    net = tf.nn.depthwise_conv2d(tf.nn.relu(net), kernel, [1] * 4, 'SAME', dilations=[2, 2])
    logits = tf.image.resize_bilinear(tf.layers.conv2d(net, 4, 1), [16, 16])
    return tf.losses.sparse_softmax_cross_entropy(features['labels'], logits)


@model(x=_floats(20, UNITS), labels=_ids(9))
def wavenet(features):
    """Causal convolutions, each dilated twice as much as the one before."""
    net = features['x']
    for rate in (1, 2, 4):
        padded = tf.pad(net, [[0, 0], [rate, 0], [0, 0]])
        both = tf.layers.conv1d(padded, 2 * UNITS, 2, dilation_rate=rate)
        value, gate = tf.split(both, 2, -1)
        net += tf.layers.conv1d(tf.tanh(value) * tf.sigmoid(gate), UNITS, 1)
    return tf.losses.sparse_softmax_cross_entropy(
        features['labels'], tf.layers.dense(net[:, -1], 9)
    )


@model(
    sound=_floats(60),
    labels=tf.SparseTensorValue(
        np.array([[i, j] for i in range(ROWS) for j in range(1 + i % 3)], np.int64),
        np.array([(3 * i + j) % 5 for i in range(ROWS) for j in range(1 + i % 3)], np.int32),
        np.array([ROWS, 3], np.int64),
    ),
)
def speech(features):
    """Spectra, a recurrent layer, and a CTC loss of a sequence of labels."""
    spectra = tf.abs(tf.signal.stft(features['sound'], 8, 4, 8))
    length = tf.fill(tf.shape(spectra)[:1], spectra.shape[1])
    net, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(UNITS), spectra, length, dtype=tf.float32)
    time_major = tf.reshape(tf.transpose(net, [1, 0, 2]), [-1, UNITS])
    logits = tf.reshape(tf.layers.dense(time_major, 6), [net.shape[1], -1, 6])
    return tf.reduce_mean(tf.nn.ctc_loss(features['labels'], logits, length))


@model(first=_floats(STEPS, UNITS), second=_floats(STEPS, UNITS), **LABELS)
def two_sequences(features):
    """One recurrent layer for two sequences of each example, in one batch of twice the size."""
    both = tf.concat([features['first'], features['second']], 0)
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.LSTMCell(UNITS), both, dtype=tf.float32)
    first, second = tf.split(state.h, 2, 0)
    return _loss(first * second, features['y'])


@model(first=_floats(8, 8, 3), second=_floats(8, 8, 3))
def contrastive(features):
    """Two views of each image, in one batch of twice the size."""
    both = tf.concat([features['first'], features['second']], 0)
    net = tf.layers.conv2d(both, 4, 3, activation=tf.nn.relu)
    net = tf.nn.l2_normalize(tf.layers.dense(tf.layers.flatten(net), UNITS), -1)
    first, second = tf.split(net, 2, 0)
    rows = tf.shape(first)[0]
    same = tf.one_hot(tf.range(rows), rows) * 1e9
    others = tf.matmul(first, first, transpose_b=True) - same
    logits = tf.concat([tf.matmul(first, second, transpose_b=True), others], 1)
    return tf.losses.softmax_cross_entropy(tf.one_hot(tf.range(rows), 2 * rows), 4 * logits)


def _attend(net, length, heads=2, relative=False):
    """Self-attention with a mask for padding."""
    steps, each = net.shape[1], UNITS // heads
    split = tf.reshape(tf.layers.dense(net, 3 * UNITS), [-1, steps, 3, heads, each])
    queries, keys, values = tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]))
    scores = tf.matmul(queries, keys, transpose_b=True)
    if relative:
        apart = tf.range(steps)[None] - tf.range(steps)[:, None] + steps - 1
        table = tf.get_variable('relative', [2 * steps - 1, each])
        scores += tf.einsum('bhqd,qkd->bhqk', queries, tf.gather(table, apart))
    seen = tf.sequence_mask(length, steps)[:, None, None]
    weights = tf.nn.softmax(tf.where_v2(seen & (scores == scores), scores, scores * 0 - 1e9))
    weights = tf.nn.dropout(weights, rate=0.1)
    joined = tf.reshape(tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3]), [-1, steps, UNITS])
    return tf.layers.dense(joined, UNITS)


@model(**TOKENS, length=SEQUENCES['length'], **LABELS)
def transformer(features):
    table = tf.get_variable('table', [50, UNITS])
    net = tf.nn.embedding_lookup(table, features['ids'])
    for layer in range(2):
        with tf.variable_scope(f'layer{layer}'):
            net += _attend(net, features['length'], relative=True)
            net += tf.layers.dense(tf.layers.dense(net, 4 * UNITS, tf.nn.relu), UNITS)
    return _loss(tf.reduce_mean(net, 1), features['y'])


@model(**TOKENS, length=SEQUENCES['length'], **LABELS)
def padding_removed(features):
    """Its feed-forward layers get only tokens that aren't padding."""
    net = tf.nn.embedding_lookup(tf.get_variable('table', [50, UNITS]), features['ids'])
    for layer in range(2):
        with tf.variable_scope(f'layer{layer}'):
            net += _attend(net, features['length'])
            places = tf.where(tf.sequence_mask(features['length'], STEPS))
            dense = tf.gather_nd(net, places)
            dense = tf.layers.dense(tf.layers.dense(dense, 4 * UNITS, tf.nn.relu), UNITS)
            net += tf.scatter_nd(places, dense, tf.shape(net, out_type=tf.int64))
    return _loss(tf.reduce_mean(net, 1), features['y'])


@model(**TOKENS, length=SEQUENCES['length'])
def masked_language_model(features):
    """Its loss is computed from what `boolean_mask` selects."""
    net = tf.nn.embedding_lookup(tf.get_variable('table', [50, UNITS]), features['ids'])
    net += _attend(net, features['length'])
    mask = tf.sequence_mask(features['length'], STEPS)
    left, ids = tf.boolean_mask(net, mask), tf.boolean_mask(features['ids'], mask)
    logits = tf.layers.dense(tf.layers.dense(left, 4 * UNITS, tf.nn.relu), 50)
    return tf.losses.sparse_softmax_cross_entropy(ids, logits)


def _decoder(features):
    table = tf.get_variable('table', [50, UNITS])
    cell = tf.nn.rnn_cell.GRUCell(UNITS)
    embedded = tf.nn.embedding_lookup(table, features['ids'])
    read, state = tf.nn.dynamic_rnn(cell, embedded, features['length'], dtype=tf.float32)

    def project(output, beams=1):
        """Scores of the next token, after a look at all that was read."""
        output = tf.reshape(output, [-1, beams, UNITS])
        weights = tf.nn.softmax(tf.matmul(output, read, transpose_b=True))
        both = tf.concat([output, tf.matmul(weights, read)], -1)
        with tf.variable_scope('project', reuse=tf.AUTO_REUSE):
            hidden = tf.layers.dense(tf.reshape(both, [-1, 2 * UNITS]), UNITS, tf.tanh)
            return tf.layers.dense(hidden, 50)

    return table, tf.nn.rnn_cell.GRUCell(UNITS, name='decoder'), project, state


@model(**TOKENS, length=SEQUENCES['length'])
def greedy_decoder(features):
    """It continues until all examples are finished."""
    table, cell, project, state = _decoder(features)

    def body(i, state, token, finished, written):
        output, state = cell(tf.nn.embedding_lookup(table, token), state)
        token = tf.where_v2(
            finished, tf.zeros_like(token), tf.argmax(project(output), -1, output_type=tf.int32)
        )
        return i + 1, state, token, finished | tf.equal(token, 1), written.write(i, token)

    start = tf.zeros_like(features['length'])
    written = tf.TensorArray(tf.int32, 0, dynamic_size=True, clear_after_read=False)
    goes_on = lambda i, state, token, finished, written: (i < 10) & ~tf.reduce_all(finished)  # noqa: E731
    loop = tf.while_loop(goes_on, body, (0, state, start, start > 0, written))
    return {'tokens': tf.transpose(loop[-1].stack())}


@model(**TOKENS, length=SEQUENCES['length'])
def translation(features):
    """A decoder with attention, which is given what it has to write."""
    table, cell, _, state = _decoder(features)
    read, keys = (
        tf.nn.embedding_lookup(table, features['ids']),
        tf.get_variable('keys', [UNITS] * 2),
    )
    mask = tf.sequence_mask(features['length'], STEPS)
    inputs = tf.TensorArray(tf.float32, STEPS).unstack(tf.transpose(read, [1, 0, 2]))
    cell.build([None, 2 * UNITS])

    def body(i, state, context, written):
        output, state = cell(tf.concat([inputs.read(i), context], -1), state)
        scores = tf.reduce_sum(tf.tanh(read + tf.matmul(output, keys)[:, None]), -1)
        weights = tf.nn.softmax(tf.where(mask, scores, tf.fill(tf.shape(scores), -1e9)))
        context = tf.reduce_sum(weights[:, :, None] * read, 1)
        return i + 1, state, context, written.write(i, tf.concat([output, context], -1))

    start = 0, state, tf.zeros_like(state), tf.TensorArray(tf.float32, STEPS)
    *_, written = tf.while_loop(lambda i, *_: i < STEPS, body, start)
    logits = tf.layers.dense(written.stack(), 50)
    labels = tf.transpose(features['ids'])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


@model(**TOKENS, length=SEQUENCES['length'])
def beam_search(features, beams=3):
    table, cell, project, state = _decoder(features)
    rows = tf.shape(features['ids'])[0]
    state = tf.reshape(tf.tile(state[:, None], [1, beams, 1]), [-1, UNITS])
    first = tf.tile([[0.0] + [-1e9] * (beams - 1)], [rows, 1])

    def body(i, state, tokens, scores):
        output, state = cell(tf.nn.embedding_lookup(table, tf.reshape(tokens, [-1])), state)
        each = (
            tf.reshape(tf.nn.log_softmax(project(output, beams)), [-1, beams, 50])
            + scores[:, :, None]
        )
        scores, best = tf.math.top_k(tf.reshape(each, [-1, beams * 50]), beams)
        parents = best // 50
        state = tf.gather(tf.reshape(state, [-1, beams, UNITS]), parents, batch_dims=1)
        return i + 1, tf.reshape(state, [-1, UNITS]), best % 50, scores

    start = tf.zeros([rows, beams], tf.int32)
    loop = tf.while_loop(lambda i, *_: i < 8, body, (0, state, start, first))
    return {'tokens': loop[2], 'scores': loop[3]}


@model(
    number=_floats(1),
    kind=np.array([b'ab'[i % 2 : i % 2 + 1] for i in range(ROWS)])[:, None],
    id=_ids(10, 1),
    word=np.array([b'word%d' % (i % 7) for i in range(ROWS)])[:, None],
    other=np.array([b'word%d' % (i % 5) for i in range(ROWS)])[:, None],
    **LABELS,
)
def wide_and_deep(features):
    column = tf.feature_column
    number = column.numeric_column('number')
    kind = column.categorical_column_with_vocabulary_list('kind', ['a', 'b'])
    identity = column.categorical_column_with_identity('id', 10)
    word = column.categorical_column_with_hash_bucket('word', 20)
    other = column.categorical_column_with_hash_bucket('other', 20)
    buckets = column.bucketized_column(number, [-1.0, 0.0, 1.0])
    crossed = column.crossed_column([buckets, 'kind'], 30)
    deep = [number, column.embedding_column(identity, UNITS), column.indicator_column(kind)]
    deep += column.shared_embedding_columns([word, other], UNITS)
    labels = features.pop('y')
    net = tf.layers.dense(column.input_layer(features, deep), 4 * UNITS, tf.nn.relu)
    net = tf.layers.dense(tf.layers.dense(net, 2 * UNITS, tf.nn.relu), 1)
    wide = column.linear_model(features, [kind, word, buckets, crossed])
    return tf.losses.mean_squared_error(labels, net + wide)


_COUNTS = {f'number{i}': np.exp(_floats(1)) for i in range(benchmark_models.NUMBERS)}
_WORDS = {f'word{i}': _ids(50, 1).astype(bytes) for i in range(benchmark_models.WORDS)}


@model(**_COUNTS, **_WORDS, clicked=_ids(2))
def deepfm(features):
    clicked = features.pop('clicked')
    logits = benchmark_models.deepfm(20, UNITS, [4 * UNITS, 2 * UNITS])(features)
    return tf.losses.sparse_softmax_cross_entropy(clicked, logits)


@model(ids=_ids(100, 5), **LABELS)
def factorization_machine(features):
    table = tf.get_variable('table', [100, UNITS])
    linear = tf.nn.embedding_lookup(tf.get_variable('linear', [100, 1]), features['ids'])
    own = tf.nn.embedding_lookup(table, features['ids'])
    pairs = tf.square(tf.reduce_sum(own, 1)) - tf.reduce_sum(tf.square(own), 1)
    both = tf.reduce_sum(linear, 1) + 0.5 * tf.reduce_sum(pairs, 1, keepdims=True)
    return _loss(tf.concat([both, tf.layers.dense(pairs, UNITS, tf.nn.relu)], 1), features['y'])


SPLITS = np.concatenate([[0], np.cumsum(_random.randint(0, 4, ROWS))])


@model(
    sparse=tf.SparseTensorValue(
        np.array([[i, j] for i in range(ROWS) for j in range(i % 3)], np.int64),
        np.array([7 * i % 50 for i in range(ROWS) for _ in range(i % 3)], np.int64),
        np.array([ROWS, 3], np.int64),
    ),
    weights=tf.SparseTensorValue(
        np.array([[i, j] for i in range(ROWS) for j in range(i % 3)], np.int64),
        np.array([0.1 * i for i in range(ROWS) for _ in range(i % 3)], np.float32),
        np.array([ROWS, 3], np.int64),
    ),
    ragged=tf.compat.v1.ragged.RaggedTensorValue(
        _random.randint(0, 50, SPLITS[-1]).astype(np.int64), SPLITS.astype(np.int64)
    ),
    **LABELS,
)
def sparse_and_ragged(features):
    table = tf.get_variable('table', [50, UNITS])
    sparse = tf.nn.embedding_lookup_sparse(
        table, features['sparse'], features['weights'], combiner='mean'
    )
    safe = tf.nn.safe_embedding_lookup_sparse(table, features['sparse'])
    rows = tf.shape(features['y'])[0]
    sparse = tf.pad(sparse, [[0, rows - tf.shape(sparse)[0]], [0, 0]])
    ragged = tf.gather(table, features['ragged'])
    hidden = tf.ragged.map_flat_values(lambda v: tf.nn.relu(v @ table[:UNITS]), ragged)
    net = tf.concat([sparse, safe, tf.reduce_sum(hidden, 1)], 1)
    return _loss(tf.layers.dense(net, UNITS, tf.nn.relu), features['y'])


RAGGED = tf.compat.v1.ragged.RaggedTensorValue(
    _random.randint(0, 50, SPLITS[-1]).astype(np.int64), SPLITS.astype(np.int64)
)


@model(ragged=RAGGED, **LABELS)
def ragged_reductions(features):
    ids, table = features['ragged'], tf.get_variable('table', [50, UNITS])
    hidden = tf.ragged.map_flat_values(tf.tanh, tf.nn.embedding_lookup(table, ids))
    count = tf.cast(tf.maximum(ids.row_lengths(), 1), tf.float32)
    sums, largest = tf.reduce_sum(hidden, 1), tf.maximum(tf.reduce_max(hidden, 1), -1)
    net = tf.concat([sums, sums / count[:, None], largest], 1)
    return _loss(tf.layers.dense(net, 2 * UNITS, tf.nn.relu), features['y'])


@model(ragged=RAGGED, **LABELS)
def ragged_sequences(features):
    """Padded, for a recurrent layer."""
    ids, table = features['ragged'], tf.get_variable('table', [50, UNITS])
    net = tf.nn.embedding_lookup(table, ids).to_tensor()
    length = tf.cast(ids.row_lengths(), tf.int32)
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(UNITS), net, length, dtype=tf.float32)
    return _loss(state, features['y'])


SPARSE_SEQUENCES = tf.SparseTensorValue(
    np.array([[i, j] for i in range(ROWS) for j in range(1 + i % 3)], np.int64),
    np.array([7 * i % 50 for i in range(ROWS) for _ in range(1 + i % 3)], np.int64),
    np.array([ROWS, 3], np.int64),
)


@model(
    word=SPARSE_SEQUENCES,
    rating=SPARSE_SEQUENCES._replace(values=SPARSE_SEQUENCES.values.astype(np.float32) / 50),
    **LABELS,
)
def sequence_columns(features):
    """Feature columns of words and of numbers, for a recurrent layer."""
    column = tf.feature_column
    word = column.sequence_categorical_column_with_identity('word', 50)
    columns = [column.embedding_column(word, UNITS), column.sequence_numeric_column('rating')]
    labels = features.pop('y')
    net, length = tf.keras.experimental.SequenceFeatures(columns)(features)
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(UNITS), net, length, dtype=tf.float32)
    return _loss(state, labels)


@model(text=np.array([b' '.join([b'%d' % (i + j) for j in range(1 + i % 4)]) for i in range(ROWS)]))
def bags_of_words(features):
    """Texts of different lengths, as sparse and as ragged tensors."""
    table = tf.get_variable('table', [50, UNITS])
    words = tf.sparse.to_dense(tf.string_split(features['text']), default_value='0')
    ids = tf.strings.to_number(words, tf.int32)
    mask = tf.cast(tf.not_equal(ids, 0), tf.float32)[:, :, None]
    mean = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * mask, 1) / (
        1 + tf.reduce_sum(mask, 1)
    )
    ragged = tf.strings.split(features['text'], result_type='RaggedTensor')
    numbers = tf.ragged.map_flat_values(tf.strings.to_number, ragged)
    largest = tf.reduce_max(numbers.to_tensor(), 1, keepdims=True)
    net = tf.concat([mean, tf.reduce_sum(numbers, 1)[:, None], largest], -1) / 50
    net = tf.layers.dense(tf.layers.dense(net, 4 * UNITS, tf.nn.relu), UNITS, tf.nn.relu)
    return tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - 1))


@model(x=_floats(UNITS), text=np.array([b'%d' % i for i in range(ROWS)]), **LABELS)
def after_python(features):
    def double(x):
        return 2 * x

    net = tf.py_function(double, [features['x']], tf.float32)
    net.set_shape([None, UNITS])
    numbers = tf.strings.to_number(tf.strings.join([features['text'], '.5']))
    net = tf.layers.dense(tf.layers.dense(net, 2 * UNITS, tf.nn.relu), UNITS, tf.nn.relu)
    return _loss(net, features['y'] + 0.01 * numbers[:, None])


@model(image=_floats(8, 8, 1))
def gan(features):
    rows = tf.shape(features['image'])[0]

    def judge(image):
        with tf.variable_scope('judge', reuse=tf.AUTO_REUSE):
            net = tf.layers.conv2d(image, 4, 3, 2, 'same', activation=tf.nn.leaky_relu)
            return tf.layers.dense(tf.layers.flatten(net), 1)

    noise = tf.random.normal([rows, UNITS])
    made = tf.reshape(tf.layers.dense(noise, 64, tf.tanh), [-1, 8, 8, 1])
    between = made + tf.random.uniform([rows, 1, 1, 1]) * (features['image'] - made)
    slopes = tf.gradients(judge(between), between)[0]
    norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), [1, 2, 3]) + 1e-12)
    penalty = tf.reduce_mean(tf.square(norms - 1))
    return tf.reduce_mean(judge(made) - judge(features['image'])) + 10 * penalty


@model(left=_floats(UNITS), right=_floats(UNITS))
def siamese(features):
    def tower(x):
        with tf.variable_scope('tower', reuse=tf.AUTO_REUSE):
            return tf.layers.dense(tf.layers.dense(x, 2 * UNITS, tf.nn.relu), UNITS)

    left, right = (tf.nn.l2_normalize(tower(features[name]), 1) for name in ('left', 'right'))
    logits = tf.matmul(left, right, transpose_b=True)
    own = tf.range(tf.shape(logits)[0])
    return tf.losses.sparse_softmax_cross_entropy(own, logits)


@model(image=_floats(16, 16, 3), boxes=np.abs(_floats(4, 4)) % 0.5, scores=_floats(4))
def detection(features):
    images = tf.map_fn(tf.image.per_image_standardization, features['image'])
    net = tf.layers.conv2d(images, 8, 3, 2, 'same', activation=tf.nn.relu)
    boxes = features['boxes'] + [0.0, 0.0, 0.5, 0.5]
    which = tf.tile(tf.range(tf.shape(net)[0])[:, None], [1, 4])
    crops = tf.image.crop_and_resize(
        net, tf.reshape(boxes, [-1, 4]), tf.reshape(which, [-1]), [3, 3]
    )
    hidden = tf.layers.dense(tf.layers.flatten(crops), 2 * UNITS, tf.nn.relu)
    scores = tf.reshape(tf.layers.dense(hidden, 1, tf.sigmoid), [-1, 4, 1])
    found = tf.image.combined_non_max_suppression(boxes[:, :, None], scores, 3, 3)
    return {'boxes': found.nmsed_boxes, 'scores': found.nmsed_scores}


@model(x=_floats(UNITS), **LABELS)
def train_steps_in_a_loop(features):
    """Weights that are adapted to the batch in three steps, as in MAML; the loss is that after."""
    first = tf.get_variable('first', [UNITS, 4 * UNITS])
    last = tf.get_variable('last', [4 * UNITS, 1])

    def loss(first, last):
        made = tf.matmul(tf.tanh(tf.matmul(features['x'], first)), last)
        return tf.reduce_mean(tf.square(made - features['y']))

    def body(i, *weights):
        slopes = tf.gradients(loss(*weights), weights)
        return i + 1, *(weight - 0.1 * slope for weight, slope in zip(weights, slopes))

    _, *adapted = tf.while_loop(lambda i, *_: i < 3, body, (0, first, last))
    return loss(*adapted)


@model(x=_floats(UNITS), **LABELS)
def steps_on_slices(features, parts=4):
    """A step of training on each quarter of the batch, as in PPO, one after another."""
    first = tf.get_variable('first', [UNITS, 4 * UNITS], use_resource=True)
    last = tf.get_variable('last', [4 * UNITS, 1], use_resource=True)
    size = tf.shape(features['x'])[0] // parts
    loss = tf.constant(0.0)
    for i in range(parts):
        with tf.control_dependencies([loss]):
            x, y = (features[key][i * size : (i + 1) * size] for key in ('x', 'y'))
            made = tf.matmul(tf.tanh(tf.matmul(x, first)), last)
            loss = tf.reduce_mean(tf.square(made - y))
            slopes = tf.gradients(loss, [first, last])
        with tf.control_dependencies(slopes):
            updates = [first.assign_sub(0.1 * slopes[0]), last.assign_sub(0.1 * slopes[1])]
        with tf.control_dependencies(updates):
            loss = tf.identity(loss)
    return loss


@model(image=_floats(16, 16, 3), boxes=np.abs(_floats(3, 4)) % 0.5)
def anchors(features, proposed=8):
    """A region proposal network: anchors are matched with boxes; the best ones are looked at."""
    net = tf.layers.conv2d(features['image'], 8, 3, 4, 'same', activation=tf.nn.relu)
    rows = tf.shape(net)[0]
    scores = tf.reshape(tf.layers.conv2d(net, 2, 1), [rows, -1])
    deltas = tf.reshape(tf.layers.conv2d(net, 8, 1), [rows, -1, 4])
    corners = np.stack(np.meshgrid(np.arange(4), np.arange(4), [0, 1]), -1).reshape(-1, 3) / 4
    lengths = 0.2 + 0.8 * corners[:, 2:]
    fixed = np.concatenate([corners[:, :2], corners[:, :2] + lengths], 1).astype(np.float32)
    boxes = fixed + 0.1 * tf.tanh(deltas)

    def best_of_image(found):
        image_boxes, image_scores = found
        best = tf.image.non_max_suppression(image_boxes, image_scores, proposed, 0.5)
        missing = proposed - tf.shape(best)[0]
        padded = tf.pad(tf.gather(image_boxes, best), [[0, missing], [0, 0]])
        return tf.ensure_shape(padded, [proposed, 4])

    proposals = tf.stop_gradient(tf.map_fn(best_of_image, (boxes, scores), dtype=tf.float32))
    which = tf.ones([rows, proposed], tf.int32) * tf.range(rows)[:, None]
    crops = tf.image.crop_and_resize(
        net, tf.reshape(proposals, [-1, 4]), tf.reshape(which, [-1]), [3, 3]
    )
    hidden = tf.layers.dense(tf.layers.flatten(crops), 2 * UNITS, tf.nn.relu)
    corrections = tf.reshape(tf.layers.dense(hidden, 4), [-1, proposed, 4])

    common = tf.reduce_sum(tf.minimum(boxes[:, :, None], features['boxes'][:, None]), -1)
    matched = tf.gather(features['boxes'], tf.argmax(common, 2), batch_dims=1)
    loss = tf.reduce_mean(tf.square(boxes - matched))
    loss += tf.reduce_mean(tf.square(scores - tf.reduce_max(common, 2)))
    return loss + tf.reduce_mean(tf.square(corrections))


@model(image=_floats(8, 8, 3), labels=_ids(4), share=np.abs(_floats(1)) % 1)
def mixup(features):
    """Each image is mixed with one of the reversed batch, and so are their labels."""
    share = features['share']
    of_image = share[:, :, None, None]
    image = features['image'] * of_image + features['image'][::-1] * (1 - of_image)
    labels = tf.one_hot(features['labels'], 4)
    labels = labels * share + tf.reverse(labels, [0]) * (1 - share)
    net = tf.layers.conv2d(image, 8, 3, activation=tf.nn.relu)
    return tf.losses.softmax_cross_entropy(labels, tf.layers.dense(tf.layers.flatten(net), 4))


@model(x=_floats(STEPS, UNITS))
def speaker_centroids(features, sounds=4):
    """Four sounds of each speaker are compared with the means of all speakers (GE2E)."""
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(UNITS), features['x'], dtype=tf.float32)
    net = tf.nn.l2_normalize(tf.layers.dense(state, UNITS), 1)
    by_speaker = tf.reshape(net, [-1, sounds, UNITS])
    speakers = tf.shape(by_speaker)[0]
    centroids = tf.nn.l2_normalize(tf.reduce_mean(by_speaker, 1), 1)
    others = tf.reduce_sum(by_speaker, 1, keepdims=True) - by_speaker
    own = tf.reduce_sum(by_speaker * tf.nn.l2_normalize(others, 2), -1)
    cosines = tf.reshape(tf.matmul(net, centroids, transpose_b=True), [speakers, sounds, -1])
    is_own = tf.eye(speakers)[:, None]
    logits = 10 * (cosines * (1 - is_own) + own[:, :, None] * is_own) - 5
    labels = tf.tile(tf.range(speakers)[:, None], [1, sounds])
    return tf.losses.sparse_softmax_cross_entropy(labels, logits)


@model(x=_floats(UNITS, UNITS), **LABELS)
def examples_one_by_one(features):
    """A loop in Python over the examples of a batch of 16."""

    def layers(x, name):
        with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
            return tf.layers.dense(tf.layers.dense(x, 4 * UNITS, tf.nn.relu), UNITS)

    losses = []
    for i in range(ROWS):
        x = features['x'][i]
        keys = layers(x, 'keys')
        weights = tf.nn.softmax(tf.matmul(keys, keys, transpose_b=True))
        net = tf.matmul(weights, layers(x, 'values'))
        losses.append(tf.reduce_mean(tf.square(net - features['y'][i])))
    return tf.reduce_mean(tf.stack(losses))


@model(image=_floats(8, 8, 3), labels=_ids(5))
def temporal_segments(features, frames=4):
    """Each four images are frames of a video, which see those before and after (TSM)."""
    net = tf.layers.conv2d(features['image'], 8, 3, activation=tf.nn.relu)
    videos = tf.reshape(net, [-1, frames, 6, 6, 8])
    from_next, from_last, rest = tf.split(videos, [2, 2, 4], -1)
    from_next = tf.pad(from_next[:, 1:], [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0]])
    from_last = tf.pad(from_last[:, :-1], [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]])
    net = tf.reshape(tf.concat([from_next, from_last, rest], -1), [-1, 6, 6, 8])
    net = tf.layers.conv2d(net, 8, 3, activation=tf.nn.relu)
    logits = tf.layers.dense(tf.layers.flatten(net), 5)
    logits = tf.reduce_mean(tf.reshape(logits, [-1, frames, 5]), 1)
    return tf.losses.sparse_softmax_cross_entropy(features['labels'][::frames], logits)


@model(first=_floats(8, 8, 3), second=_floats(8, 8, 3), labels=_ids(5))
def interleaved_batches(features, parts=2):
    """Two views of each image, interleaved before layers and put in order after them (FixMatch)."""

    def interleave(x, *sizes):
        shape = x.shape.as_list()[1:]
        apart = tf.reshape(x, [*sizes, *shape])
        return tf.reshape(tf.transpose(apart, [1, 0, *range(2, 2 + len(shape))]), [-1, *shape])

    both = tf.concat([features['first'], features['second']], 0)
    net = tf.layers.conv2d(interleave(both, -1, parts), 8, 3, activation=tf.nn.relu)
    net = tf.layers.batch_normalization(net, training=True)
    logits = interleave(tf.layers.dense(tf.layers.flatten(net), 5), parts, -1)
    first, second = tf.split(logits, parts)
    guesses = tf.stop_gradient(tf.nn.softmax(first))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.argmax(guesses, 1), logits=second
    )
    is_sure = tf.cast(tf.reduce_max(guesses, 1) > 0.3, tf.float32)
    loss = tf.losses.sparse_softmax_cross_entropy(features['labels'], first)
    return loss + tf.reduce_mean(losses * is_sure)


@model(image=_floats(16, 16, 3), boxes=np.abs(_floats(4, 4)) % 0.5, labels=_ids(3, 4))
def crops(features):
    """Four boxes of each image are cut out of its features."""
    net = tf.layers.conv2d(features['image'], 8, 3, 2, 'same', activation=tf.nn.relu)
    boxes = tf.reshape(features['boxes'] + [0.0, 0.0, 0.5, 0.5], [-1, 4])
    which = tf.reshape(tf.tile(tf.range(tf.shape(net)[0])[:, None], [1, 4]), [-1])
    cut = tf.image.crop_and_resize(net, boxes, which, [3, 3])
    hidden = tf.layers.dense(tf.layers.flatten(cut), 2 * UNITS, tf.nn.relu)
    logits = tf.reshape(tf.layers.dense(hidden, 3), [-1, 4, 3])
    return tf.losses.sparse_softmax_cross_entropy(features['labels'], logits)


@model(image=_floats(12, 12, 3), **LABELS)
def mapped_images(features):
    """`tf.map_fn` prepares one image after another."""

    def prepare(image):
        image = tf.image.adjust_contrast(tf.image.per_image_standardization(image), 0.7)
        return tf.image.flip_left_right(image)

    image = tf.map_fn(prepare, features['image'])
    net = tf.layers.conv2d(image, 8, 3, 2, activation=tf.nn.relu)
    return _loss(tf.layers.flatten(net), features['y'])


@model(x=_floats(UNITS), labels=_ids(5))
def memory_with_ages(features, size=32):
    """Nearest neighbors are looked up in a memory, in which the oldest are replaced."""
    options = dict(trainable=False, use_resource=True)
    keys = tf.get_variable('keys', [size, UNITS], **options)
    values = tf.get_variable('values', [size], tf.int32, tf.zeros_initializer(), **options)
    ages = tf.get_variable('ages', [size], initializer=tf.zeros_initializer(), **options)
    labels = features['labels']
    hidden = tf.layers.dense(features['x'], 4 * UNITS, tf.nn.relu)
    query = tf.nn.l2_normalize(tf.layers.dense(hidden, UNITS), 1)

    near, places = tf.nn.top_k(tf.matmul(query, keys, transpose_b=True), 8)
    found = tf.gather(values, places)
    is_same = tf.cast(tf.equal(found, labels[:, None]), tf.float32)
    wrong, right = tf.reduce_max(near * (1 - is_same), 1), tf.reduce_max(near * is_same, 1)
    loss = tf.reduce_mean(tf.nn.relu(wrong - right + 0.1))

    is_known = tf.equal(found[:, 0], labels)
    _, oldest = tf.nn.top_k(ages + 0.01 * tf.range(size, dtype=tf.float32), tf.shape(labels)[0])
    place = tf.where(is_known, places[:, 0], oldest)
    mean = tf.nn.l2_normalize(tf.gather(keys, place) + query, 1)
    written = tf.stop_gradient(tf.where_v2(is_known[:, None], mean, query))
    with tf.control_dependencies([written, loss]):
        updates = [tf.scatter_update(keys, place, written)]
        updates += [tf.scatter_update(values, place, labels), ages.assign_add(tf.ones([size]))]
    with tf.control_dependencies(updates):
        updates = [tf.scatter_update(ages, place, tf.zeros_like(right))]
    with tf.control_dependencies(updates):
        return tf.identity(loss)


HEAVY = re.compile(
    'MatMul|Einsum|Conv|Softmax|Tanh|Sigmoid|ResourceGather|LookupTableFind|LSTM|CropAndResize|'
    'NonMaxSuppression'
)


def spec_of(name, devices, static=False):
    """Builds a model: its EstimatorSpec, and what feeds it."""
    forward, batch = MODELS[name]
    rows = ROWS if static else None
    features, feed = {}, {}
    for key, value in batch.items():
        if isinstance(value, tf.SparseTensorValue):
            shape = [rows, *value.dense_shape[1:]]
            features[key] = tf.sparse_placeholder(value.values.dtype, shape)
        elif isinstance(value, tf.ragged.RaggedTensorValue):
            features[key] = tf.ragged.placeholder(value.dtype, 1, [])
        else:
            features[key] = tf.placeholder(tf.as_dtype(value.dtype), [rows, *value.shape[1:]])
        feed[features[key]] = value

    def model_fn(features):
        found = forward(dict(features))
        if isinstance(found, dict):
            return estimator_mgpu.estimator.EstimatorSpec('infer', predictions=found)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(found, tf.train.get_or_create_global_step())
        return estimator_mgpu.estimator.EstimatorSpec('train', loss=found, train_op=train_op)

    return estimator_mgpu.replicate(model_fn, devices=devices)(features), feed


def kernels_of(name, devices):
    """Runs a step of a model on so many CPU devices, also on a machine that has GPUs.

    Returns:
      How many heavy kernels each device ran, and the graph.
    """
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    config = tf.ConfigProto(device_count={'CPU': devices, 'GPU': 0}, allow_soft_placement=False)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # as by session_config()
    with tf.Graph().as_default() as graph:
        spec, feed = spec_of(name, [f'/device:CPU:{i}' for i in range(devices)])
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            fetches = spec.predictions if spec.train_op is None else spec.train_op
            session.run(fetches, feed, options, metadata)
    return heavy_kernels(metadata), graph


def heavy_kernels(metadata):
    """Returns how many heavy kernels each device ran in a step that was traced."""
    kernels = collections.Counter()
    for stats in metadata.step_stats.dev_stats:
        for node in stats.node_stats:
            kind = node.timeline_label.partition(' = ')[2].partition('(')[0]
            if HEAVY.search(kind):
                kernels[stats.device] += 1
    return kernels
