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

import towers
from models import LazyAdam

WIDTH = 4
IDS = 6

OPS = {}
SIMPLE = set()  # those that take the examples only, and no `c`
SHARDED = set()  # those of which each op that is given examples runs on every device
SHARDED_TYPES = {}  # by model: see _shards()
# Those with a matrix product that may run once, if the graph doesn't know how many examples a batch
# has: they reshape by it. That of clipped_by_row does on TensorFlow 2.15 only.
RESHAPED_PRODUCTS = {'clipped_by_row', 'groups', 'taped'}
# Those with one that may run once if the graph knows how many there are, and so has no sizes of it.
PRODUCTS_OF_PARTS = {'parts_of_rows'}


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
        """Another name for each call."""
        self._count += 1
        return f'v{self._count}'

    def variable(self, *shape, scale=0.5, **options):
        """A variable of random numbers, which are the same in each run."""
        name = self.name()
        values = np.random.RandomState(self._count).randn(*shape) * scale
        return tf.get_variable(name, initializer=values, **options)

    def counter(self, *shape, **options):
        """A variable of zeros, which isn't trained."""
        return tf.get_variable(self.name(), initializer=np.zeros(shape), trainable=False, **options)

    def regularize(self, loss):
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, loss)

    def table(self):
        """A variable with a row for each id."""
        return self.variable(IDS, WIDTH)

    @property
    def ids(self):
        """Three ids for each example."""
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


def _simple(function):
    """Says of a model, as a decorator, that it takes the examples only."""
    SIMPLE.add(function.__name__)
    return function


def _all_sharded(**functions):
    """Adds short models that are `_sharded`."""
    SHARDED.update(functions)
    OPS.update(functions)


def _all_simple(**functions):
    """Adds short models that are `_simple`, and returns them."""
    SIMPLE.update(functions)
    OPS.update(functions)
    return functions


# Of each example by itself: every op runs on every device.

_all_sharded(
    **_all_simple(
        tanh=tf.tanh,
        log_softmax=lambda x: 0.3 * tf.nn.log_softmax(x),
        where_positive=lambda x: tf.where(x > 0, x, 0.1 * x),
        divide=lambda x: x / (1.0 + tf.reduce_sum(tf.abs(x), 1, keepdims=True)),
        cumsum_columns=lambda x: tf.cumsum(x, 1, reverse=True),
        top_k_columns=lambda x: tf.nn.top_k(x, WIDTH).values,
        padded=lambda x: tf.pad(x[:, 1:], [[0, 0], [0, 1]]),
        one_hot=lambda x: x + tf.one_hot(tf.argmax(x, 1), WIDTH, dtype=tf.float64),
        row_norm=lambda x: x / tf.norm(x + 4, axis=1, keepdims=True),
        strided=lambda x: tf.concat([x[:, ::2], x[:, 1::2]], 1),
        clip_rows=lambda x: tf.clip_by_norm(x, 1.0, [1]),
    )
)


@_sharded
@_simple
def transposed(x):
    columns = tf.transpose(x)
    return tf.transpose(tf.tanh(columns))


@_sharded
@_simple
def flattened(x):
    flat = tf.reshape(x, [-1])
    return tf.reshape(tf.tanh(flat), tf.shape(x))


@_sharded
@_simple
def split_columns(x):
    left, right = tf.split(x, 2, 1)
    return tf.concat([right, left], 1)


@_sharded
@_simple
def stacked(x):
    both = tf.stack([x, tf.sin(x)], 0)
    return tf.reduce_mean(both, 0)


@_sharded
@_simple
def unstacked(x):
    columns = tf.unstack(x, axis=1)
    columns.reverse()
    return tf.stack(columns, 1)


def _outer_products(x):
    """Of each example with itself."""
    return x[:, :, None] * x[:, None, :]


@_sharded
@_simple
def pairwise_columns(x):
    return tf.einsum('bij,bj->bi', _outer_products(x), x) * 0.1


@_sharded
@_simple
def batch_matmul(x):
    row = x[:, None, :]
    matrix = 0.2 * x[:, :, None] * x[:, None, :]
    return tf.matmul(row, matrix)[:, 0, :]


@_sharded
@_simple
def band(x):
    return tf.linalg.band_part(_outer_products(x), 0, 1)[:, 0, :]


@_simple
def expanded(x):
    """Some op may run once: what is squeezed has an unknown rank."""
    same = tf.squeeze(tf.expand_dims(x, 1))
    return tf.reshape(same, [-1, WIDTH])


# Across examples: every op runs on every device.

_all_sharded(
    **_all_simple(
        less_max=lambda x: x - tf.reduce_max(x, 0),
        less_min=lambda x: x - tf.reduce_min(x),
        global_norm=lambda x: x / (1 + tf.norm(x)),
        product=lambda x: x + tf.reduce_prod(tf.tanh(x), 0),
        logsumexp=lambda x: x - tf.reduce_logsumexp(x, 0),
        above_diagonal=lambda x: x + tf.linalg.diag(x, k=1)[:, 0, 1:],
        ones=lambda x: x - tf.ones([tf.shape(x)[0], 1], tf.float64),
        filled=lambda x: x * tf.fill(tf.shape(x), tf.constant(0.7, tf.float64)),
        broadcast=lambda x: x + tf.broadcast_to(tf.reduce_sum(x, 0) * 0.1, tf.shape(x)),
        seeded_dropout=lambda x: tf.nn.dropout(x, rate=0.4, seed=11),
        seeded_noise=lambda x: x + tf.random.normal(tf.shape(x), 0, 0.1, tf.float64, seed=5),
        noise_of_row=lambda x: x + tf.random.uniform([WIDTH], 0, 0.1, tf.float64, seed=3),
        stateless=lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2], dtype=tf.float64),
        while_loop=lambda x: _loop(3, lambda i, a: 0.5 * a + tf.sin(a), x),
        cond=lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 0.5, lambda: x - 1),
    )
)


@_sharded
@_simple
def standardized(x):
    centered = x - tf.reduce_mean(x, 0)
    return centered / (tf.math.reduce_std(x, 0) + 0.5)


@_sharded
@_simple
def attention(x):
    weights = tf.nn.softmax(tf.matmul(x, x, transpose_b=True))
    return tf.matmul(weights, x)


def _gram_matrix(x):
    """The products of columns, summed over the examples."""
    return tf.matmul(x, x, transpose_a=True)


@_sharded
@_simple
def gram(x):
    return 0.2 * tf.matmul(x, tf.tanh(_gram_matrix(x)))


@_sharded
@_simple
def whitened(x):
    covariance = _gram_matrix(x) + tf.eye(WIDTH, dtype=tf.float64)
    return tf.matmul(x, tf.linalg.inv(covariance))


