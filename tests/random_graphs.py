"""Random model_fns: a chain of ops of a grammar, most of which ask for more than a row.

Each op takes rows of `WIDTH` float64 numbers and gives as many rows of them, whatever it does in
between. `c` makes what else it needs: variables, the labels and ids of the batch. Functions
without an underscore are ops, up to where they're put in `OPS`.
"""

import inspect
import typing

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from models import LazyAdam

WIDTH = 4
IDS = 6

OPS = {}
SIMPLE = set()  # those that need no more than the examples
SHARDED = set()  # those of which each op that is given examples runs on every device
SHARDED_TYPES = {}  # by model: see _shards()
# Those with a matrix product that may run once, if the graph doesn't know how many examples a batch
# has: they reshape by it. That of clipped_by_row does on TensorFlow 2.15 only.
RESHAPED_PRODUCTS = {'clipped_by_row', 'groups', 'taped'}


class Case(typing.NamedTuple):
    """All that is drawn."""

    ops: list[str]  # one after another
    losses: list[str]  # the second, if any, is trained by an optimizer of its own
    optimizers: list[str]  # one for each loss
    clip: str
    metrics: list[str]
    sizes: list[int]  # rows of the batches; the first one's of all, if static
    static: bool  # whether the graph knows the number of rows
    towers: int
    seed: int  # of the batches
    beside: list[str] = []  # what a step does besides
    epochs: int = 0  # of an input pipeline; the batches are fed without it
    behavior: str = 'v2'


class Context:
    """What ops have besides rows."""

    def __init__(self, features):
        self.features = features
        self._count = 0

    def name(self):
        self._count += 1
        return f'v{self._count}'

    def variable(self, *shape, scale=0.5, **options):
        name = self.name()
        values = np.random.RandomState(self._count).randn(*shape) * scale
        return tf.get_variable(name, initializer=values, **options)

    def counter(self, *shape, **options):
        return tf.get_variable(self.name(), initializer=np.zeros(shape), trainable=False, **options)

    def regularize(self, loss):
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, loss)

    def table(self):
        return self.variable(IDS, WIDTH)

    @property
    def ids(self):
        return self.features['ids']


def _sharded(function):
    """Says of a model, as a decorator, that each of its ops runs on every device.

    An op that isn't given examples runs once in any model. What is decorated is checked in
    training, whether or not the graph knows how many examples a batch has.
    """
    SHARDED.add(function.__name__)
    return function


def _shards(op_type, always=True):
    """Says of a model some of whose ops run once that an op of this type runs on every device.

    If not `always`, it does where the graph knows how many examples a batch has.
    """

    def decorate(function):
        SHARDED_TYPES[function.__name__] = op_type, always
        return function

    return decorate


def _all_sharded(**functions):
    """Adds models of which the same holds."""
    SHARDED.update(functions)
    OPS.update(functions)


def _simple(**functions):
    """Returns models of functions that need no more than the examples."""
    SIMPLE.update(functions)
    return {name: _without_context(function) for name, function in functions.items()}


def _without_context(function):
    return lambda x, c: function(x)


# Of each example by itself: every op runs on every device.
_all_sharded(
    **_simple(
        tanh=tf.tanh,
        log_softmax=lambda x: 0.3 * tf.nn.log_softmax(x),
        where_positive=lambda x: tf.where(x > 0, x, 0.1 * x),
        divide=lambda x: x / (1.0 + tf.reduce_sum(tf.abs(x), 1, keepdims=True)),
        cumsum_columns=lambda x: tf.cumsum(x, 1, reverse=True),
        top_k_columns=lambda x: tf.nn.top_k(x, WIDTH).values,
        transposed=lambda x: tf.transpose(tf.tanh(tf.transpose(x))),
        flattened=lambda x: tf.reshape(tf.tanh(tf.reshape(x, [-1])), tf.shape(x)),
        split_columns=lambda x: tf.concat(tf.split(x, 2, 1)[::-1], 1),
        stacked=lambda x: tf.reduce_mean(tf.stack([x, tf.sin(x)], 0), 0),
        unstacked=lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], 1),
        padded=lambda x: tf.pad(x[:, 1:], [[0, 0], [0, 1]]),
        one_hot=lambda x: x + tf.one_hot(tf.argmax(x, 1), WIDTH, dtype=tf.float64),
        pairwise_columns=lambda x: tf.einsum('bij,bj->bi', x[:, :, None] * x[:, None, :], x) * 0.1,
        batch_matmul=lambda x: tf.matmul(x[:, None, :], 0.2 * x[:, :, None] * x[:, None, :])[
            :, 0, :
        ],
        band=lambda x: tf.linalg.band_part(x[:, :, None] * x[:, None, :], 0, 1)[:, 0, :],
        row_norm=lambda x: x / tf.norm(x + 4, axis=1, keepdims=True),
        strided=lambda x: tf.concat([x[:, ::2], x[:, 1::2]], 1),
        clip_rows=lambda x: tf.clip_by_norm(x, 1.0, [1]),
    )
)

# ... and such that some op may run once.
OPS.update(
    **_simple(
        expanded=lambda x: tf.reshape(tf.squeeze(tf.expand_dims(x, 1)), [-1, WIDTH]),
    )
)

