"""What a graph tells of integers: as one works them out by hand."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.sizes import Sizes
from estimator_mgpu.partition.symbols import Rows, Size

ROWS = Rows('batch', None)
B = Size(1, (ROWS,))


def entries(make):
    """The entries of what `make` computes of the shape of a [batch, 3, 5] tensor."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 3, 5])
        sizes = Sizes()
        sizes.know(x, [B, Size(3), Size(5)])
        found = sizes.entries(make(tf.shape(x)))
        return None if found is None else [_told(size) for size in found]


def _told(size):
    """A number, 'B' for a multiple of the rows, '?' for what isn't known."""
    if not size.symbols:
        return size.number
    return ('B' if size.number == 1 else f'{size.number}B') if size.symbols == (ROWS,) else '?'


@pytest.mark.parametrize(
    'make, expected',
    {
        'itself': (lambda s: s, ['B', 3, 5]),
        'first': (lambda s: s[0], ['B']),
        'last': (lambda s: s[-1:], [5]),
        'last one': (lambda s: s[-1], [5]),
        'last but one': (lambda s: s[-2], [3]),
        'strided': (lambda s: s[::2], ['B', 5]),
        'reversed': (lambda s: s[::-1], [5, 3, 'B']),
        'slice': (lambda s: tf.slice(s, [1], [-1]), [3, 5]),
        'slice of a matrix': (lambda s: tf.slice(tf.stack([s, s]), [0, 0], [2, 1]), ['?', '?']),
        'product': (lambda s: tf.reduce_prod(s), ['15B']),
        'product of some': (lambda s: tf.reduce_prod(s[1:], keepdims=True), [15]),
        'packed': (lambda s: tf.stack([s[0], 7, s[1] * s[2]]), ['B', 7, 15]),
        'joined': (lambda s: tf.concat([[-1], s[1:], s[:1] * 2], 0), [-1, 3, 5, '2B']),
        'quotient': (lambda s: tf.reduce_prod(s) // s[0], [15]),
        'no quotient': (lambda s: s[:1] // 4, ['?']),
        'by zero': (lambda s: s[1:2] // (s[2] - 5), ['?']),
        'remainder': (lambda s: s[2] % s[1], [2]),
        'sum': (lambda s: s + s, ['2B', 6, 10]),
        'sum of unlike': (lambda s: s + 1, ['?', '?', '?']),
        'larger': (lambda s: tf.maximum(s[1:], 4), [4, 5]),
        'larger of unlike': (lambda s: tf.maximum(s[0], 1), ['?']),
        'gathered': (lambda s: tf.gather(s, [2, 0]), [5, 'B']),
        'gathered by rows': (lambda s: tf.gather([1, 2], s[:1]), ['?']),
        'stitched': (lambda s: tf.dynamic_stitch([[0, 2], [1]], [s[:2], s[2:]]), ['B', 5, 3]),
        'stitched rows': (
            lambda s: tf.dynamic_stitch([[0], [1]], [[s[:2]], [s[1:]]]),
            ['?', '?', '?', '?'],
        ),
        'zeros': (lambda s: tf.raw_ops.ZerosLike(x=s[1:]), [0, 0]),
        'filled': (lambda s: tf.fill([2], s[0]), ['B', 'B']),
        'range': (lambda s: tf.range(tf.size(s)), [0, 1, 2]),
        'inverse': (lambda s: tf.math.invert_permutation([2, 0, 1]), [1, 2, 0]),
        'unstacked': (lambda s: tf.unstack(s)[2], [5]),
        'as int64': (lambda s: tf.cast(s, tf.int64), ['B', 3, 5]),
        'reshaped': (lambda s: tf.reshape(s, [3, 1]), ['B', 3, 5]),
        'by way of floats': (lambda s: tf.cast(tf.cast(s, tf.float32), tf.int32), ['?', '?', '?']),
    }.values(),
    ids=lambda value: None if callable(value) else str(value),
)
def test_entries(make, expected):
    assert entries(make) == expected


def test_quotients_are_whole():
    assert Size(6, (ROWS,)).over(Size(3)) == Size(2, (ROWS,))
    assert Size(6, (ROWS,)).over(Size(4)) is None and Size(6).over(B) is None
    four = Rows('batch', 4)
    assert Size(8).over(Size(1, (four,))) == Size(2)
    assert Size(6).over(Size(1, (four,))) is None