@_sharded
@_simple
def by_size(x):
    examples = tf.cast(tf.shape(x)[0], tf.float64)
    return x * (1 + 1 / examples)


@_sharded
@_simple
def outer_product(x):
    pairs = x[:, None, :] * x[None, :, :]
    return 0.1 * tf.reduce_sum(pairs, 1)


@_sharded
@_simple
def distances(x):
    pairs = tf.abs(x[:, None, :] - x[None, :, :])
    return x + tf.reduce_mean(pairs, 1)


@_sharded
@_simple
def any_positive(x):
    is_any = tf.reduce_any(x > 1, 0)
    return tf.where_v2(is_any, x, 0.5 * x)


@_sharded
@_simple
def all_small(x):
    are_all = tf.reduce_all(tf.abs(x) < 2)
    return tf.where_v2(are_all, x, 0.5 * x)


@_sharded
@_simple
def sum_of_maxima(x):
    """Of x and -x: no row has both, so the sum of each tower's maxima is another one."""
    maxima = tf.reduce_max(x, 0) + tf.reduce_max(-x, 0)
    return x - 0.3 * maxima


@_sharded
@_simple
def doubled(x):
    """Each row becomes two rows, and these become one again."""
    twice = tf.reshape(tf.concat([x, -x], 1), [-1, 2, WIDTH])
    return tf.reduce_mean(twice, 1) + x


@_sharded
@_simple
def repeated(x):
    pairs = tf.reshape(tf.repeat(x, 2, 0), [-1, 2, WIDTH])
    return tf.reduce_sum(pairs, 1)


@_sharded
@_simple
def one_part(x):
    """Splits that leave a tensor as it is."""
    [first] = tf.split(x, 1, 0)
    [second] = tf.split(x, [tf.shape(x)[0]])
    return tf.tanh(first) + second


@_sharded
@_simple
def copies_in_blocks(x):
    copies = tf.sin(tf.tile(x, [3, 1]))
    return tf.reduce_mean(tf.reshape(copies, [3, -1, WIDTH]), 0)


@_sharded
@_simple
def copies_summed(x):
    return x + 0.1 * tf.reduce_mean(tf.square(tf.tile(x, [2, 1])), 0)


@_sharded
@_simple
def time_major(x):
    """All examples' first entries, then their second ones, and so on."""
    column = tf.tanh(tf.reshape(tf.transpose(x), [-1, 1]))
    rows = tf.reshape(tf.transpose(column), [WIDTH, -1])
    return rows[0][:, None] + x


@_sharded
@_simple
def stacked_in_blocks(x):
    both = tf.tanh(tf.reshape(tf.stack([x, -x]), [-1, WIDTH]))
    return tf.reshape(both, [2, -1, WIDTH])[1]


@_sharded
@_simple
def images_of_images(x):
    images = tf.reshape(x, [-1, 2, 2, 1])
    parts = tf.tanh(tf.space_to_batch_nd(images, [2, 2], [[0, 2], [2, 0]]))
    images = tf.batch_to_space_nd(parts, [2, 1], [[0, 2], [0, 0]])
    return tf.reshape(images[: tf.shape(x)[0]], [-1, WIDTH])


@_sharded
@_simple
def cond_of_blocks(x):
    both = tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.concat([x, tf.sin(x)], 0),
        lambda: tf.tile(tf.tanh(x), [2, 1]),
    )
    return tf.reduce_mean(tf.stack(tf.split(both, 2)), 0)


@_sharded
@_simple
def wide(x):
    """A matrix of examples by examples."""
    products = tf.matmul(x, x, transpose_b=True)
    return tf.matmul(tf.transpose(products), x) * 0.1


@_sharded
@_simple
def rows_in_halves(x):
    halves = tf.reshape(x, [2 * tf.shape(x)[0], 2])
    return tf.reshape(halves**3, [-1, WIDTH])


@_simple
def eye(x):
    """Its rows aren't known to be examples: of the gradient, only products are sharded."""
    identity = tf.eye(tf.shape(x)[0], dtype=tf.float64)
    return tf.matmul(identity * 2.0, x)


@_sharded
@_simple
def string(x):
    text = tf.as_string(tf.round(x))
    return x + tf.strings.to_number(text, tf.float64) * 0.1


@_sharded
@_simple
def second(x):
    """A gradient of a gradient."""
    [slope] = tf.gradients(tf.reduce_sum(x**3), x)
    [curvature] = tf.gradients(slope, x)
    return x + 0.1 * curvature


@_sharded
@_simple
def saliency(x):
    score = tf.reduce_mean(tf.sin(x) * tf.norm(x + 3))
    return x + 0.1 * tf.gradients(score, x)[0]


@_sharded
@_simple
def case(x):
    is_large = tf.reduce_max(x) > 2
    is_small = tf.reduce_min(x) < -2
    branches = [(is_large, lambda: x * 0.5), (is_small, lambda: x + 1)]
    return tf.case(branches, default=lambda: tf.sin(x))


@_sharded
@_simple
def switch_case(x):
    is_odd = tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32) % 2
    return tf.switch_case(is_odd, [lambda: x * 0.7, lambda: tf.tanh(x)])


# Across examples, such that some op may run once.

_all_simple(
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
    shuffled=lambda x: tf.random.shuffle(x, seed=9),
    map_fn=lambda x: tf.map_fn(lambda r: r * tf.reduce_sum(r) * 0.2, x),
    mixed_reversed=lambda x: 0.7 * x + 0.3 * x[::-1],
    mixed_rolled=lambda x: 0.7 * x + 0.3 * tf.tanh(tf.roll(x, 1, 0)),
    scan=lambda x: tf.scan(lambda a, r: 0.5 * a + tf.tanh(r), x),
)


