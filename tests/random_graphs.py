"""Random model_fns: a chain of ops of a grammar, most of which ask for more than a row.

Each op takes rows of `WIDTH` float64 numbers and gives as many rows of them, whatever it does in
between. `c` makes what else it needs: variables, the labels and ids of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

WIDTH = 4
IDS = 6

OPS: dict[str, Callable[[tf.Tensor, Context], tf.Tensor]] = {}


class Case(NamedTuple):
    """All that is drawn.

    Attributes:
      ops: names of OPS, one after another.
      losses: names of LOSSES; the second, if any, is trained by an optimizer of its own.
      optimizers: names of OPTIMIZERS, one for each loss.
      clip: a name of CLIPS.
      metrics: names of METRICS.
      sizes: rows of the batches; the first one's of all, if static.
      static: whether the graph knows the number of rows.
      towers: how many.
      seed: of the batches.
    """

    ops: list[str]
    losses: list[str]
    optimizers: list[str]
    clip: str
    metrics: list[str]
    sizes: list[int]
    static: bool
    towers: int
    seed: int


class Context:
    """What ops have besides rows."""

    def __init__(self, features: dict[str, tf.Tensor]):
        self.features = features
        self._count = 0

    def variable(self, *shape: int, scale: float = 0.5) -> Any:
        self._count += 1
        values = np.random.RandomState(self._count).randn(*shape) * scale
        return tf.get_variable(f'v{self._count}', initializer=values)

    @property
    def ids(self) -> tf.Tensor:
        return self.features['ids']


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    OPS[function.__name__] = function
    return function


def _simple(**functions: Callable[[tf.Tensor], tf.Tensor]) -> None:
    for name, function in functions.items():
        OPS[name] = lambda x, c, function=function: function(x)


def _keep(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Says statically what is so: the rows and columns of another tensor."""
    x.set_shape(like.shape)
    return x