# Across examples: every op runs on every device.
_all_sharded(
    **_simple(
        standardized=lambda x: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.5),
        less_max=lambda x: x - tf.reduce_max(x, 0),
        less_min=lambda x: x - tf.reduce_min(x),
        global_norm=lambda x: x / (1 + tf.norm(x)),
        attention=lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x),
        gram=lambda x: 0.2 * tf.matmul(x, tf.tanh(tf.matmul(x, x, transpose_a=True))),
        whitened=lambda x: tf.matmul(
            x, tf.linalg.inv(tf.matmul(x, x, transpose_a=True) + tf.eye(WIDTH, dtype=tf.float64))
        ),
        by_size=lambda x: x * (1 + 1 / tf.cast(tf.shape(x)[0], tf.float64)),
        outer_product=lambda x: 0.1 * tf.reduce_sum(x[:, None, :] * x[None, :, :], 1),
        distances=lambda x: x + tf.reduce_mean(tf.abs(x[:, None, :] - x[None, :, :]), 1),
        any_positive=lambda x: tf.where_v2(tf.reduce_any(x > 1, 0), x, 0.5 * x),
        all_small=lambda x: tf.where_v2(tf.reduce_all(tf.abs(x) < 2), x, 0.5 * x),
        sum_of_maxima=lambda x: x - 0.3 * (tf.reduce_max(x, 0) + tf.reduce_max(tf.sin(x), 0)),
        product=lambda x: x + tf.reduce_prod(tf.tanh(x), 0),
        doubled=lambda x: tf.reduce_mean(tf.reshape(tf.concat([x, -x], 1), [-1, 2, WIDTH]), 1) + x,
        repeated=lambda x: tf.reduce_sum(tf.reshape(tf.repeat(x, 2, 0), [-1, 2, WIDTH]), 1),
        logsumexp=lambda x: x - tf.reduce_logsumexp(x, 0),
        one_part=lambda x: tf.tanh(tf.split(x, 1, 0)[0]) + tf.split(x, [tf.shape(x)[0]])[0],
        copies_in_blocks=lambda x: tf.reduce_mean(
            tf.reshape(tf.sin(tf.tile(x, [3, 1])), [3, -1, WIDTH]), 0
        ),
        copies_summed=lambda x: x + 0.1 * tf.reduce_mean(tf.square(tf.tile(x, [2, 1])), 0),
        time_major=lambda x: (
            tf.reshape(tf.transpose(tf.tanh(tf.reshape(tf.transpose(x), [-1, 1]))), [WIDTH, -1])[0][
                :, None
            ]
            + x
        ),
        stacked_in_blocks=lambda x: tf.reshape(
            tf.tanh(tf.reshape(tf.stack([x, -x]), [-1, WIDTH])), [2, -1, WIDTH]
        )[1],
        images_of_images=lambda x: tf.reshape(
            tf.batch_to_space_nd(
                tf.tanh(
                    tf.space_to_batch_nd(tf.reshape(x, [-1, 2, 2, 1]), [2, 2], [[0, 2], [2, 0]])
                ),
                [2, 1],
                [[0, 2], [0, 0]],
            )[: tf.shape(x)[0]],
            [-1, WIDTH],
        ),
        wide=lambda x: tf.matmul(tf.transpose(tf.matmul(x, x, transpose_b=True)), x) * 0.1,
        rows_in_halves=lambda x: tf.reshape(
            tf.reshape(x, [2 * tf.shape(x)[0], 2]) ** 3, [-1, WIDTH]
        ),
        above_diagonal=lambda x: x + tf.linalg.diag(x, k=1)[:, 0, 1:],
        eye=lambda x: tf.matmul(tf.eye(tf.shape(x)[0], dtype=tf.float64) * 2.0, x),
        ones=lambda x: x - tf.ones([tf.shape(x)[0], 1], tf.float64),
        filled=lambda x: x * tf.fill(tf.shape(x), tf.constant(0.7, tf.float64)),
        broadcast=lambda x: x + tf.broadcast_to(tf.reduce_sum(x, 0) * 0.1, tf.shape(x)),
        string=lambda x: x + tf.strings.to_number(tf.as_string(tf.round(x)), tf.float64) * 0.1,
        seeded_dropout=lambda x: tf.nn.dropout(x, rate=0.4, seed=11),
        seeded_noise=lambda x: x + tf.random.normal(tf.shape(x), 0, 0.1, tf.float64, seed=5),
        noise_of_row=lambda x: x + tf.random.uniform([WIDTH], 0, 0.1, tf.float64, seed=3),
        stateless=lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2], dtype=tf.float64),
        second=lambda x: x + 0.1 * tf.gradients(tf.gradients(tf.reduce_sum(x**3), x)[0], x)[0],
        saliency=lambda x: x + 0.1 * tf.gradients(tf.reduce_mean(tf.sin(x) * tf.norm(x + 3)), x)[0],
        while_loop=lambda x: _loop(3, lambda i, a: 0.5 * a + tf.sin(a), x),
        cond_of_blocks=lambda x: tf.reduce_mean(
            tf.stack(
                tf.split(
                    tf.cond(
                        tf.reduce_sum(x) > 0,
                        lambda: tf.concat([x, tf.sin(x)], 0),
                        lambda: tf.tile(tf.tanh(x), [2, 1]),
                    ),
                    2,
                )
            ),
            0,
        ),
        cond=lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 0.5, lambda: x - 1),
        case=lambda x: tf.case(
            [(tf.reduce_max(x) > 2, lambda: x * 0.5), (tf.reduce_min(x) < -2, lambda: x + 1)],
            lambda: tf.sin(x),
        ),
        switch_case=lambda x: tf.switch_case(
            tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32) % 2, [lambda: x * 0.7, lambda: tf.tanh(x)]
        ),
    )
)

# ... and such that some op may run once.
OPS.update(
    **_simple(
        batch_softmax=lambda x: 3 * tf.nn.softmax(x, 0),
        blocks_in_a_loop=lambda x: tf.split(
            _loop(3, lambda i, both: tf.tanh(both + tf.tile(x, [2, 1])), tf.concat([x, -x], 0)), 2
        )[1],
        blocks_and_examples=lambda x: (
            tf.reshape(tf.concat([x, x], 1), [-1, WIDTH]) + tf.concat([x, -x], 0)
        )[: tf.shape(x)[0]],
        cumsum_rows=lambda x: 0.3 * tf.cumsum(x, 0),
        roll_rows=lambda x: tf.roll(x, 1, 0),
        sort_rows=lambda x: tf.sort(x, 0),
        ranked=lambda x: tf.gather(x, tf.argsort(x[:, 0])),
        first_row=lambda x: x - 0.5 * x[:1],
        last_row=lambda x: x * tf.sigmoid(x[-1:][0]),
        hardest=lambda x: x + 0.1 * tf.reduce_mean(tf.nn.top_k(x[:, 0], 1).values),
        quantile=lambda x: x - tf.sort(tf.reshape(x, [-1]))[tf.size(x) // 2],
        by_index=lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), tf.float64)[:, None],
        masked=lambda x: x - tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)) * 0.1,
        halves=lambda x: tf.concat([x[: tf.shape(x)[0] // 2], 2 * x[tf.shape(x)[0] // 2 :]], 0),
        long=lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1])), [-1, WIDTH]) * 0.1,
        diagonal=lambda x: (
            x * tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True))[:, None] * 0.1
        ),
        diagonals=lambda x: (
            x + tf.einsum('bii->b', tf.reshape(tf.tile(x, [1, WIDTH]), [-1, WIDTH, WIDTH]))[:, None]
        ),
        interleaved=lambda x: (
            x * tf.reduce_sum(tf.tanh(tf.reshape(x, [2, -1, 2])), [0, 2])[:, None]
        ),
        shuffled=lambda x: tf.random.shuffle(x, seed=9),
        map_fn=lambda x: tf.map_fn(lambda r: r * tf.reduce_sum(r) * 0.2, x),
        scan=lambda x: tf.scan(lambda a, r: 0.5 * a + tf.tanh(r), x),
        while_rows=lambda x: tf.while_loop(
            lambda i, a: tf.logical_and(tf.reduce_max(tf.abs(a)) > 0.7, i < 9),
            lambda i, a: (i + 1, a * 0.7),
            (0, x),
        )[1],
        while_any=lambda x: tf.while_loop(
            lambda _, a: tf.reduce_any(tf.abs(a) > 0.7), lambda i, a: (i + 1, a * 0.7), (0, x)
        )[1],
        while_counted=lambda x: tf.while_loop(
            lambda i, a: i < tf.minimum(tf.shape(x)[0], 3),
            lambda i, a: (i + 1, a + 0.1 * x[i]),
            (0, x),
        )[1],
    )
)