@_simple
def quantile(x):
    """Less the median of all numbers."""
    ordered = tf.sort(tf.reshape(x, [-1]))
    return x - ordered[tf.size(x) // 2]


@_simple
def by_index(x):
    indices = tf.range(tf.shape(x)[0])
    return x + 0.1 * tf.cast(indices, tf.float64)[:, None]


@_simple
def masked(x):
    left = tf.boolean_mask(x, x[:, 0] > 0)
    return x - tf.reduce_sum(left) * 0.1


@_simple
def halves(x):
    middle = tf.shape(x)[0] // 2
    return tf.concat([x[:middle], 2 * x[middle:]], 0)


@_simple
def long(x):
    """A cumulative sum of all numbers, one after another."""
    sums = tf.cumsum(tf.reshape(x, [-1]))
    return tf.reshape(sums, [-1, WIDTH]) * 0.1


@_simple
def diagonal(x):
    products = tf.matmul(x, x, transpose_b=True)
    return x * tf.linalg.diag_part(products)[:, None] * 0.1


@_simple
def diagonals(x):
    """The trace of a matrix of each example."""
    matrices = tf.reshape(tf.tile(x, [1, WIDTH]), [-1, WIDTH, WIDTH])
    return x + tf.einsum('bii->b', matrices)[:, None]


@_simple
def interleaved(x):
    """Numbers of one row are summed with those of others."""
    parts = tf.tanh(tf.reshape(x, [2, -1, 2]))
    return x * tf.reduce_sum(parts, [0, 2])[:, None]


@_sharded
@_simple
def mapped_apart(x):
    """One example after the other, with a number of all; no gradient goes through it."""
    most = tf.reduce_max(tf.abs(x))
    scales = tf.map_fn(lambda row: tf.reduce_sum(row * row) / (1 + most), x)
    return x * tf.stop_gradient(tf.sigmoid(scales))[:, None]


@_simple
def interleaved_views(x):
    """Two views of each example are interleaved, normalized, and put in order again."""
    both = tf.reshape(tf.concat([x, tf.sin(x)], 0), [-1, 2, WIDTH])
    net = tf.reshape(tf.transpose(both, [1, 0, 2]), [-1, WIDTH])
    net = tf.tanh(net - tf.reduce_mean(net, 0))
    ordered = tf.transpose(tf.reshape(net, [2, -1, WIDTH]), [1, 0, 2])
    first, second = tf.split(tf.reshape(ordered, [-1, WIDTH]), 2)
    return first + 0.5 * second


@_simple
def while_rows(x):
    """The loop goes on while any number is large."""

    def goes_on(i, a):
        return tf.logical_and(tf.reduce_max(tf.abs(a)) > 0.7, i < 9)

    return tf.while_loop(goes_on, lambda i, a: (i + 1, a * 0.7), (0, x))[1]


@_simple
def while_any(x):
    def goes_on(_, a):
        return tf.reduce_any(tf.abs(a) > 0.7)

    return tf.while_loop(goes_on, lambda i, a: (i + 1, a * 0.7), (0, x))[1]


@_simple
def while_counted(x):
    """Up to three rounds, fewer if there are fewer examples."""

    def goes_on(i, _):
        return i < tf.minimum(tf.shape(x)[0], 3)

    return tf.while_loop(goes_on, lambda i, a: (i + 1, a + 0.1 * x[i]), (0, x))[1]


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
    hidden = tf.nn.relu(tf.matmul(x, c.variable(WIDTH, 7)))
    return x + tf.matmul(hidden, c.variable(7, WIDTH))


# With variables, or with ids.


@_sharded
def scaled_by_variable(x, c):
    return x * c.variable(WIDTH) + c.variable(1)


@_sharded
def gathered_rows(x, c):
    """Ids say which example of the batch."""
    examples = tf.shape(x, out_type=tf.int64)[0]
    return x + tf.gather(x, c.ids[:, 0] % examples)


@_sharded
def segments(x, c):
    """The sum of the examples with the same id."""
    sums = tf.math.unsorted_segment_sum(x, c.ids[:, 0], IDS)
    return tf.gather(sums, c.ids[:, 0]) * 0.3


@_sharded
def labels_of_all(x, c):
    labels = c.features['y']
    return x + tf.reduce_mean(labels) - labels


def embedded(x, c):
    return x + tf.nn.embedding_lookup(c.table(), c.ids[:, 0])


def embedded_mean(x, c):
    return x + tf.reduce_mean(tf.gather(c.table(), c.ids), 1)


def embedded_parts(x, c):
    """The table is in two parts."""
    parts = [c.variable(3, WIDTH), c.variable(3, WIDTH)]
    return x + tf.nn.embedding_lookup(parts, c.ids[:, 1])


@_shards('SparseFillEmptyRows')
def embedded_sparse(x, c):
    ids = tf.sparse.from_dense(c.ids)
    return x + tf.nn.safe_embedding_lookup_sparse(c.table(), ids, None)


@_shards('SparseFillEmptyRows')
def embedded_by_weight(x, c):
    """Each example has its largest ids only, of a table in two parts."""
    ids = tf.sparse.from_dense(c.ids)
    weights = tf.SparseTensor(ids.indices, tf.cast(ids.values, x.dtype) / 3, ids.dense_shape)
    parts = [c.variable(3, WIDTH), c.variable(3, WIDTH)]
    is_large = ids.values > 1
    weights = tf.sparse.retain(weights, is_large)
    ids = tf.sparse.retain(ids, is_large)
    return x + tf.nn.safe_embedding_lookup_sparse(parts, ids, weights, 'sqrtn')


@_shards('SparseCross')
def embedded_pairs(x, c):
    """Each pair of an id and of the number of a feature's bucket has an embedding."""
    ids = tf.sparse.from_dense(c.ids)
    buckets = tf.cast(x[:, :2] > 0, tf.int64)
    pairs = tf.sparse.cross_hashed([ids, buckets], IDS)
    return x + tf.nn.safe_embedding_lookup_sparse(c.table(), pairs, None, 'sum')


def counted_ids(x, c):
    """How often an example has each id, of those that it has; the rest of them is 0."""
    ids = tf.sparse.to_dense(tf.sparse.from_dense(c.ids), default_value=-1)
    return x + tf.reduce_sum(tf.one_hot(ids, WIDTH, dtype=x.dtype), 1)


def different_ids(x, c):
    """What all have looked up: each id of the batch counts once."""
    ids, places = tf.unique(tf.sparse.from_dense(c.ids).values)
    rows = tf.nn.embedding_lookup(c.table(), ids)
    c.regularize(tf.nn.l2_loss(rows) / 10)
    return x + tf.reduce_sum(tf.gather(rows, places), 0) / 10


def scattered_column(x, c):
    """A sum is put into one place of a matrix of zeros."""
    total = tf.reduce_sum(x)[None] * 0.1
    return x + tf.tensor_scatter_nd_add(tf.zeros_like(x), [[0, 0]], total)


def table_lookup(x, c):
    pairs = tf.lookup.KeyValueTensorInitializer(['1', '2', '3'], tf.constant([1, 2, 4], tf.int64))
    table = tf.lookup.StaticHashTable(pairs, 0)
    ids = table.lookup(tf.as_string(c.ids[:, 0]))
    return x + tf.gather(c.table(), ids)


@_sharded
def gather_nd(x, c):
    """Of each row, the number in the column that an id says."""
    rows = tf.range(tf.shape(x)[0], dtype=tf.int64)
    places = tf.stack([rows, c.ids[:, 0] % WIDTH], 1)
    return x * tf.gather_nd(x, places)[:, None]


@_sharded
def beams(x, c):
    best = tf.nn.top_k(x @ c.variable(WIDTH, WIDTH), 2).indices
    columns = tf.gather(x, best, batch_dims=1)
    return x + tf.reduce_mean(columns, 1, keepdims=True)


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
def places_of_rows(x, c):
    """Two places in each example, and what is put there."""
    rows = tf.range(tf.shape(x)[0])
    pairs = tf.tile(rows[:, None], [1, 2])
    columns = tf.cast(c.ids[:, :2] % 2, tf.int32)
    places = tf.concat([pairs[:, :, None], columns[:, :, None]], -1)
    found = tf.gather_nd(x, tf.stack([pairs, columns + [0, 2]], 2))
    scattered = tf.scatter_nd(places, tf.tanh(found), tf.shape(x))
    last = tf.cast(tf.stack([rows, columns[:, 1]], 1), tf.int64)
    return tf.tensor_scatter_nd_update(x, last, found[:, 0]) + scattered


@_sharded
def last_step(x, c):
    """Of sequences of one or two steps, as ids say, the last one."""
    steps = tf.math.cumsum(tf.reshape(x, [-1, 2, WIDTH // 2]), 1)
    rows = tf.range(tf.shape(x)[0])
    last = tf.gather_nd(steps, tf.stack([rows, tf.cast(c.ids[:, 0] % 2, tf.int32)], 1))
    return x + tf.tile(last, [1, 2])


def class_weights(x, c):
    """Each example counts less if many have its id."""
    ids = tf.cast(c.ids[:, 0], tf.int32)
    counts = tf.math.bincount(ids, minlength=IDS, dtype=tf.float64)
    return x * tf.gather(1 / (1 + counts), c.ids[:, 0])[:, None]


def pieces_by_variable(x, c):
    """Each row is cut into as many pieces as a variable says."""
    pieces = tf.get_variable(c.name(), initializer=3, trainable=False)
    wide_rows = tf.matmul(x, c.variable(WIDTH, 6))
    cut = tf.reshape(wide_rows, tf.stack([tf.shape(x)[0], tf.identity(pieces), 2]))
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
    """By CTC, of sequences of one or two steps: how many symbols there are."""
    steps = tf.transpose(tf.reshape(tf.cast(x, tf.float32), [-1, 2, WIDTH // 2]), [1, 0, 2])
    step_counts = tf.cast(1 + c.ids[:, 0] % 2, tf.int32)
    [symbols], _ = tf.nn.ctc_beam_search_decoder(steps, step_counts, 4)
    lengths = tf.RaggedTensor.from_sparse(symbols).row_lengths()
    return x * (1 + tf.cast(lengths, tf.float64))[:, None]


# By other ops' rows: as many as a mask leaves, as ids say, or as Python likes.


def _added_at(x, places, rows):
    """Adds rows to those of `x` that they were taken from."""
    return x + tf.scatter_nd(places, rows, tf.shape(x, out_type=tf.int64))


def _without_padding(x, c, mask):
    """A layer for the rows that a mask leaves."""
    left = tf.gather_nd(x, tf.where(mask))
    return _added_at(x, tf.where(mask), dense(left, c))


@_sharded
def without_padding(x, c):
    return _without_padding(x, c, c.ids[:, 0] > 1)


@_sharded
def without_all(x, c):
    """The mask leaves no row."""
    return _without_padding(x, c, c.ids[:, 0] > IDS)


def masked_dense(x, c):
    places = tf.where(x[:, 0] > 0)
    left = tf.boolean_mask(x, x[:, 0] > 0)
    return 0.3 * _added_at(x, places, dense(left, c))


@_shards('UnsortedSegmentMax')
def masked_tokens(x, c):
    """Of two tokens for each example, what masks of both select, and its place in the batch."""
    tokens = tf.reshape(x, [-1, 2, WIDTH // 2])
    mask = c.ids[:, :2] > 2
    left = tf.boolean_mask(tokens, mask)
    hidden = tf.tanh(left @ c.variable(WIDTH // 2, WIDTH // 2)) - tf.reduce_mean(left, 0)
    flat_places = tf.reshape(tf.where(tf.reshape(mask, [-1])), [-1])
    count = tf.size(mask)
    sums = tf.math.unsorted_segment_sum(hidden, tf.cast(flat_places, tf.int32), count)
    largest = tf.math.unsorted_segment_max(hidden, flat_places, count)
    both = sums + tf.maximum(largest, -1.0)
    share = tf.cast(tf.shape(flat_places)[0], tf.float64) / tf.cast(count, tf.float64)
    return x * share + tf.reshape(both, [-1, WIDTH])


def masked_again(x, c):
    """A mask of what another one leaves, whose places are also summed as numbers."""
    places = tf.where(x[:, 0] > -0.5)
    left = tf.gather_nd(x, places)
    again = tf.where(left[:, 1] > 0)
    changed = left + tf.scatter_nd(
        again, tf.gather_nd(left, again), tf.shape(left, out_type=tf.int64)
    )
    middle = tf.reduce_sum(tf.cast(places, tf.float64))
    return _added_at(0.5 * x, places, changed) + 0.01 * middle


def masked_in_a_branch(x, c):
    """One is taken, and one isn't."""
    selected = lambda: tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0), 0)  # noqa: E731
    is_many = tf.shape(x)[0] > 100
    return x + 0.1 * (
        tf.cond(is_many, selected, lambda: tf.reduce_mean(x, 0))
        + tf.cond(is_many, lambda: tf.reduce_mean(x, 0), selected)
    )


def _by_python(function, x):
    """Rows that a Python function makes: nobody knows how many."""
    rows = tf.py_function(function, [x], x.dtype)
    rows.set_shape([None, WIDTH])
    return rows


def python_dense(x, c):
    every_other = _by_python(lambda v: v[::2], x)
    return x + 0.1 * tf.reduce_mean(dense(every_other, c), 0)


def python_row(x, c):
    """One row, which is repeated, though nobody could know."""
    first = _by_python(lambda v: v[:1], x)
    return x + dense(first, c)


def python_rows(x, c):
    """As many rows as the batch has."""
    twice = _by_python(lambda v: 2 * v, x)
    return x * dense(twice, c)


def python_repeated(x, c):
    """Rows of its own meet one row, which is repeated for them."""
    five = _by_python(lambda v: tf.repeat(v[:1], 5, 0), x)
    return x + 0.1 * tf.reduce_sum(dense(five, c) - x[:1], 0)


def python_unknown(x, c):
    """A number, though nobody knows that it is one."""
    largest = tf.py_func(np.max, [tf.stop_gradient(x)], tf.float64)
    return x * tf.reduce_mean(tf.cast(largest, x.dtype))


def masked_centered(x, c):
    left = dense(tf.boolean_mask(x, c.ids[:, 0] > 1), c)
    mean = tf.reduce_mean(tf.concat([left, x], 0), 0)
    return x + tf.reduce_sum(left - mean) * 0.1


def masked_twice(x, c):
    """Rows of two spaces, that are summed, and one of one space with the other's."""
    one = dense(tf.boolean_mask(x, x[:, 0] > 0), c)
    two = dense(tf.concat([x[:1], tf.boolean_mask(x, x[:, 0] < 0.3)], 0), c)
    sums = tf.reduce_sum(one, 0) + tf.reduce_mean(two, 0)
    return x + 0.1 * (sums + tf.reduce_sum(one * two[:1]))


def masked_images(x, c):
    rows = tf.concat([x[:1], tf.boolean_mask(x, x[:, 0] > 0)], 0)
    images = tf.reshape(rows, [-1, 2, 2, 1])
    convolved = tf.tanh(tf.nn.conv2d(images, c.variable(2, 2, 1, 3), 1, 'SAME'))
    return x + 0.1 * tf.reduce_sum(tf.square(convolved))


def pairs_with_left(x, c):
    """Each row that is left with each of the batch's, as rows of their own."""
    left = tf.gather_nd(x, tf.where(c.ids[:, 0] > 1))
    products = tf.matmul(left, tf.tanh(x), transpose_b=True)
    pairs = tf.reshape(products, [-1, 1])
    hidden = tf.tanh(tf.matmul(pairs, c.variable(1, 2)))
    return x + 0.1 * tf.reduce_sum(tf.square(hidden))


def repeated_dense(x, c):
    """As many rows as ids say, by their own layers, and added up again."""
    examples = tf.repeat(tf.range(tf.shape(x)[0]), c.ids[:, 1] % 3)
    rows = residual(dense(tf.gather(x, examples), c), c)
    return x + 0.2 * tf.math.unsorted_segment_sum(rows, examples, tf.shape(x)[0])


def unique_dense(x, c):
    """A layer for each id, rather than for each example."""
    ids, index = tf.unique(c.ids[:, 0])
    rows = dense(tf.gather(c.table(), ids), c)
    return x + tf.gather(rows, index)


def ragged_dense(x, c):
    """Of as many ids as each example has."""
    vectors = tf.gather(c.table(), tf.RaggedTensor.from_tensor(c.ids, padding=0))
    w = c.variable(WIDTH, WIDTH)
    hidden = tf.ragged.map_flat_values(lambda v: tf.tanh(v @ w), vectors)
    return x + tf.reduce_sum(hidden, 1)


# Layers.


def _fused(x, c, training):
    image = tf.cast(tf.reshape(x, [-1, 1, WIDTH // 2, 2]), tf.float32)
    options = {'center': False, 'scale': False, 'fused': True, 'name': c.name()}
    image = tf.layers.batch_normalization(image, training=training, **options)
    # float32 is rounded otherwise in another order: what it adds is small.
    return x + 1e-6 * tf.reshape(tf.cast(image, tf.float64), [-1, WIDTH])


@_sharded
def batch_norm(x, c):
    return 0.7 * tf.layers.batch_normalization(x, training=True, name=c.name())


@_sharded
def fused_batch_norm(x, c):
    return _fused(x, c, training=True)


@_sharded
def fused_inference(x, c):
    return _fused(x, c, training=False)


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
    layer = tf.keras.layers.Dense(
        WIDTH,
        'tanh',
        dtype=tf.float64,
        kernel_regularizer=tf.keras.regularizers.l2(0.1),
        activity_regularizer=tf.keras.regularizers.l2(0.1),
    )
    hidden = layer(inputs)
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
    examples = tf.cast(tf.shape(x)[0], tf.float64)
    with tf.control_dependencies([tf.assign_add(seen, examples)]):
        x = tf.identity(x)
    with tf.control_dependencies([x]):
        return x / (1 + 0.1 * seen.read_value())


@_sharded
def moving_mean(x, c):
    average = c.counter(WIDTH)
    moved = 0.9 * average + 0.1 * tf.reduce_mean(x, 0)
    with tf.control_dependencies([tf.assign(average, moved)]):
        return x - average.read_value()


@_sharded
def read_then_written(x, c):
    """A loop has to read before the variable is written, in each tower."""
    w = c.variable(WIDTH, WIDTH)
    shift = c.counter()
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
    """Calls `x = body(i, x)` so many times, and returns the last `x`."""
    return tf.while_loop(lambda i, h: i < times, lambda i, h: (i + 1, body(i, h)), (0, x))[1]


def _plus_ones(h, shape):
    """Adds ones, whose number of rows is that of `h`, though TensorFlow doesn't know.

    If it knows that `h` has one row, it would take the sum to be broadcast to any number of rows.
    """
    total = h + tf.ones(shape, tf.float64)
    total.set_shape(h.shape)
    return total


def _odd():
    """Whether the step is an odd one."""
    return tf.equal(tf.train.get_or_create_global_step() % 2, 1)


@_shards('While', always=False)
def while_whole(x, c):
    """The loop adds, in each round, what is computed once of the global batch."""
    sums = tf.cumsum(x, 0)
    return _loop(2, lambda i, h: 0.5 * h + sums, x)


@_sharded
def recurrent(x, c):
    """Each round reads the weights of the next."""
    w = c.variable(1, WIDTH)
    u = c.variable(WIDTH, WIDTH, scale=0.3)

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
        is_longer = i < c.ids[:, 0]
        state = tf.where(is_longer, tf.tanh(tf.matmul(state, u) + x), state)
        return i + 1, state, outputs.write(tf.cast(i, tf.int32), state)

    array = tf.TensorArray(tf.float64, 4, element_shape=[None, WIDTH])
    start = tf.constant(0, tf.int64), 0 * x, array
    _, _, array = tf.while_loop(lambda i, *_: i < 4, body, start)
    outputs = array.stack()
    return tf.reduce_mean(outputs, 0) + tf.reduce_max(tf.square(outputs), [0, 2])[:, None]


@_sharded
def dynamic_rnn(x, c):
    cell = tf.nn.rnn_cell.GRUCell(WIDTH)
    steps = tf.reshape(x, [-1, 2, WIDTH // 2])
    _, state = tf.nn.dynamic_rnn(cell, steps, dtype=tf.float64, scope=c.name())
    return x + state


@_sharded
def two_sequences(x, c):
    """The same recurrent layer for two batches of sequences, one after the other."""
    sequences = tf.reshape(tf.concat([x, tf.sin(x)], 0), [-1, 2, WIDTH // 2])
    cell = tf.nn.rnn_cell.GRUCell(WIDTH)
    length = tf.concat([1 + c.ids[:, 0] % 2, 1 + c.ids[:, 1] % 2], 0)
    outputs, state = tf.nn.dynamic_rnn(cell, sequences, length, dtype=tf.float64, scope=c.name())
    first, second = tf.split(tf.reduce_mean(outputs, 1) + state, 2, 0)
    return x + first * second


def written_rows(x, c):
    """One row a round, and as many rounds as there are rows."""

    def write(i, rows):
        return i + 1, rows.write(i, x[i] * 2)

    rows = tf.TensorArray(tf.float64, tf.shape(x)[0], element_shape=[WIDTH])
    _, rows = tf.while_loop(lambda i, _: i < tf.shape(x)[0], write, (0, rows))
    return tf.reshape(rows.stack(), [-1, WIDTH])


@_sharded
def large_zeros(x, c):
    """Of so many entries that TensorFlow makes no constant of them."""
    wide = tf.tile(x, [1, 100])
    zeros = tf.zeros([x.shape[0] or tf.shape(x)[0], 100 * WIDTH], tf.float64)

    def add_where_positive(i, h):
        return 0.5 * tf.where(wide > 0, h + wide, tf.zeros_like(h))

    return x + _loop(3, add_where_positive, zeros)[:, :WIDTH]


def loop_with_effects(x, c):
    count = c.counter()

    def body(i, h):
        with tf.control_dependencies([tf.assign_add(count, 1.0)]):
            return tf.tanh(h)

    return _loop(3, body, x)


def nested_loops(x, c):
    w = c.variable(WIDTH, WIDTH)

    def inner(h):
        return _loop(2, lambda i, h: tf.tanh(tf.matmul(h, w)), h)

    x = _loop(2, lambda i, h: inner(h) + x, x)
    return tf.cond(_odd(), lambda: inner(x), lambda: inner(2.0 * x))


@_sharded
def shape_in_a_loop(x, c):
    shape = tf.shape(x)

    def body(i, h):
        flat = tf.reshape(h, [-1])
        return tf.reshape(tf.tanh(flat), shape)

    return _loop(2, body, x)


@_shards('While', always=False)
def sizes_in_a_loop(x, c):
    products = tf.matmul(x, x, transpose_b=True)
    shape = tf.shape(products)
    return _loop(2, lambda i, h: _plus_ones(h, [shape[1], 1]), x)


@_shards('While')
def size_in_a_loop(x, c):
    """After the loop it's that of the whole batch, though each tower's loop has its own."""

    def body(i, size, h):
        return i + 1, size, _plus_ones(h, [size, 1])

    def loop(h):
        _, size, h = tf.while_loop(lambda i, *_: i < 3, body, (0, tf.shape(h)[0], h))
        return h / tf.cast(size, tf.float64)

    return _loop(2, lambda i, h: loop(h), loop(x))


@_shards('While', always=False)
def embedded_in_a_loop(x, c):
    """Sparse gradients from inside a loop and a branch."""
    table = c.table()
    ids = c.ids

    def looked_up(column):
        return tf.nn.embedding_lookup(table, ids[:, column])

    x = _loop(3, lambda i, h: h + tf.tanh(looked_up(i)), x)
    return x + tf.cond(_odd(), lambda: looked_up(0), lambda: 2.0 * x)


@_sharded
def cond_in_a_loop(x, c):
    w = c.variable(WIDTH, WIDTH)
    v = c.variable(WIDTH, WIDTH)

    def body(i, h):
        is_even = tf.equal(i % 2, 0)
        return tf.cond(is_even, lambda: tf.tanh(tf.matmul(h, w)), lambda: tf.matmul(h, v) + h)

    return _loop(4, body, x)


def cond_by_rows_in_a_loop_in_a_cond(x, c):
    w = c.variable(WIDTH, WIDTH)

    def small(h):
        is_large = tf.reduce_max(h) > 0.5
        return tf.cond(is_large, lambda: tf.minimum(h, 0.5), lambda: tf.identity(h))

    def body(i, h):
        return tf.matmul(small(h), w)

    return tf.cond(_odd(), lambda: _loop(2, body, x), lambda: x)


@_sharded
def cond_of_several(x, c):
    """Lists and dicts, an output that does not depend on the shard, and an unused one."""
    w = c.variable(WIDTH, WIDTH)
    v = c.variable(WIDTH, WIDTH)

    def one():
        return {'a': tf.matmul(x, w), 'b': [w * 2.0, tf.shape(x)[0]]}

    def two():
        return {'a': tf.identity(x), 'b': [tf.tanh(w + v), tf.constant(0)]}

    outputs = tf.cond(_odd(), one, two)
    return tf.matmul(outputs['a'], outputs['b'][0])


@_sharded
def mean_in_a_branch(x, c):
    """Of all rows, which towers have unevenly."""
    mean = tf.cond(_odd(), lambda: tf.reduce_mean(x, 0), lambda: tf.reduce_mean(2 * x, 0))
    return x - mean


@_sharded
def across_in_a_branch(x, c):
    return tf.cond(_odd(), lambda: attention(standardized(x)), lambda: whitened(x))


@_sharded
def drawn_in_branches(x, c):
    """Of an inner cond, the examples decide together."""
    w = c.variable(WIDTH, WIDTH)

    def inner():
        h = tf.tanh(tf.matmul(x, w))
        dropped = lambda: tf.nn.dropout(h, rate=0.4, seed=11)  # noqa: E731
        return tf.cond(tf.reduce_sum(h) > 0, dropped, lambda: h - tf.reduce_max(h, 0))

    return tf.cond(_odd(), inner, lambda: x + tf.random.normal([WIDTH], 0, 0.1, tf.float64, seed=3))


@_sharded
def loops_in_branches(x, c):
    """The second one's end is decided by all examples."""
    w = c.variable(WIDTH, WIDTH)
    fixed = lambda: _loop(3, lambda i, h: tf.tanh(tf.matmul(h, w)) + x, x)  # noqa: E731

    def until_small():
        goes_on = lambda i, h: (i < 4) & (tf.reduce_max(h) > 0.1)  # noqa: E731
        _, h = tf.while_loop(goes_on, lambda i, h: (i + 1, 0.5 * h), (0, x))
        return tf.matmul(x, w) + tf.stop_gradient(h)

    return tf.cond(_odd(), fixed, until_small)


@_sharded
def switch_case_across(x, c):
    w = c.variable(WIDTH, WIDTH)
    number = tf.cast(tf.train.get_or_create_global_step() % 4, tf.int32)
    branches = [
        lambda: standardized(tf.matmul(x, w)),
        lambda: gram(x),
        lambda: tf.cond(
            tf.reduce_mean(x) > 0, lambda: OPS['seeded_noise'](x), lambda: tf.matmul(x, w)
        ),
    ]
    return tf.switch_case(number, branches)


@_sharded
def cond_on_placeholders(x, c):
    no = tf.placeholder_with_default(False, [])

    def inner():
        return tf.cond(_odd(), lambda: tf.tanh(x), lambda: tf.tanh(2.0 * x))

    return tf.cond(no, lambda: x, inner)


@_sharded
def trained_in_a_loop(x, c):
    """Weights that are adapted to the batch in two steps."""
    start = c.variable(WIDTH, WIDTH, use_resource=True)

    def body(i, w):
        [slope] = tf.gradients(tf.reduce_mean(tf.square(tf.matmul(x, w) - 1)), w)
        return i + 1, w - 0.05 * slope

    adapted = tf.while_loop(lambda i, w: i < 2, body, (0, start.read_value()))[1]
    return 0.5 * tf.matmul(x, adapted)


def parts_of_rows(x, c):
    """The first two rows, of which there may be one, and others, of which there may be none."""
    w = c.variable(WIDTH, WIDTH)
    first, others = tf.matmul(x[:2], w), tf.matmul(x[2:], w)
    return (
        x + 0.1 * tf.reduce_mean(first * tf.sigmoid(x[:2]), 0) + tf.reduce_sum(tf.tanh(others), 0)
    )


def loop_with_rows_summed(x, c):
    """The loop may run once."""
    return _loop(2, lambda i, h: h - 0.1 * tf.reduce_mean(h, 0), x)


def _graph_of_v1(loop_name):
    """A loop with a branch and a TensorArray in it, of TensorFlow 1.

    Its frame has the loop's name: TensorFlow fails if another loop has it, too.
    """
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float64, [None, WIDTH], 'x')

        def body(i, h, states):
            h = tf.cond(tf.equal(i % 2, 0), lambda: tf.tanh(h + x), lambda: 0.5 * h)
            return i + 1, h, states.write(i, h)

        start = 0, tf.zeros_like(x), tf.TensorArray(tf.float64, 3)
        _, h, states = tf.while_loop(lambda i, *_: i < 3, body, start, name=loop_name)
        tf.add(h, tf.reduce_sum(states.stack(), 0), 'y')
    return graph.as_graph_def()


@_sharded
def imported(x, c):
    """Of the features, as TensorFlow can't differentiate a loop that is imported."""
    rows = c.features['x']
    [y] = tf.import_graph_def(_graph_of_v1(c.name()), {'x:0': rows}, ['y:0'])
    y.set_shape(rows.shape)
    return x + y


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
    layer = _layer(c)
    calls = c.counter(use_resource=True)

    @tf.function
    def inner(v):
        calls.assign_add(1.0)
        return v / (1 + calls.read_value())

    @tf.function
    def outer(v):
        return tf.tanh(inner(layer(v))) + inner(v)

    with tf.control_dependencies([calls.assign_add(0.5)]):
        return outer(x)


# Gradients that models change, mix and use.


def checkpointed(x, c):
    """A gradient function with `variables`, as reversible layers have, and gradients recomputed."""
    w = c.variable(WIDTH, WIDTH, use_resource=True)
    v = c.variable(WIDTH, WIDTH, use_resource=True)

    @tf.custom_gradient
    def with_own_gradient(h):
        def gradient(dy, variables=None):
            dy = tf.convert_to_tensor(dy)
            of_variables = [0.1 * tf.matmul(h, dy, transpose_a=True)] if variables else []
            return dy * 0.5, of_variables

        return tf.tanh(tf.matmul(h, w)), gradient

    def layer(h):
        return tf.tanh(tf.matmul(h, v))

    x = tf.recompute_grad(layer)(x)
    x = tf.recompute_grad(layer)(x)
    return with_own_gradient(x)


@_sharded
def inner_step(x, c):
    """MAML: a loss after a step of gradient descent."""
    w = c.variable(WIDTH, WIDTH)
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - x))
    [gradient] = tf.gradients(loss, w)
    return tf.tanh(tf.matmul(x, w - 0.1 * gradient))


def hessian(x, c):
    w = c.variable(WIDTH)
    energy = tf.reduce_mean(tf.exp(-tf.square(x * w)))
    [curvatures] = tf.hessians(energy, w)
    return x + 0.1 * tf.linalg.diag_part(curvatures)


def third_derivatives(x, c):
    layer = _layer(c)
    energy = tf.function(lambda v: tf.reduce_sum(layer(v) ** 3))
    [slope] = tf.gradients(energy(x), x)
    [curvature] = tf.gradients(tf.reduce_sum(slope**2), x)
    return x + 0.1 * curvature


@_sharded
def penalized(x, c):
    """WGAN's: slopes where real and generated rows are mixed, each in its own proportion."""
    share = tf.sigmoid(10 * x[:, :1])
    generated = tf.matmul(x[:, ::-1], c.variable(WIDTH, WIDTH))
    mixed = share * x + (1 - share) * generated

    critic = tf.tanh(mixed @ c.variable(WIDTH, WIDTH))
    [slope] = tf.gradients(tf.matmul(critic, c.variable(WIDTH, 1)), x)
    norms = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 0.1)
    return x + 0.1 * tf.reduce_mean(tf.square(norms - 1))


def _clipped_by_row(x, c, **options):
    """The gradient of each row is clipped, as for differential privacy."""
    w = c.variable(WIDTH, WIDTH, use_resource=True)
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.tanh(tf.matmul(x, w)), 1)
    grads = tape.jacobian(losses, w, **options)
    factors = 1 / tf.maximum(tf.norm(grads, axis=[1, 2]), 1)
    return tf.matmul(x, tf.reduce_mean(grads * factors[:, None, None], 0))


def clipped_by_row(x, c):
    return _clipped_by_row(x, c)


def clipped_by_row_in_a_loop(x, c):
    return _clipped_by_row(x, c, experimental_use_pfor=False)


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
    """A derivative in the direction of a change of the weights."""
    w = c.variable(WIDTH, WIDTH, use_resource=True)
    direction = 0.1 * tf.ones([WIDTH, WIDTH], w.dtype)
    with tf2.autodiff.ForwardAccumulator(w, direction) as accumulator:
        hidden = tf.tanh(tf.matmul(x, w))
    return hidden + accumulator.jvp(hidden)


def pairs_first(x, c):
    """As many pairs as 7 rows; the graph tells which are which."""
    wide = c.variable(WIDTH, 14, use_resource=True)

    @tf.function
    def pairs_of(x, w):
        h = tf.matmul(x, w)
        x_shape, w_shape = tf.raw_ops.ShapeN(input=[x, w])
        for _ in tf.range(2):
            h = _plus_ones(h, [x_shape[0], w_shape[1]])
        return tf.reshape(h, [x_shape[0], 7, 2])

    pairs = tf.transpose(pairs_of(x, wide.read_value()), [1, 0, 2])
    pairs = tf.reshape(pairs, [-1, 2])
    [slope] = tf.gradients(tf.reduce_sum(tf.tanh(pairs)), x)
    return x + 0.1 * slope


for _name, _function in dict(vars()).items():
    if inspect.isfunction(_function) and not _name.startswith('_'):
        OPS[_name] = _function


# What only fits batches of an even number of rows that divides 60, which random ones needn't have.


def _groups(x, c):
    """Normalized by groups of rows, as batch norm with virtual batches does."""
    hidden = tf.matmul(x, c.variable(WIDTH, WIDTH))
    groups = tf.reshape(hidden, [2, -1, WIDTH])
    mean, variance = tf.nn.moments(groups, [1], keepdims=True)
    normalized = (groups - mean) * tf.rsqrt(variance + 1)
    return tf.reshape(normalized, tf.shape(hidden))


def _constants(x, c):
    """As many constants as the batch size makes columns of."""
    rows = tf.reshape(np.arange(60.0), [tf.shape(x)[0], -1])
    return x + rows[:, :1] * 0.01


def _variables(x, c):
    rows = tf.reshape(c.variable(6, 10), [tf.shape(x)[0], -1])
    return x + rows[:, :1]


EVEN = {'groups': _groups, 'constants': _constants, 'variables': _variables}


# Losses, of labels and predictions.


def _square(labels, output):
    return tf.square(labels - output)


def _losses(labels, output):
    """In float32, which is rounded otherwise in another order: it adds little."""
    other = tf.losses.mean_squared_error(labels, tf.tanh(output))
    return tf.reduce_mean(_square(labels, output)) + 1e-7 * tf.cast(other, tf.float64)


def _masked(labels, output):
    return tf.reduce_sum(tf.boolean_mask(_square(labels, output), labels > 0)) / 7


def _weighted(labels, output):
    weights = tf.abs(labels)
    weighted = tf.reduce_sum(_square(labels, output) * weights)
    return tf.div_no_nan(weighted, tf.reduce_sum(weights))


def _contrastive(labels, output):
    """Each example against all others."""
    logits = tf.matmul(output, tf.tanh(output), transpose_b=True)
    itself = tf.range(tf.shape(output)[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=itself, logits=logits)
    return tf.reduce_mean(losses)


def _cross_entropy(labels, output):
    losses = tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.nn.softmax(labels), logits=output)
    return tf.reduce_mean(losses)


def _hard(labels, output):
    """Of the example with the largest loss."""
    losses = tf.reduce_sum(_square(labels, output), 1)
    return tf.reduce_mean(tf.nn.top_k(losses, 1).values)


def _correlation(labels, output):
    labels_centered = labels - tf.reduce_mean(labels, 0)
    output_centered = output - tf.reduce_mean(output, 0)
    return -tf.reduce_mean(labels_centered * output_centered)


LOSSES = {
    'mean': lambda labels, output: tf.reduce_mean(_square(labels, output)),
    'sum': lambda labels, output: 0.1 * tf.reduce_sum(_square(labels, output)),
    'root': lambda labels, output: tf.sqrt(tf.reduce_mean(_square(labels, output)) + 0.1),
    'losses': _losses,
    'masked': _masked,
    'weighted': _weighted,
    'contrastive': _contrastive,
    'cross_entropy': _cross_entropy,
    'hard': _hard,
    'correlation': _correlation,
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


def _each(clip):
    """Clips each gradient by itself."""
    return lambda gradients: [clip(tf.convert_to_tensor(gradient)) for gradient in gradients]


CLIPS = {
    'none': lambda gradients: gradients,
    'value': _each(lambda gradient: tf.clip_by_value(gradient, -0.2, 0.2)),
    'norm': _each(lambda gradient: tf.clip_by_norm(gradient, 0.3)),
    'global': lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0],
}

# With 'updates_first' gradients wait for updates, as `tf.layers.batch_normalization` asks for.
BESIDE = ['accumulation', 'averages', 'counter', 'updates_first']


def _steps_counted():
    """How many steps there were: a metric that has nothing of a batch."""
    local = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]
    steps = tf.get_variable('steps', [], initializer=tf.zeros_initializer(), collections=local)
    return tf.identity(steps), tf.assign_add(steps, 1.0)


METRICS = {
    'mean': lambda y, p: tf.metrics.mean(p + 3),
    'steps': lambda y, p: _steps_counted(),
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
            x = op(x) if name in SIMPLE else op(x, c)

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
    first = tf.get_collection(tf.GraphKeys.UPDATE_OPS) if 'updates_first' in case.beside else []
    for i, (loss, name) in enumerate(zip(losses, case.optimizers)):
        optimizer = OPTIMIZERS[name]()
        variables = tf.trainable_variables()[i :: len(losses)]
        with tf.control_dependencies(first):
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


def _apply(optimizer, gradients, variables, c):
    return optimizer.apply_gradients(zip(gradients, variables))


def _accumulate(optimizer, gradients, variables, c):
    """Variables change in each second step, by the gradients of two."""
    sums = [c.counter(*v.shape.as_list()) for v in variables]

    def update():
        values = [total.read_value() for total in sums]
        with tf.control_dependencies([_apply(optimizer, values, variables, c)]):
            return tf.group(*(tf.assign(total, tf.zeros_like(total)) for total in sums))

    added = []
    for total, gradient in zip(sums, gradients):
        added.append(tf.assign_add(total, tf.convert_to_tensor(gradient)))
    with tf.control_dependencies(added):
        return tf.cond(_odd(), update, tf.no_op)


def batches_of(case):
    """The batches of a case: features and labels, as arrays."""
    sizes = [case.sizes[0]] * len(case.sizes) if case.static else case.sizes
    random = np.random.RandomState(case.seed)
    batches = []
    for rows in sizes:
        x, y = random.randn(2, rows, WIDTH)
        ids = random.randint(0, IDS, [rows, 3])
        # Up to three ids, as words.
        text = [' '.join(map(str, row[: 1 + row[0] % 3])) for row in ids]
        features = {'x': x, 'ids': ids, 'text': np.array(text, np.bytes_), 'y': y}
        batches.append((features, y))
    return batches


_EMBEDDED = sorted(name for name in OPS if name.startswith('embedded'))
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