# Row by row.
_simple(
    tanh=tf.tanh,
    sigmoid=tf.sigmoid,
    softplus=tf.nn.softplus,
    elu=tf.nn.elu,
    square=lambda x: 0.3 * tf.square(x),
    sqrt=lambda x: tf.sqrt(tf.abs(x) + 0.1),
    exp=lambda x: tf.exp(-tf.abs(x)),
    log1p=lambda x: tf.log1p(tf.abs(x)),
    softmax=tf.nn.softmax,
    log_softmax=lambda x: 0.3 * tf.nn.log_softmax(x),
    l2_normalize=lambda x: tf.nn.l2_normalize(x + 3, 1),
    clip=lambda x: tf.clip_by_value(x, -0.8, 0.9),
    where_positive=lambda x: tf.where(x > 0, x, 0.1 * x),
    erf=tf.math.erf,
    sin=tf.sin,
    maximum=lambda x: tf.maximum(x, 0.2 * x - 0.1),
    divide=lambda x: x / (1.0 + tf.reduce_sum(tf.abs(x), 1, keepdims=True)),
    cumsum_columns=lambda x: tf.cumsum(x, 1, reverse=True),
    reverse_columns=lambda x: tf.reverse(x, [1]),
    sort_columns=lambda x: tf.sort(x, 1),
    top_k_columns=lambda x: tf.nn.top_k(x, WIDTH).values,
    transposed=lambda x: tf.transpose(tf.tanh(tf.transpose(x))),
    reshaped=lambda x: tf.reshape(tf.reshape(x, [-1, 2, WIDTH // 2]), [-1, WIDTH]),
    flattened=lambda x: tf.reshape(tf.tanh(tf.reshape(x, [-1])), tf.shape(x)),
    expanded=lambda x: tf.squeeze(tf.expand_dims(x, 1), [1]),
    split_columns=lambda x: tf.concat(tf.split(x, 2, 1)[::-1], 1),
    stacked=lambda x: tf.reduce_mean(tf.stack([x, tf.sin(x)], 0), 0),
    unstacked=lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], 1),
    padded=lambda x: tf.pad(x[:, 1:], [[0, 0], [0, 1]]),
    tiled=lambda x: tf.reshape(tf.tile(x[:, :2], [1, 2]), [-1, WIDTH]),
    one_hot=lambda x: x + tf.one_hot(tf.argmax(x, 1), WIDTH, dtype=tf.float64),
    pairwise_columns=lambda x: tf.einsum('bij,bj->bi', x[:, :, None] * x[:, None, :], x) * 0.1,
    batch_matmul=lambda x: tf.matmul(x[:, None, :], 0.2 * x[:, :, None] * x[:, None, :])[:, 0, :],
    band=lambda x: tf.linalg.band_part(x[:, :, None] * x[:, None, :], 0, 1)[:, 0, :],
    row_norm=lambda x: x / tf.norm(x + 4, axis=1, keepdims=True),
    strided=lambda x: tf.concat([x[:, ::2], x[:, 1::2]], 1),
    moments_columns=lambda x: (x - tf.nn.moments(x, [1], keep_dims=True)[0]) * 0.7,
    stop=lambda x: x + tf.stop_gradient(tf.tanh(x)),
    clip_rows=lambda x: tf.clip_by_norm(x, 1.0, [1]),
)

# Over rows.
_simple(
    centered=lambda x: x - tf.reduce_mean(x, 0),
    standardized=lambda x: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.5),
    batch_softmax=lambda x: 3 * tf.nn.softmax(x, 0),
    less_max=lambda x: x - tf.reduce_max(x, 0),
    less_min=lambda x: x - tf.reduce_min(x),
    share=lambda x: x / (1 + tf.reduce_sum(tf.abs(x), 0)),
    global_norm=lambda x: x / (1 + tf.norm(x)),
    attention=lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x),
    gram=lambda x: 0.2 * tf.matmul(x, tf.tanh(tf.matmul(x, x, transpose_a=True))),
    whitened=lambda x: tf.matmul(
        x, tf.linalg.inv(tf.matmul(x, x, transpose_a=True) + tf.eye(WIDTH, dtype=tf.float64))
    ),
    cumsum_rows=lambda x: 0.3 * tf.cumsum(x, 0),
    reverse_rows=lambda x: tf.reverse(x, [0]),
    roll_rows=lambda x: tf.roll(x, 1, 0),
    sort_rows=lambda x: tf.sort(x, 0),
    ranked=lambda x: tf.gather(x, tf.argsort(x[:, 0])),
    shifted=lambda x: tf.concat([x[1:], x[:1]], 0),
    first_row=lambda x: x - 0.5 * x[:1],
    last_row=lambda x: x * tf.sigmoid(x[-1]),
    hardest=lambda x: x + 0.1 * tf.reduce_mean(tf.nn.top_k(x[:, 0], 1).values),
    quantile=lambda x: x - tf.sort(tf.reshape(x, [-1]))[tf.size(x) // 2],
    by_size=lambda x: x * (1 + 1 / tf.cast(tf.shape(x)[0], tf.float64)),
    by_index=lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), tf.float64)[:, None],
    outer_product=lambda x: 0.1 * tf.reduce_sum(x[:, None, :] * x[None, :, :], 1),
    distances=lambda x: x + tf.reduce_mean(tf.abs(x[:, None, :] - x[None, :, :]), 1),
    any_positive=lambda x: tf.where_v2(tf.reduce_any(x > 1, 0), x, 0.5 * x),
    all_small=lambda x: tf.where_v2(tf.reduce_all(tf.abs(x) < 2), x, 0.5 * x),
    product=lambda x: x + tf.reduce_prod(tf.tanh(x), 0),
    masked=lambda x: x - tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)) * 0.1,
    scattered=lambda x: (
        tf.scatter_nd(
            tf.where(x[:, 0] > 0), tf.boolean_mask(x, x[:, 0] > 0), tf.shape(x, out_type=tf.int64)
        )
        + 0.1 * x
    ),
    halves=lambda x: tf.concat([x[: tf.shape(x)[0] // 2], 2 * x[tf.shape(x)[0] // 2 :]], 0),
    doubled=lambda x: tf.reduce_mean(tf.reshape(tf.concat([x, -x], 1), [-1, 2, WIDTH]), 1) + x,
    repeated=lambda x: tf.reduce_sum(tf.reshape(tf.repeat(x, 2, 0), [-1, 2, WIDTH]), 1),
    long=lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1])), [-1, WIDTH]) * 0.1,
    logsumexp=lambda x: x - tf.reduce_logsumexp(x, 0),
    wide=lambda x: tf.matmul(tf.transpose(tf.matmul(x, x, transpose_b=True)), x) * 0.1,
    diagonal=lambda x: x * tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True))[:, None] * 0.1,
    eye=lambda x: tf.matmul(tf.eye(tf.shape(x)[0], dtype=tf.float64) * 2.0, x),
    zeros=lambda x: x + tf.zeros(tf.shape(x), tf.float64),
    ones=lambda x: x - tf.ones([tf.shape(x)[0], 1], tf.float64),
    filled=lambda x: x * tf.fill(tf.shape(x), tf.constant(0.7, tf.float64)),
    broadcast=lambda x: x + tf.broadcast_to(tf.reduce_sum(x, 0) * 0.1, tf.shape(x)),
    string=lambda x: x + tf.strings.to_number(tf.as_string(tf.round(x)), tf.float64) * 0.1,
    hashed=lambda x: (
        x + tf.cast(tf.strings.to_hash_bucket_fast(tf.as_string(tf.round(x)), 3), tf.float64)
    ),
    py_function=lambda x: _keep(
        tf.py_function(lambda v: v - tf.reduce_mean(v, 0), [x], x.dtype), x
    ),
    numpy_function=lambda x: (
        x
        + _keep(tf.numpy_function(lambda v: np.sort(v, 0) * 0.1, [tf.stop_gradient(x)], x.dtype), x)
    ),
    asserted=lambda x: _asserted(x),
    seeded_dropout=lambda x: tf.nn.dropout(x, rate=0.4, seed=11),
    seeded_noise=lambda x: x + tf.random.normal(tf.shape(x), 0, 0.1, tf.float64, seed=5),
    noise_of_row=lambda x: x + tf.random.uniform([WIDTH], 0, 0.1, tf.float64, seed=3),
    stateless=lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2], dtype=tf.float64),
    shuffled=lambda x: tf.random.shuffle(x, seed=9),
    second=lambda x: x + 0.1 * tf.gradients(tf.gradients(tf.reduce_sum(x**3), x)[0], x)[0],
    saliency=lambda x: x + 0.1 * tf.gradients(tf.reduce_mean(tf.sin(x) * tf.norm(x + 3)), x)[0],
    map_fn=lambda x: tf.map_fn(lambda r: r * tf.reduce_sum(r) * 0.2, x),
    scan=lambda x: tf.scan(lambda a, r: 0.5 * a + tf.tanh(r), x),
    while_loop=lambda x: tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, 0.5 * a + tf.sin(a)), (0, x)
    )[1],
    while_rows=lambda x: tf.while_loop(
        lambda i, a: tf.logical_and(tf.reduce_max(tf.abs(a)) > 0.7, i < 9),
        lambda i, a: (i + 1, a * 0.7),
        (0, x),
    )[1],
    while_counted=lambda x: tf.while_loop(
        lambda i, a: i < tf.minimum(tf.shape(x)[0], 3),
        lambda i, a: (i + 1, a + 0.1 * x[i]),
        (0, x),
    )[1],
    cond=lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 0.5, lambda: x - 1),
    case=lambda x: tf.case(
        [(tf.reduce_max(x) > 2, lambda: x * 0.5), (tf.reduce_min(x) < -2, lambda: x + 1)],
        lambda: tf.sin(x),
    ),
    switch_case=lambda x: tf.switch_case(
        tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32) % 2, [lambda: x * 0.7, lambda: tf.tanh(x)]
    ),
)