def numpy_function(x, c):
    made = tf.numpy_function(lambda v: np.sort(v, 0) * 0.1, [tf.stop_gradient(x)], x.dtype)
    made.set_shape(x.shape)
    return x + made


def asserted(x, c):
    with tf.control_dependencies([tf.Assert(tf.reduce_all(x < 1e9), ['too large', x])]):
        return tf.identity(x)


@_sharded
def dense(x, c):
    return tf.tanh(tf.matmul(x, c.variable(WIDTH, WIDTH)) + c.variable(WIDTH))


@_sharded
def residual(x, c):
    return x + tf.matmul(tf.nn.relu(tf.matmul(x, c.variable(WIDTH, 7))), c.variable(7, WIDTH))


# With variables, or with ids: every op runs on every device.
_all_sharded(
    scaled_by_variable=lambda x, c: x * c.variable(WIDTH) + c.variable(1),
    gathered_rows=lambda x, c: x + tf.gather(x, c.ids[:, 0] % tf.shape(x, out_type=tf.int64)[0]),
    segments=lambda x, c: (
        tf.gather(tf.math.unsorted_segment_sum(x, c.ids[:, 0], IDS), c.ids[:, 0]) * 0.3
    ),
    labels_of_all=lambda x, c: x + tf.reduce_mean(c.features['y']) - c.features['y'],
)

# ... and such that some op may run once.
OPS.update(
    embedded=lambda x, c: x + tf.nn.embedding_lookup(c.table(), c.ids[:, 0]),
    embedded_mean=lambda x, c: x + tf.reduce_mean(tf.gather(c.table(), c.ids), 1),
    embedded_parts=lambda x, c: (
        x + tf.nn.embedding_lookup([c.variable(3, WIDTH), c.variable(3, WIDTH)], c.ids[:, 1])
    ),
    embedded_sparse=lambda x, c: (
        x + tf.nn.safe_embedding_lookup_sparse(c.table(), tf.sparse.from_dense(c.ids), None)
    ),
    scattered_column=lambda x, c: (
        x + tf.tensor_scatter_nd_add(tf.zeros_like(x), [[0, 0]], tf.reduce_sum(x)[None] * 0.1)
    ),
)


def table_lookup(x, c):
    pairs = tf.lookup.KeyValueTensorInitializer(['1', '2', '3'], tf.constant([1, 2, 4], tf.int64))
    found = tf.lookup.StaticHashTable(pairs, 0).lookup(tf.as_string(c.ids[:, 0]))
    return x + tf.gather(c.table(), found)


@_sharded
def gather_nd(x, c):
    at = tf.stack([tf.range(tf.shape(x)[0], dtype=tf.int64), c.ids[:, 0] % WIDTH], 1)
    return x * tf.gather_nd(x, at)[:, None]


@_sharded
def beams(x, c):
    best = tf.nn.top_k(x @ c.variable(WIDTH, WIDTH), 2).indices
    return x + tf.reduce_mean(tf.gather(x, best, batch_dims=1), 1, keepdims=True)


@_sharded
def two_views(x, c):
    """One layer for two batches, one after the other."""
    both = dense(tf.concat([x, tf.sin(x)], 0), c)
    rows = tf.shape(x)[0]
    first, second = tf.split(both, 2, 0)
    return tf.tanh(both[:rows]) * first + both[rows:] - second


@_sharded
def dilated(x, c):
    """Two convolutions of other dilations, with what is between them."""
    net = tf.reshape(tf.concat([x, -x], 1), [-1, 4, 2, 1])
    net = tf.nn.convolution(net, c.variable(2, 2, 1, 3), 'SAME', dilations=[2, 1])
    net = tf.nn.convolution(tf.tanh(net), c.variable(2, 2, 3, 1), 'SAME', dilations=[2, 2])
    return x + tf.reshape(net, [-1, 2, WIDTH])[:, 0]


@_sharded
def last_step(x, c):
    steps = tf.math.cumsum(tf.reshape(x, [-1, 2, WIDTH // 2]), 1)
    rows = tf.range(tf.shape(x)[0])
    last = tf.gather_nd(steps, tf.stack([rows, tf.cast(c.ids[:, 0] % 2, tf.int32)], 1))
    return x + tf.tile(last, [1, 2])


def class_weights(x, c):
    counts = tf.math.bincount(tf.cast(c.ids[:, 0], tf.int32), minlength=IDS, dtype=tf.float64)
    return x * tf.gather(1 / (1 + counts), c.ids[:, 0])[:, None]


def pieces_by_variable(x, c):
    """Each row is cut into as many pieces as a variable says."""
    pieces = tf.get_variable(c.name(), initializer=3, trainable=False)
    wide = tf.matmul(x, c.variable(WIDTH, 6))
    cut = tf.reshape(wide, tf.stack([tf.shape(x)[0], tf.identity(pieces), 2]))
    return x + 0.1 * tf.reduce_sum(tf.square(cut), [1, 2])[:, None]


# With texts, and ragged tensors of them.


def _words(c):
    words = tf.strings.split(c.features['text'], result_type='RaggedTensor')
    return tf.ragged.map_flat_values(tf.strings.to_hash_bucket_fast, words, num_buckets=IDS)


def padded_words(x, c):
    words = _words(c)
    mask = tf.sequence_mask(words.row_lengths(), dtype=tf.float64)
    vectors = tf.gather(c.table(), words.to_tensor())
    scores = tf.nn.softmax(tf.reduce_sum(vectors, 2) - 9 * (1 - mask))
    return x + tf.reduce_sum(vectors * mask[:, :, None], 1) + scores[:, :1]


def reduced_words(x, c):
    words = _words(c)
    vectors = tf.gather(c.table(), words)
    share = tf.cast(words.nrows(), tf.float64) / tf.cast(tf.size(words.values), tf.float64)
    return x + share * (tf.reduce_mean(vectors, 1) + tf.reduce_max(vectors, 1))


def decoded(x, c):
    steps = tf.transpose(tf.reshape(tf.cast(x, tf.float32), [-1, 2, WIDTH // 2]), [1, 0, 2])
    [found], _ = tf.nn.ctc_beam_search_decoder(steps, tf.cast(1 + c.ids[:, 0] % 2, tf.int32), 4)
    lengths = tf.RaggedTensor.from_sparse(found).row_lengths()
    return x * (1 + tf.cast(lengths, tf.float64))[:, None]


# By other ops' rows: as many as a mask leaves, as ids say, or as Python likes.


def _back(x, places, left):
    return x + tf.scatter_nd(places, left, tf.shape(x, out_type=tf.int64))


def _of_python(function, x):
    found = tf.py_function(function, [x], x.dtype)
    found.set_shape([None, WIDTH])
    return found


OPS.update(
    without_padding=lambda x, c: _without_padding(x, c, c.ids[:, 0] > 1),
    without_all=lambda x, c: _without_padding(x, c, c.ids[:, 0] > IDS),
    masked_dense=lambda x, c: (
        0.3 * _back(x, tf.where(x[:, 0] > 0), dense(tf.boolean_mask(x, x[:, 0] > 0), c))
    ),
    python_dense=lambda x, c: (
        x + 0.1 * tf.reduce_mean(dense(_of_python(lambda v: v[::2], x), c), 0)
    ),
    # One row, which is repeated, though nobody could know.
    python_row=lambda x, c: x + dense(_of_python(lambda v: v[:1], x), c),
    python_rows=lambda x, c: x * dense(_of_python(lambda v: 2 * v, x), c),
    # Rows of its own meet one row, which is repeated for them.
    python_repeated=lambda x, c: (
        x
        + 0.1 * tf.reduce_sum(dense(_of_python(lambda v: tf.repeat(v[:1], 5, 0), x), c) - x[:1], 0)
    ),
    python_unknown=lambda x, c: (
        x * tf.reduce_mean(tf.cast(tf.py_func(np.max, [tf.stop_gradient(x)], tf.float64), x.dtype))
    ),
)


def _without_padding(x, c, mask):
    return _back(x, tf.where(mask), dense(tf.gather_nd(x, tf.where(mask)), c))


def masked_centered(x, c):
    left = dense(tf.boolean_mask(x, c.ids[:, 0] > 1), c)
    return x + tf.reduce_sum(left - tf.reduce_mean(tf.concat([left, x], 0), 0)) * 0.1


def masked_twice(x, c):
    """Rows of two spaces, that are summed, and one of one space with the other's."""
    one = dense(tf.boolean_mask(x, x[:, 0] > 0), c)
    two = dense(tf.concat([x[:1], tf.boolean_mask(x, x[:, 0] < 0.3)], 0), c)
    return x + 0.1 * (tf.reduce_sum(one, 0) + tf.reduce_mean(two, 0) + tf.reduce_sum(one * two[:1]))


def masked_images(x, c):
    images = tf.reshape(tf.concat([x[:1], tf.boolean_mask(x, x[:, 0] > 0)], 0), [-1, 2, 2, 1])
    made = tf.tanh(tf.nn.conv2d(images, c.variable(2, 2, 1, 3), 1, 'SAME'))
    return x + 0.1 * tf.reduce_sum(tf.square(made))


def pairs_with_left(x, c):
    """Each row that is left with each of the batch's, as rows of their own."""
    left = tf.gather_nd(x, tf.where(c.ids[:, 0] > 1))
    pairs = tf.reshape(tf.matmul(left, tf.tanh(x), transpose_b=True), [-1, 1])
    return x + 0.1 * tf.reduce_sum(tf.square(tf.tanh(tf.matmul(pairs, c.variable(1, 2)))))


def repeated_dense(x, c):
    """As many rows as ids say, by their own layers, and added up again."""
    rows = tf.repeat(tf.range(tf.shape(x)[0]), c.ids[:, 1] % 3)
    wide = residual(dense(tf.gather(x, rows), c), c)
    return x + 0.2 * tf.math.unsorted_segment_sum(wide, rows, tf.shape(x)[0])


def unique_dense(x, c):
    ids, index = tf.unique(c.ids[:, 0])
    return x + tf.gather(dense(tf.gather(c.table(), ids), c), index)


def ragged_dense(x, c):
    rows = tf.gather(c.table(), tf.RaggedTensor.from_tensor(c.ids, padding=0))
    w = c.variable(WIDTH, WIDTH)
    return x + tf.reduce_sum(tf.ragged.map_flat_values(lambda v: tf.tanh(v @ w), rows), 1)


# Layers.


def _fused(x, c, training):
    image = tf.cast(tf.reshape(x, [-1, 1, WIDTH // 2, 2]), tf.float32)
    options = {'center': False, 'scale': False, 'fused': True, 'name': c.name()}
    image = tf.layers.batch_normalization(image, training=training, **options)
    # float32 is rounded otherwise in another order: what it adds is small.
    return x + 1e-6 * tf.reshape(tf.cast(image, tf.float64), [-1, WIDTH])


_all_sharded(
    batch_norm=lambda x, c: 0.7 * tf.layers.batch_normalization(x, training=True, name=c.name()),
    fused_batch_norm=lambda x, c: _fused(x, c, True),
    fused_inference=lambda x, c: _fused(x, c, False),
)


@_sharded
def averages_in_a_branch(x, c):
    """The recipe of many: averages of tensors, kept in a `cond` whose results are used."""
    mean, variance = tf.nn.moments(x, [0])
    averages = tf.train.ExponentialMovingAverage(0.8)

    def updated():
        with tf.control_dependencies([averages.apply([mean, variance])]):
            return tf.identity(mean), tf.identity(variance)

    def kept():
        return averages.average(mean), averages.average(variance)

    found = tf.cond(tf.placeholder_with_default(True, []), updated, kept)
    return tf.nn.batch_normalization(x, *found, 0.5, None, 0.1)


@_sharded
def layer_norm(x, c):
    mean, variance = tf.nn.moments(x, [1], keepdims=True)
    return (x - mean) * tf.rsqrt(variance + 0.1) * c.variable(WIDTH)


@_sharded
def convolution(x, c):
    y = tf.nn.conv1d(x[:, :, None], c.variable(2, 1, 3), 1, 'SAME')
    return tf.reduce_sum(tf.nn.relu(y), 2)


@_sharded
def convolution_2d(x, c):
    image = tf.reshape(x, [-1, 2, 2, 1])
    y = tf.nn.relu(tf.nn.conv2d(image, c.variable(2, 2, 1, 3), 1, 'SAME'))
    y = tf.nn.avg_pool2d(y, 2, 1, 'SAME') + tf.nn.max_pool2d(y, 2, 1, 'SAME')
    return tf.reshape(tf.reduce_sum(y, 3), [-1, WIDTH])


@_sharded
def heads(x, c):
    """Attention over columns: heads and rows change places."""
    q = tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2])
    a = tf.nn.softmax(tf.matmul(q, q, transpose_b=True))
    return tf.reshape(tf.transpose(tf.matmul(a, q), [1, 0, 2]), tf.shape(x))


@_shards('While')
def keras_lstm(x, c):
    """Id 0 is padding."""
    rows = tf.keras.layers.Embedding(IDS, 3, mask_zero=True, dtype=tf.float64)
    lstm = tf.keras.layers.LSTM(WIDTH, return_sequences=True, dtype=tf.float64)
    return x + tf.keras.Sequential([rows, lstm])(c.ids)[:, -1]


@_sharded
def keras_attention(x, c):
    steps = tf.reshape(x, [-1, 2, WIDTH // 2])
    attention = tf.keras.layers.MultiHeadAttention(2, 3, use_bias=False, dtype=tf.float64)
    return x + tf.reshape(attention(steps, steps), [-1, WIDTH])


@_sharded
def keras_losses(x, c):
    """Of weights, of what layers give, and one that the model adds itself."""
    inputs = tf.keras.Input([WIDTH], dtype=tf.float64)
    of = {f'{what}_regularizer': tf.keras.regularizers.l2(0.1) for what in ('kernel', 'activity')}
    hidden = tf.keras.layers.Dense(WIDTH, 'tanh', dtype=tf.float64, **of)(inputs)
    model = tf.keras.Model(inputs, hidden)
    model.add_loss(0.1 * tf.reduce_mean(tf.square(hidden)))
    output = model(x)
    losses = model.get_losses_for(None) + model.get_losses_for(x)
    assert len(losses) == 3
    c.regularize(tf.add_n(losses))
    return x + output


# With variables that the forward pass writes.


@_sharded
def counted(x, c):
    """How many rows there were is read after it's written."""
    seen = c.counter()
    with tf.control_dependencies([tf.assign_add(seen, tf.cast(tf.shape(x)[0], tf.float64))]):
        x = tf.identity(x)
    with tf.control_dependencies([x]):
        return x / (1 + 0.1 * seen.read_value())


@_sharded
def moving_mean(x, c):
    m = c.counter(WIDTH)
    with tf.control_dependencies([tf.assign(m, 0.9 * m + 0.1 * tf.reduce_mean(x, 0))]):
        return x - m.read_value()


@_sharded
def read_then_written(x, c):
    """A loop has to read before the variable is written, in each tower."""
    w, shift = c.variable(WIDTH, WIDTH), c.counter()
    x = _loop(3, lambda i, h: tf.tanh(tf.matmul(h, w)) + shift, x)
    with tf.control_dependencies([x]):
        written = tf.assign_add(shift, 0.1)
    with tf.control_dependencies([written]):
        return tf.identity(x)


# With variables that no example reaches.


@_sharded
def regularized_apart(x, c):
    c.regularize(0.1 * tf.nn.l2_loss(c.variable(WIDTH, WIDTH)))
    return x


@_sharded
def statistics_multiplied(x, c):
    w = c.variable(WIDTH, WIDTH)
    c.regularize(0.1 * tf.reduce_mean(w) * tf.reduce_sum(tf.square(w)))
    return x


@_sharded
def embedded_apart(x, c):
    """Rows of a table whose ids aren't the batch's."""
    c.regularize(0.1 * tf.nn.l2_loss(tf.nn.embedding_lookup(c.table(), [1, 4, 1])))
    return x


@_sharded
def spectral_norm(x, c):
    """A step's power iteration goes on from that of the step before."""
    w = c.variable(WIDTH, WIDTH)
    u = tf.get_variable(c.name(), initializer=np.ones([1, WIDTH]), trainable=False)
    v = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(u, w, transpose_b=True)))
    after = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w)))
    norm = tf.reduce_sum(tf.matmul(v, w) * after)
    with tf.control_dependencies([tf.assign(u, after)]):
        return x @ (w / norm)


# Loops, branches and functions.


def _loop(times, body, x):
    return tf.while_loop(lambda i, h: i < times, lambda i, h: (i + 1, body(i, h)), (0, x))[1]


def _odd():
    return tf.equal(tf.train.get_or_create_global_step() % 2, 1)


@_shards('While', always=False)
def while_whole(x, c):
    """The loop adds, in each round, what is computed once of the global batch."""
    sums = tf.cumsum(x, 0)
    return _loop(2, lambda i, h: 0.5 * h + sums, x)


@_sharded
def recurrent(x, c):
    """Each round reads the weights of the next."""
    w, u = c.variable(1, WIDTH), c.variable(WIDTH, WIDTH, scale=0.3)

    def step(i, h, v):
        return i + 1, tf.tanh(tf.matmul(x[:, i, None], w) + tf.matmul(h, v)), u

    return tf.while_loop(lambda i, *_: i < WIDTH, step, (0, tf.zeros_like(x), u))[1]


@_sharded
def recurrent_arrays(x, c):
    u = c.variable(WIDTH, WIDTH, scale=0.3)
    sequence = tf.stack([x, x * 0.5, -x])
    states = tf.scan(lambda h, r: tf.tanh(tf.matmul(h, u) + r), sequence, tf.zeros_like(x))
    return states[-1] + 0.1 * states[0]


@_sharded
def recurrent_lengths(x, c):
    """Of sequences of their own lengths; what is written to an array is used twice."""
    u = c.variable(WIDTH, WIDTH, scale=0.3)

    def body(i, state, outputs):
        state = tf.where(i < c.ids[:, 0], tf.tanh(tf.matmul(state, u) + x), state)
        return i + 1, state, outputs.write(tf.cast(i, tf.int32), state)

    array = tf.TensorArray(tf.float64, 4, element_shape=[None, WIDTH])
    start = tf.constant(0, tf.int64), 0 * x, array
    outputs = tf.while_loop(lambda i, *_: i < 4, body, start)[2].stack()
    return tf.reduce_mean(outputs, 0) + tf.reduce_max(tf.square(outputs), [0, 2])[:, None]


@_sharded
def dynamic_rnn(x, c):
    cell, steps = tf.nn.rnn_cell.GRUCell(WIDTH), tf.reshape(x, [-1, 2, WIDTH // 2])
    return x + tf.nn.dynamic_rnn(cell, steps, dtype=tf.float64, scope=c.name())[1]


def written_rows(x, c):
    """One row a round, and as many rounds as there are rows."""
    kept = tf.TensorArray(tf.float64, tf.shape(x)[0], element_shape=[WIDTH])
    body = lambda i, kept: (i + 1, kept.write(i, x[i] * 2))  # noqa: E731
    kept = tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, (0, kept))[1]
    return tf.reshape(kept.stack(), [-1, WIDTH])


@_sharded
def large_zeros(x, c):
    """Of so many entries that TensorFlow makes no constant of them."""
    wide = tf.tile(x, [1, 100])
    zeros = tf.zeros([x.shape[0] or tf.shape(x)[0], 100 * WIDTH], tf.float64)
    kept = lambda i, h: 0.5 * tf.where(wide > 0, h + wide, tf.zeros_like(h))  # noqa: E731
    return x + _loop(3, kept, zeros)[:, :WIDTH]


def loop_with_effects(x, c):
    count = c.counter()

    def body(i, h):
        with tf.control_dependencies([tf.assign_add(count, 1.0)]):
            return tf.tanh(h)

    return _loop(3, body, x)


def nested_loops(x, c):
    w = c.variable(WIDTH, WIDTH)
    inner = lambda h: _loop(2, lambda i, h: tf.tanh(tf.matmul(h, w)), h)  # noqa: E731
    x = _loop(2, lambda i, h: inner(h) + x, x)
    return tf.cond(_odd(), lambda: inner(x), lambda: inner(2.0 * x))


@_sharded
def shape_in_a_loop(x, c):
    shape = tf.shape(x)
    return _loop(2, lambda i, h: tf.reshape(tf.tanh(tf.reshape(h, [-1])), shape), x)


@_shards('While', always=False)
def sizes_in_a_loop(x, c):
    shape = tf.shape(tf.matmul(x, x, transpose_b=True))
    return _loop(2, lambda i, h: h + tf.ones([shape[1], 1], tf.float64), x)


@_shards('While')
def size_in_a_loop(x, c):
    """After the loop it's that of the whole batch, though each tower's loop has its own."""

    def loop(x):
        more = lambda i, n, h: (i + 1, n, h + tf.ones([n, 1], tf.float64))  # noqa: E731
        _, size, x = tf.while_loop(lambda i, *_: i < 3, more, (0, tf.shape(x)[0], x))
        return x / tf.cast(size, tf.float64)

    return _loop(2, lambda i, h: loop(h), loop(x))


@_shards('While', always=False)
def embedded_in_a_loop(x, c):
    """Sparse gradients from inside a loop and a branch."""
    table, ids = c.table(), c.ids
    x = _loop(3, lambda i, h: h + tf.tanh(tf.nn.embedding_lookup(table, ids[:, i])), x)
    return x + tf.cond(_odd(), lambda: tf.nn.embedding_lookup(table, ids[:, 0]), lambda: 2.0 * x)


def cond_in_a_loop(x, c):
    w, v = c.variable(WIDTH, WIDTH), c.variable(WIDTH, WIDTH)
    one, two = lambda h: tf.tanh(tf.matmul(h, w)), lambda h: tf.matmul(h, v) + h  # noqa: E731
    return _loop(4, lambda i, h: tf.cond(tf.equal(i % 2, 0), lambda: one(h), lambda: two(h)), x)


def cond_by_rows_in_a_loop_in_a_cond(x, c):
    w = c.variable(WIDTH, WIDTH)
    small = lambda h: tf.cond(  # noqa: E731
        tf.reduce_max(h) > 0.5, lambda: tf.minimum(h, 0.5), lambda: tf.identity(h)
    )
    body = lambda i, h: tf.matmul(small(h), w)  # noqa: E731
    return tf.cond(_odd(), lambda: _loop(2, body, x), lambda: x)


@_shards('If', always=False)
def cond_of_several(x, c):
    """Lists and dicts, an output that does not depend on the shard, and an unused one."""
    w, v = c.variable(WIDTH, WIDTH), c.variable(WIDTH, WIDTH)
    one = lambda: {'a': tf.matmul(x, w), 'b': [w * 2.0, tf.shape(x)[0]]}  # noqa: E731
    two = lambda: {'a': tf.identity(x), 'b': [tf.tanh(w + v), tf.constant(0)]}  # noqa: E731
    found = tf.cond(_odd(), one, two)
    return tf.matmul(found['a'], found['b'][0])


_all_sharded(
    # Of all rows, which towers have unevenly.
    mean_in_a_branch=lambda x, c: (
        x - tf.cond(_odd(), lambda: tf.reduce_mean(x, 0), lambda: tf.reduce_mean(2 * x, 0))
    ),
    cond_on_placeholders=lambda x, c: tf.cond(
        tf.placeholder_with_default(False, []),
        lambda: x,
        lambda: tf.cond(_odd(), lambda: tf.tanh(x), lambda: tf.tanh(2.0 * x)),
    ),
)

# ... and such that some op may run once.
OPS.update(
    loop_with_rows_summed=lambda x, c: _loop(2, lambda i, h: h - 0.1 * tf.reduce_mean(h, 0), x),
)


def _layer(c, **options):
    """A function of rows that reads a variable."""
    w = c.variable(WIDTH, WIDTH, use_resource=True)
    return tf.function(lambda v: tf.tanh(tf.matmul(v, w)), **options)


@_sharded
def function_in_a_loop(x, c):
    """One that asks not to be made a part of its caller, too."""
    layer = _layer(c)
    apart = _layer(c, experimental_attributes={'_noinline': True})
    return apart(x) + _loop(3, lambda i, h: layer(h) + h, x)


@_shards('While')
def function_of_autograph(x, c):
    layer = _layer(c)

    @tf.function
    def call(h, times):
        total = tf.zeros_like(h)
        for i in tf.range(times):
            if i % 2 == 0:
                h = layer(h)
            total += h
        while tf.reduce_max(tf.abs(total)) > 2.5:
            total = tf.clip_by_value(total, -2.5, 2.5)
        return total

    return call(x, 3)


@_shards('PartitionedCall', always=False)
def function_of_sizes(x, c):
    """A row has as many entries in what it returns as a variable says."""
    pieces = tf.get_variable(c.name(), initializer=2, trainable=False)
    cut = tf.reshape(x, tf.stack([tf.shape(x)[0], tf.identity(pieces), 2]))
    flat = tf.function(tf.reshape, experimental_attributes={'_noinline': True})(cut, [-1, 2])
    return x + tf.reshape(tf.roll(flat, 1, 0), [-1, WIDTH])


@_sharded
def functions_with_effects(x, c):
    """What a function counts comes before what uses its results."""
    layer, calls = _layer(c), c.counter(use_resource=True)

    @tf.function
    def inner(v):
        calls.assign_add(1.0)
        return v / (1 + calls.read_value())

    with tf.control_dependencies([calls.assign_add(0.5)]):
        return tf.function(lambda v: tf.tanh(inner(layer(v))) + inner(v))(x)


# Gradients that models change, mix and use.


def checkpointed(x, c):
    """A gradient function with `variables`, as reversible layers have, and gradients recomputed."""
    w, v = (c.variable(WIDTH, WIDTH, use_resource=True) for _ in range(2))

    @tf.custom_gradient
    def inner(h):
        def gradient(dy, variables=None):
            dy = tf.convert_to_tensor(dy)
            return dy * 0.5, [0.1 * tf.matmul(h, dy, transpose_a=True)] if variables else []

        return tf.tanh(tf.matmul(h, w)), gradient

    for weight in (v, v):
        x = tf.recompute_grad(lambda h, weight=weight: tf.tanh(tf.matmul(h, weight)))(x)
    return inner(x)


@_sharded
def inner_step(x, c):
    """MAML: a loss after a step of gradient descent."""
    w = c.variable(WIDTH, WIDTH)
    inner = tf.reduce_mean(tf.square(tf.matmul(x, w) - x))
    return tf.tanh(tf.matmul(x, w - 0.1 * tf.gradients(inner, w)[0]))


def hessian(x, c):
    w = c.variable(WIDTH)
    energy = tf.reduce_mean(tf.exp(-tf.square(x * w)))
    return x + 0.1 * tf.linalg.diag_part(tf.hessians(energy, w)[0])


def third_derivatives(x, c):
    layer = _layer(c)
    slope = tf.gradients(tf.function(lambda v: tf.reduce_sum(layer(v) ** 3))(x), x)[0]
    return x + 0.1 * tf.gradients(tf.reduce_sum(slope**2), x)[0]


@_sharded
def penalized(x, c):
    """WGAN's: slopes where real and generated rows are mixed, each in its own proportion."""
    share, fake = tf.sigmoid(10 * x[:, :1]), tf.matmul(x[:, ::-1], c.variable(WIDTH, WIDTH))
    critic = tf.tanh((share * x + (1 - share) * fake) @ c.variable(WIDTH, WIDTH))
    [slope] = tf.gradients(tf.matmul(critic, c.variable(WIDTH, 1)), x)
    norms = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 0.1)
    return x + 0.1 * tf.reduce_mean(tf.square(norms - 1))


def _clipped_by_row(x, w, **options):
    """The gradient of each row is clipped, as for differential privacy."""
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.tanh(tf.matmul(x, w)), 1)
    grads = tape.jacobian(losses, w, **options)
    factors = 1 / tf.maximum(tf.norm(grads, axis=[1, 2]), 1)
    return tf.matmul(x, tf.reduce_mean(grads * factors[:, None, None], 0))


def taped(x, c):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        hidden = tf.tanh(tf.matmul(x, c.variable(WIDTH, 2)))
        slope = tape.gradient(hidden, x)
        energy = tf.reduce_mean(tf.square(slope))
    slopes = tf.reshape(tape.batch_jacobian(hidden, x), [-1, 2 * WIDTH])
    return x + slopes[:, :WIDTH] + tape.gradient(energy, x)


@_sharded
def directional(x, c):
    w = c.variable(WIDTH, WIDTH, use_resource=True)
    with tf2.autodiff.ForwardAccumulator(w, 0.1 * tf.ones([WIDTH, WIDTH], w.dtype)) as accumulator:
        made = tf.tanh(tf.matmul(x, w))
    return made + accumulator.jvp(made)


def pairs_first(x, c):
    """As many pairs as 7 rows; the graph tells which are which."""
    wide = c.variable(WIDTH, 14, use_resource=True)

    @tf.function
    def made(x, w):
        h = tf.matmul(x, w)
        x_shape, w_shape = tf.raw_ops.ShapeN(input=[x, w])
        for _ in tf.range(2):
            h += tf.ones([x_shape[0], w_shape[1]], tf.float64)
        return tf.reshape(h, [x_shape[0], 7, 2])

    pairs = tf.reshape(tf.transpose(made(x, wide.read_value()), [1, 0, 2]), [-1, 2])
    return x + 0.1 * tf.gradients(tf.reduce_sum(tf.tanh(pairs)), x)[0]


OPS.update(
    clipped_by_row=lambda x, c: _clipped_by_row(x, c.variable(WIDTH, WIDTH, use_resource=True)),
    clipped_by_row_in_a_loop=lambda x, c: _clipped_by_row(
        x, c.variable(WIDTH, WIDTH, use_resource=True), experimental_use_pfor=False
    ),
)

OPS |= {n: f for n, f in dict(vars()).items() if inspect.isfunction(f) and not n.startswith('_')}


# What only fits batches of an even number of rows that divides 60, which random ones needn't have.


def _normalized(x):
    """By groups of rows, as batch norm with virtual batches does."""
    groups = tf.reshape(x, [2, -1, WIDTH])
    mean, variance = tf.nn.moments(groups, [1], keepdims=True)
    return tf.reshape((groups - mean) * tf.rsqrt(variance + 1), tf.shape(x))


EVEN = {
    'groups': lambda x, c: _normalized(tf.matmul(x, c.variable(WIDTH, WIDTH))),
    'constants': lambda x, c: x + tf.reshape(np.arange(60.0), [tf.shape(x)[0], -1])[:, :1] * 0.01,
    'variables': lambda x, c: x + tf.reshape(c.variable(6, 10), [tf.shape(x)[0], -1])[:, :1],
}


LOSSES = {
    'mean': lambda y, p: tf.reduce_mean(tf.square(y - p)),
    'sum': lambda y, p: 0.1 * tf.reduce_sum(tf.square(y - p)),
    # In float32, which is rounded otherwise in another order: it adds little.
    'losses': lambda y, p: (
        tf.reduce_mean(tf.square(y - p))
        + 1e-7 * tf.cast(tf.losses.mean_squared_error(y, tf.tanh(p)), tf.float64)
    ),
    'masked': lambda y, p: tf.reduce_sum(tf.boolean_mask(tf.square(y - p), y > 0)) / 7,
    'weighted': lambda y, p: tf.div_no_nan(
        tf.reduce_sum(tf.square(y - p) * tf.abs(y)), tf.reduce_sum(tf.abs(y))
    ),
    'contrastive': lambda y, p: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.range(tf.shape(p)[0]), logits=tf.matmul(p, tf.tanh(p), transpose_b=True)
        )
    ),
    'cross_entropy': lambda y, p: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.nn.softmax(y), logits=p)
    ),
    'root': lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)) + 0.1),
    'hard': lambda y, p: tf.reduce_mean(tf.nn.top_k(tf.reduce_sum(tf.square(y - p), 1), 1).values),
    'correlation': lambda y, p: (
        -tf.reduce_mean((y - tf.reduce_mean(y, 0)) * (p - tf.reduce_mean(p, 0)))
    ),
}