def _asserted(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.Assert(tf.reduce_all(x < 1e9), ['too large', x])]):
        return tf.identity(x)


@op
def dense(x, c):
    return tf.tanh(tf.matmul(x, c.variable(WIDTH, WIDTH)) + c.variable(WIDTH))


@op
def residual(x, c):
    return x + tf.matmul(tf.nn.relu(tf.matmul(x, c.variable(WIDTH, 7))), c.variable(7, WIDTH))


@op
def tied(x, c):
    w = c.variable(WIDTH, WIDTH)
    return tf.matmul(tf.tanh(tf.matmul(x, w)), w, transpose_b=True)


@op
def scaled_by_variable(x, c):
    return x * c.variable(WIDTH) + c.variable(1)


@op
def embedded(x, c):
    return x + tf.nn.embedding_lookup(c.variable(IDS, WIDTH), c.ids[:, 0])


@op
def embedded_mean(x, c):
    return x + tf.reduce_mean(tf.gather(c.variable(IDS, WIDTH), c.ids), 1)


@op
def embedded_parts(x, c):
    parts = [c.variable(IDS // 2, WIDTH), c.variable(IDS // 2, WIDTH)]
    return x + tf.nn.embedding_lookup(parts, c.ids[:, 1])


@op
def embedded_sparse(x, c):
    sparse = tf.sparse.from_dense(c.ids)
    return x + tf.nn.safe_embedding_lookup_sparse(c.variable(IDS, WIDTH), sparse, None)


@op
def table_lookup(x, c):
    keys = tf.constant(['1', '2', '3'])
    values = tf.constant([1, 2, 4], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0)
    found = table.lookup(tf.as_string(c.ids[:, 0]))
    return x + tf.gather(c.variable(IDS, WIDTH), found)


@op
def ragged(x, c):
    rows = tf.RaggedTensor.from_tensor(c.ids, padding=0)
    return x + tf.reduce_sum(tf.gather(c.variable(IDS, WIDTH), rows), 1)


@op
def gathered_rows(x, c):
    return tf.gather(x, c.ids[:, 0] % tf.cast(tf.shape(x)[0], tf.int64)) + x


@op
def gather_nd(x, c):
    at = tf.stack([tf.range(tf.shape(x)[0], dtype=tf.int64), c.ids[:, 0] % WIDTH], 1)
    return x * tf.gather_nd(x, at)[:, None]


@op
def last_step(x, c):
    steps = tf.math.cumsum(tf.reshape(x, [-1, 2, WIDTH // 2]), 1)
    rows = tf.range(tf.shape(x)[0])
    last = tf.gather_nd(steps, tf.stack([rows, tf.cast(c.ids[:, 0] % 2, tf.int32)], 1))
    return x + tf.tile(last, [1, 2])


@op
def beams(x, c):
    best = tf.nn.top_k(tf.matmul(x, c.variable(WIDTH, WIDTH)), 2).indices
    return x + tf.reduce_mean(tf.gather(x, best, batch_dims=1), 1, keepdims=True)


@op
def without_padding(x, c):
    kept = tf.where(c.ids[:, 0] > 1)
    dense = tf.tanh(tf.matmul(tf.gather_nd(x, kept), c.variable(WIDTH, WIDTH)))
    return x + tf.scatter_nd(kept, dense, tf.shape(x, out_type=tf.int64))


@op
def registered(x, c):
    """Its type has no rule but that which `check` in test_random_graphs.py registers."""
    return x + tf.math.special.dawsn(x)


@op
def segments(x, c):
    return tf.gather(tf.math.unsorted_segment_sum(x, c.ids[:, 0], IDS), c.ids[:, 0]) * 0.3


@op
def class_weights(x, c):
    counts = tf.math.bincount(tf.cast(c.ids[:, 0], tf.int32), minlength=IDS, dtype=tf.float64)
    return x * tf.gather(1 / (1 + counts), c.ids[:, 0])[:, None]


@op
def unique(x, c):
    ids, index = tf.unique(c.ids[:, 0])
    return x + tf.gather(tf.gather(c.variable(IDS, WIDTH), ids), index)


@op
def scattered_column(x, c):
    return x + tf.tensor_scatter_nd_add(tf.zeros_like(x), [[0, 0]], tf.reduce_sum(x)[None] * 0.1)


@op
def batch_norm(x, c):
    y = tf.layers.batch_normalization(x, training=True, name=f'bn{len(tf.global_variables())}')
    return y * 0.7


@op
def fused_batch_norm(x, c):
    n = len(tf.global_variables())
    image = tf.cast(tf.reshape(x, [-1, 1, WIDTH // 2, 2]), tf.float32)
    image = tf.layers.batch_normalization(
        image, center=False, scale=False, training=True, fused=True, name=f'bn{n}'
    )
    # float32 is rounded otherwise in another order: what it adds is small.
    return x + 1e-5 * tf.reshape(tf.cast(image, tf.float64), [-1, WIDTH])


@op
def convolution(x, c):
    y = tf.nn.conv1d(x[:, :, None], c.variable(2, 1, 3), 1, 'SAME')
    return tf.reduce_sum(tf.nn.relu(y), 2)


@op
def convolution_2d(x, c):
    image = tf.reshape(x, [-1, 2, 2, 1])
    y = tf.nn.relu(tf.nn.conv2d(image, c.variable(2, 2, 1, 3), 1, 'SAME'))
    y = tf.nn.avg_pool2d(y, 2, 1, 'SAME') + tf.nn.max_pool2d(y, 2, 1, 'SAME')
    return tf.reshape(tf.reduce_sum(y, 3), [-1, WIDTH])


@op
def separable(x, c):
    image = tf.reshape(x, [-1, 2, 2, 1])
    y = tf.nn.depthwise_conv2d(image, c.variable(2, 2, 1, 2), [1, 1, 1, 1], 'SAME')
    return tf.reshape(tf.reduce_sum(y, 3), [-1, WIDTH])


@op
def recurrent(x, c):
    w, u = c.variable(1, WIDTH), c.variable(WIDTH, WIDTH, scale=0.3)

    def step(i, h):
        return i + 1, tf.tanh(tf.matmul(x[:, i, None], w) + tf.matmul(h, u))

    return tf.while_loop(lambda i, h: i < WIDTH, step, (0, tf.zeros_like(x)))[1]


@op
def recurrent_arrays(x, c):
    u = c.variable(WIDTH, WIDTH, scale=0.3)
    sequence = tf.stack([x, x * 0.5, -x])
    states = tf.scan(lambda h, r: tf.tanh(tf.matmul(h, u) + r), sequence, tf.zeros_like(x))
    return states[-1] + 0.1 * states[0]


@op
def loop_with_rows_summed(x, c):
    def step(i, a):
        return i + 1, a - 0.1 * tf.reduce_mean(a, 0)

    return tf.while_loop(lambda i, a: i < 2, step, (0, x))[1]


@op
def function(x, c):
    w = c.variable(WIDTH, WIDTH)

    @tf.function
    def inner(v):
        return tf.tanh(tf.matmul(v, w)) + tf.reduce_mean(v, 0)

    return inner(x)


def _halved(v, dy, variables):
    return (dy * 0.5, [0.1 * tf.matmul(v, dy, transpose_a=True)]) if variables else dy * 0.5


@op
def checkpointed(x, c):
    w = c.variable(WIDTH, WIDTH)

    @tf.custom_gradient
    def inner(v):
        return (
            tf.tanh(tf.matmul(v, w)),
            lambda dy, variables=None: _halved(v, tf.convert_to_tensor(dy), variables),
        )

    return inner(x)


@op
def inner_step(x, c):
    """MAML: a loss after a step of gradient descent."""
    w = c.variable(WIDTH, WIDTH)
    inner = tf.reduce_mean(tf.square(tf.matmul(x, w) - x))
    return tf.tanh(tf.matmul(x, w - 0.1 * tf.gradients(inner, w)[0]))


@op
def hessian(x, c):
    w = c.variable(WIDTH)
    energy = tf.reduce_mean(tf.exp(-tf.square(x * w)))
    return x + 0.1 * tf.linalg.diag_part(tf.hessians(energy, w)[0])


@op
def counted(x, c):
    n = tf.get_variable(
        f'n{len(tf.global_variables())}',
        [],
        tf.float64,
        trainable=False,
        initializer=tf.zeros_initializer(),
    )
    with tf.control_dependencies([tf.assign_add(n, tf.reduce_sum(x) * 0.01)]):
        return tf.identity(x)


@op
def moving_mean(x, c):
    m = tf.get_variable(
        f'm{len(tf.global_variables())}',
        [WIDTH],
        tf.float64,
        trainable=False,
        initializer=tf.zeros_initializer(),
    )
    with tf.control_dependencies([tf.assign(m, 0.9 * m + 0.1 * tf.reduce_mean(x, 0))]):
        return x - m.read_value() if hasattr(m, 'read_value') else x - m


@op
def l2(x, c):
    w = c.variable(WIDTH, WIDTH)
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 0.1 * tf.nn.l2_loss(w))
    return x + tf.matmul(x, w)


@op
def layer_norm(x, c):
    mean, variance = tf.nn.moments(x, [1], keepdims=True)
    return (x - mean) * tf.rsqrt(variance + 0.1) * c.variable(WIDTH)


@op
def heads(x, c):
    """Attention over columns: heads and rows change places."""
    q = tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2])
    a = tf.nn.softmax(tf.matmul(q, q, transpose_b=True))
    return tf.reshape(tf.transpose(tf.matmul(a, q), [1, 0, 2]), tf.shape(x))


@op
def masked_dense(x, c):
    """Layers of the rows that a mask leaves, which come back to the batch's."""
    mask = x[:, 0] > 0
    left = dense(tf.boolean_mask(x, mask), c)
    return 0.3 * x + tf.scatter_nd(tf.where(mask), left, tf.shape(x, out_type=tf.int64))


@op
def masked_centered(x, c):
    left = dense(tf.boolean_mask(x, c.ids[:, 0] > 1), c)
    return x + tf.reduce_sum(left - tf.reduce_mean(tf.concat([left, x], 0), 0)) * 0.1


@op
def repeated_dense(x, c):
    """As many rows as ids say, by their own layers, and added up again."""
    rows = tf.repeat(tf.range(tf.shape(x)[0]), c.ids[:, 1] % 3)
    wide = residual(dense(tf.gather(x, rows), c), c)
    return x + 0.2 * tf.math.unsorted_segment_sum(wide, rows, tf.shape(x)[0])


@op
def unique_dense(x, c):
    ids, index = tf.unique(c.ids[:, 0])
    return x + tf.gather(dense(tf.gather(c.variable(IDS, WIDTH), ids), c), index)


@op
def ragged_dense(x, c):
    rows = tf.gather(c.variable(IDS, WIDTH), tf.RaggedTensor.from_tensor(c.ids, padding=0))
    w = c.variable(WIDTH, WIDTH)
    return x + tf.reduce_sum(tf.ragged.map_flat_values(lambda v: tf.tanh(v @ w), rows), 1)


def _of_python(function, x):
    found = tf.py_function(function, [x], x.dtype)
    found.set_shape([None, WIDTH])
    return found


@op
def python_dense(x, c):
    """As many rows as Python likes."""
    return x + 0.1 * tf.reduce_mean(dense(_of_python(lambda v: v[::2], x), c), 0)


@op
def python_row(x, c):
    """One row, which is repeated, though nobody could know."""
    return x + dense(_of_python(lambda v: v[:1], x), c)


@op
def python_rows(x, c):
    return x * dense(_of_python(lambda v: 2 * v, x), c)


@op
def labels_of_all(x, c):
    y = c.features['y']
    return x + tf.reduce_mean(y) - y


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
    'sigmoid': lambda y, p: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.sigmoid(y), logits=p)
    ),
    'root': lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)) + 0.1),
    'hard': lambda y, p: tf.reduce_mean(tf.nn.top_k(tf.reduce_sum(tf.square(y - p), 1), 1).values),
    'correlation': lambda y, p: (
        -tf.reduce_mean((y - tf.reduce_mean(y, 0)) * (p - tf.reduce_mean(p, 0)))
    ),
}

OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.05),
    'momentum': lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    'adam': lambda: tf.train.AdamOptimizer(0.01, epsilon=0.1),
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

METRICS = {
    'mean': lambda y, p: tf.metrics.mean(p + 3),
    'error': lambda y, p: tf.metrics.mean_absolute_error(y, p),
    'auc': lambda y, p: tf.metrics.auc(y[:, 0] > 0, tf.sigmoid(p[:, 0])),
    'accuracy': lambda y, p: tf.metrics.accuracy(tf.argmax(y, 1), tf.argmax(p, 1)),
    'iou': lambda y, p: tf.metrics.mean_iou(tf.cast(y[:, 0] > 0, tf.int32), p[:, 0] > 0, 2),
}


def model_fn_of(case: Case) -> Callable[..., Any]:
    """The model_fn of a case, for all modes."""

    def model_fn(features, labels, mode):
        c = Context(features)
        x = features['x']
        for name in case.ops:
            x = OPS[name](x, c)
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
        return tf.estimator.EstimatorSpec(mode, loss=losses[0], train_op=_train(case, losses))

    return model_fn


def _train(case: Case, losses: list[tf.Tensor]) -> tf.Operation:
    """All gradients are computed before a variable changes."""
    steps = []
    for i, (loss, name) in enumerate(zip(losses, case.optimizers)):
        variables = tf.trainable_variables()[i :: len(losses)]
        grads = OPTIMIZERS[name]().compute_gradients(loss, variables)
        known = [(g, v) for g, v in grads if g is not None]
        if known:
            steps.append((OPTIMIZERS[name](), CLIPS[case.clip]([g for g, _ in known]), known))
    flat = [g for _, grads, _ in steps for g in grads]
    with tf.control_dependencies([*losses, *flat, *tf.get_collection(tf.GraphKeys.UPDATE_OPS)]):
        updates = [
            optimizer.apply_gradients(zip(grads, [v for _, v in known]))
            for optimizer, grads, known in steps
        ]
    with tf.control_dependencies(updates):
        return tf.assign_add(tf.train.get_global_step(), 1).op


def batches_of(case: Case) -> list[Any]:
    """Batches of the sizes that were drawn."""
    random = np.random.RandomState(case.seed)
    batches = []
    for rows in [case.sizes[0]] * len(case.sizes) if case.static else case.sizes:
        y = random.randn(rows, WIDTH)
        features = {
            'x': random.randn(rows, WIDTH),
            'ids': random.randint(0, IDS, [rows, 3]),
            'y': y,
        }
        batches.append((features, y))
    return batches


cases = st.builds(
    Case,
    ops=st.lists(st.sampled_from(sorted(OPS)), min_size=2, max_size=6),
    losses=st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=2),
    optimizers=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=2, max_size=2),
    clip=st.sampled_from(sorted(CLIPS)),
    metrics=st.lists(st.sampled_from(sorted(METRICS)), max_size=2, unique=True),
    sizes=st.lists(st.integers(1, 11), min_size=2, max_size=2),
    static=st.booleans(),
    towers=st.integers(2, 4),
    seed=st.integers(0, 99),
)