def _decayed():
    return tf.train.exponential_decay(0.05, tf.train.get_global_step(), 2, 0.7, staircase=True)


OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.05),
    'decayed': lambda: tf.train.GradientDescentOptimizer(_decayed()),
    'momentum': lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    'adam': lambda: tf.train.AdamOptimizer(0.01, epsilon=0.1),
    'lazy_adam': lambda: LazyAdam(0.01, epsilon=0.1),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.01),
    'rmsprop': lambda: tf.train.RMSPropOptimizer(0.01, epsilon=0.1),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.01, l2_regularization_strength=0.01),
}

CLIPS = {
    'none': lambda grads: grads,
    'value': lambda grads: [tf.clip_by_value(tf.convert_to_tensor(g), -0.2, 0.2) for g in grads],
    'norm': lambda grads: [tf.clip_by_norm(tf.convert_to_tensor(g), 0.3) for g in grads],
    'global': lambda grads: tf.clip_by_global_norm(grads, 0.5)[0],
}

BESIDE = ['accumulation', 'averages', 'counter']


def _steps_counted():
    local = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]
    steps = tf.get_variable('steps', [], initializer=tf.zeros_initializer(), collections=local)
    return tf.identity(steps), tf.assign_add(steps, 1.0)


METRICS = {
    'mean': lambda y, p: tf.metrics.mean(p + 3),
    'steps': lambda y, p: _steps_counted(),  # of no batch
    'error': lambda y, p: tf.metrics.mean_absolute_error(y, p),
    'auc': lambda y, p: tf.metrics.auc(y[:, 0] > 0, tf.sigmoid(p[:, 0])),
    'accuracy': lambda y, p: tf.metrics.accuracy(tf.argmax(y, 1), tf.argmax(p, 1)),
    'iou': lambda y, p: tf.metrics.mean_iou(tf.cast(y[:, 0] > 0, tf.int32), p[:, 0] > 0, 2),
}


def model_fn_of(case):
    """Returns the model_fn: the case's ops one after another, and a layer."""

    def model_fn(features, labels, mode):
        c = Context(features)
        x = features['x']
        for name in case.ops:
            op = (OPS | EVEN)[name]
            x = op(x, c)

        output = tf.matmul(x, c.variable(WIDTH, WIDTH)) + c.variable(WIDTH)
        predictions = {'output': output, 'best': tf.argmax(output, 1)}
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)

        losses = [LOSSES[name](labels, output) for name in case.losses]
        losses[0] += tf.add_n([*tf.losses.get_regularization_losses(), 0.0 * losses[0]])

        if mode == tf.estimator.ModeKeys.EVAL:
            metrics = {name: METRICS[name](labels, output) for name in case.metrics}
            return tf.estimator.EstimatorSpec(
                mode, loss=losses[0], predictions=predictions, eval_metric_ops=metrics
            )

        return tf.estimator.EstimatorSpec(mode, loss=losses[0], train_op=_train(case, losses, c))

    return model_fn


def _train(case, losses, c):
    """Returns a train_op: all gradients are computed before a variable changes."""
    # Each loss trains every other variable, if there are two.
    updates_to_make = []
    for i, (loss, name) in enumerate(zip(losses, case.optimizers)):
        optimizer = OPTIMIZERS[name]()
        variables = tf.trainable_variables()[i :: len(losses)]
        pairs = OPTIMIZERS[name]().compute_gradients(loss, variables)
        pairs = [(gradient, v) for gradient, v in pairs if gradient is not None]
        if pairs:
            gradients, variables = zip(*pairs)
            updates_to_make.append((optimizer, CLIPS[case.clip](gradients), variables))

    before = [*losses, *tf.get_collection(tf.GraphKeys.UPDATE_OPS)]
    for _, gradients, _ in updates_to_make:
        before += gradients
    apply = _accumulate if 'accumulation' in case.beside else _apply
    with tf.control_dependencies(before):
        updates = [apply(*update, c) for update in updates_to_make]

    if 'averages' in case.beside:
        averages = tf.train.ExponentialMovingAverage(0.9, tf.train.get_global_step())
        with tf.control_dependencies(updates):
            updates.append(averages.apply(tf.trainable_variables()))

    with tf.control_dependencies(updates):
        step = tf.assign_add(tf.train.get_global_step(), 1)
    if 'counter' in case.beside:
        return tf.group(step, tf.assign_add(c.counter(), 1.0))
    return tf.group(step)


def _apply(optimizer, grads, variables, c):
    return optimizer.apply_gradients(zip(grads, variables))


def _accumulate(optimizer, grads, variables, c):
    """Variables change in each second step, by the gradients of two."""
    sums = [c.counter(*v.shape.as_list()) for v in variables]

    def update():
        with tf.control_dependencies(
            [_apply(optimizer, [s.read_value() for s in sums], variables, c)]
        ):
            return tf.group(*(tf.assign(s, tf.zeros_like(s)) for s in sums))

    added = [tf.assign_add(s, tf.convert_to_tensor(g)) for s, g in zip(sums, grads)]
    with tf.control_dependencies(added):
        return tf.cond(_odd(), update, tf.no_op)


def batches_of(case):
    random = np.random.RandomState(case.seed)
    batches = []
    for rows in [case.sizes[0]] * len(case.sizes) if case.static else case.sizes:
        x, y = random.randn(2, rows, WIDTH)
        ids = random.randint(0, IDS, [rows, 3])
        text = [' '.join(map(str, row[: 1 + row[0] % 3])) for row in ids]
        features = {'x': x, 'ids': ids, 'text': np.array(text, np.bytes_), 'y': y}
        batches.append((features, y))
    return batches


_EMBEDDED = [name for name in OPS if name.startswith('embedded')]
_APART = ['regularized_apart', 'spectral_norm', 'statistics_multiplied']
# Some ops of all, and more of those that write what a batch has no part in.
_ops = st.builds(
    lambda some, embedded, apart: [*some, *embedded, *apart],
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=5),
    st.lists(st.sampled_from(_EMBEDDED), max_size=1),
    st.lists(st.sampled_from(_APART), max_size=1),
)

cases = st.builds(
    Case,
    ops=_ops,
    losses=st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=2),
    optimizers=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=2, max_size=2),
    clip=st.sampled_from(sorted(CLIPS)),
    metrics=st.lists(st.sampled_from(sorted(METRICS)), max_size=2, unique=True),
    sizes=st.builds(lambda rows, last: [rows, min(rows, last)], *[st.integers(1, 11)] * 2),
    static=st.booleans(),
    towers=st.sampled_from([2, 3, 4, 1]),
    seed=st.integers(0, 99),
    beside=st.lists(st.sampled_from(BESIDE), max_size=2, unique=True),
    epochs=st.integers(1, 3),
    behavior=st.sampled_from(['v2', 'v1']),
)
