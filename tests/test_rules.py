"""The table of rules, walked: what each says of an op holds for it, on uneven shards."""

import functools
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow import raw_ops as ops
from tensorflow.python.framework import op_def_registry

from estimator_mgpu.custom_ops.check_rule import check_rule
from estimator_mgpu.partition.plan import LOCAL
from estimator_mgpu.partition.propagation.engine import CALL_RULES
from estimator_mgpu.partition.rules import RULES, has_rule
from estimator_mgpu.partition.rules.notation import NotSharded, parse, signature_of
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size

ROWS = 7
SAMPLES, FULL = {}, []  # by types of ops; those that run once by their rule


class Batch:
    """Makes tensors with rows, or has them, in the same order; and values that don't go by rows."""

    def __init__(self, tensors=()):
        self.rows = []
        self._tensors = iter(tensors) if tensors else None
        self._random = np.random.RandomState(7)

    def of(self, values):
        """A batch of given values, rows first."""
        self.rows.append(np.asarray(values))
        dtype, shape = self.rows[-1].dtype, [None, *self.rows[-1].shape[1:]]
        return next(self._tensors) if self._tensors else tf.placeholder(dtype, shape)

    def floats(self, *shape, dtype=np.float32):
        return self.of(self._random.uniform(0.1, 0.9, [ROWS, *shape]).astype(dtype))

    def ints(self, *shape, below=4, dtype=np.int32):
        return self.of(self._random.randint(0, below, [ROWS, *shape]).astype(dtype))

    def bools(self, *shape):
        return self.of(self._random.rand(ROWS, *shape) > 0.4)

    def strings(self, *shape):
        return self.of(self._random.randint(1, 9, [ROWS, *shape]).astype('S'))

    def whole(self, *shape):
        return tf.constant(self._random.uniform(size=shape), tf.float32)


def _entries(name, batch):
    """Calls an op of entries with tensors that have rows, of the first type that it takes."""
    makers = {
        tf.float32: lambda: batch.floats(4),
        tf.int32: lambda: batch.ints(4) + 1,
        tf.int64: lambda: batch.ints(4, dtype=np.int64),
        tf.bool: lambda: batch.bools(4),
        tf.string: lambda: batch.strings(4),
        tf.complex64: lambda: tf.complex(batch.floats(4), batch.floats(4)),
    }
    definition = op_def_registry.get(name)
    allowed = {a.name: list(a.allowed_values.list.type) for a in definition.attr}

    def type_of(arg):
        if not arg.type_attr:
            return tf.as_dtype(arg.type)
        types = allowed[arg.type_attr] or [k.as_datatype_enum for k in makers]
        return next(k for k in makers if k.as_datatype_enum in types)

    arguments = {arg.name: makers[type_of(arg)]() for arg in definition.input_arg}
    extra = {
        'Cast': {'DstT': tf.float64},
        'CheckNumerics': {'message': ''},
        'CheckNumericsV2': {'message': ''},
        'Bucketize': {'boundaries': [0.3, 0.6]},
        'StringToHashBucket': {'num_buckets': 5},
        'StringToHashBucketFast': {'num_buckets': 5},
        'StringToHashBucketStrong': {'num_buckets': 5, 'key': [1, 2]},
        'RegexReplace': {'pattern': '1', 'rewrite': 'x'},
        'StaticRegexReplace': {'pattern': '1', 'rewrite': 'x'},
        'RegexFullMatch': {'pattern': '1'},
        'StaticRegexFullMatch': {'pattern': '1'},
    }.get(name, {})
    if name in ('AddN', 'StringJoin'):
        [(arg, value)] = arguments.items()
        arguments = {arg: [value, value]}
    if name == 'DecodeBase64':
        arguments = {'input': ops.EncodeBase64(input=arguments['input'])}
    if name == 'Substr':
        arguments.update(pos=arguments['pos'] * 0, len=arguments['len'])
    if name == 'ClipByValue':
        arguments.update(clip_value_min=tf.constant(0.3), clip_value_max=tf.constant(0.6))
    return getattr(ops, name)(**{**arguments, **extra})


for _name, _rule in RULES.items():
    if _rule == 'S+ -> S':
        SAMPLES[_name] = [lambda batch, name=_name: _entries(name, batch)]


KINDS = {  # of inputs, by the letter that their words begin with
    'n': Batch.floats,
    'i': Batch.ints,
    'b': Batch.bools,
    'w': Batch.whole,
    't': lambda b, steps, size: tf.transpose(b.floats(steps, size), [1, 0, 2]),  # time first
    'c': lambda b, *shape: tf.complex(b.floats(*shape), b.floats(*shape)),
    'd': lambda b, size, _: b.floats(size, size) + 2 * tf.eye(size),  # positive definite
}


def _inputs(name, words, batch, attrs):
    """What an op is called with: 'n23 w3' are floats of 2 x 3 a row, and whole ones of 3."""
    names = [arg.name for arg in op_def_registry.get(name).input_arg if arg.name not in attrs]
    given = {n: KINDS[word[0]](batch, *map(int, word[1:])) for n, word in zip(names, words.split())}
    return given | attrs


def sample(names, given, whole=False, **attrs):
    """Adds samples of some types of ops: words for the inputs, or a function of op and batch."""
    for name in names.split():
        if callable(given):
            made = functools.partial(given, getattr(ops, name), **attrs)
        else:
            made = functools.partial(_called, name, given, attrs)
        SAMPLES.setdefault(name, []).append(made)
        FULL.extend([made] * whole)


def _called(name, words, attrs, batch):
    return getattr(ops, name)(**_inputs(name, words, batch, attrs))


def _slopes(y, *xs):
    return tf.gradients(tf.square(y), xs)


def _slopes_of(op, b, name, words, **attrs):
    """Slopes of another op by its inputs, which are made by the op that is sampled."""
    given = _inputs(name, words, b, attrs)
    return _slopes(
        getattr(ops, name)(**given), *(x for key, x in given.items() if key not in attrs)
    )


# Each entry by itself, or for each row.


def _broadcast(op, b):
    x = b.floats(2, 3)
    return [
        op(x=x, y=b.whole(3)),
        op(x=b.whole(1, 2, 1), y=x),
        op(x=x, y=b.floats(1, 3)),
        op(x=tf.transpose(x, [1, 0, 2]), y=b.floats(3)),
        op(x=b.floats(1), y=tf.transpose(b.floats(1))),  # pairs of rows
    ]


def _identity_n(op, b):
    x = b.floats(3)
    activated = tf.nn.silu(x)
    both = op(input=[x, b.whole(3), tf.transpose(x), tf.reshape(x, [-1])])
    return [*both, activated, *tf.gradients(activated, x)]


def _quantized(op, b, channels, forward=None):
    x, low, high = b.floats(3), b.whole(*channels) * 0.4, 0.5 + b.whole(*channels) * 0.4
    y = (forward or op)(inputs=x, min=low, max=high)
    return tf.gradients(y * b.floats(3), [x, low, high]) if forward else y


def _drawn(op, b):
    """Other numbers in each run."""
    return tf.zeros_like(op(shape=tf.shape(b.floats(2)), dtype=tf.float32))


def _broadcast_to(op, b):
    x = b.floats(1)
    shape = tf.stack([2, tf.shape(x)[0], 3])
    return [op(input=x, shape=shape), op(input=1.0, shape=shape)]


sample('AddV2 Mul Maximum SquaredDifference', _broadcast)
sample('SelectV2', 'b1 n3 w3')
sample('EnsureShape', lambda op, b: op(input=b.floats(3), shape=[None, 3]))
sample('EnsureShape', lambda op, b: op(input=b.floats(3), shape=[None, None]))
sample('Select', lambda op, b: op(condition=b.bools(), x=b.floats(3), y=b.floats(3)))
sample('Select', lambda op, b: op(condition=b.bools(3), x=b.floats(3), y=b.floats(3)))
sample('FakeQuantWithMinMaxArgs', 'n3')
for _name, _shape in (('FakeQuantWithMinMaxVars', ()), ('FakeQuantWithMinMaxVarsPerChannel', (3,))):
    sample(_name, _quantized, channels=_shape)
    sample(f'{_name}Gradient', _quantized, channels=_shape, forward=getattr(ops, _name))
# Here it's replaced by what it's given; its rule is for loops and branches.
sample('IdentityN', _identity_n, whole=True)
sample('OnesLike ZerosLike', 'n3')
sample('Fill', lambda op, b: op(dims=tf.shape(b.floats(2)), value=3.0))
sample('Fill', lambda op, b: op(dims=[tf.size(b.floats(2))], value=1.0))
sample('BroadcastTo', _broadcast_to)
sample('RandomStandardNormal RandomUniform TruncatedNormal', _drawn)


# Along dimensions that ops are told.


def _reduced(op, x):
    axes = [([0], False), ([1], False), ([0, 2], True), ([-1], True), ([0, 1, 2], False)]
    return [op(input=x, axis=axis, keep_dims=keep) for axis, keep in axes]


def _gradient_of_broadcasting(op, b):
    x, w = b.floats(3), b.whole(3)
    return tf.gradients(tf.tanh(x * w) * (x + b.floats(1)), [x, w])


def _dims(op, b):
    x = b.floats(3)
    expanded = [ops.ExpandDims(input=x, axis=axis) for axis in (0, 1, -1)]
    return expanded + [ops.Squeeze(input=e, axis=[a]) for e, a in zip(expanded, (0, 1, -1))]


def _pack(op, b):
    x = b.floats(3)
    packed = [ops.Pack(values=[x, 2 * x, b.floats(3)], axis=axis) for axis in (0, 1, -1)]
    return packed + list(ops.Unpack(value=x, num=3, axis=1))


def _gather(op, b):
    table, ids, x = b.whole(4, 3), b.ints(2), b.floats(4, 2)
    return [
        op(params=table, indices=ids, axis=0),
        op(params=x, indices=ids, axis=1, batch_dims=1),
        op(params=x, indices=[0, 3, 3], axis=1),
        op(params=x, indices=ids % tf.shape(x)[0], axis=0),
    ]


def _variable(b):
    return tf.get_variable('table', initializer=b.whole(4, 3), use_resource=True)


def _gather_from_variable(op, b):
    return op(resource=_variable(b).handle, indices=b.ints(2) % 3, dtype=tf.float32)


def _segments(op, b):
    return [
        op(data=b.floats(3), segment_ids=b.ints() - 1, num_segments=4),
        op(data=b.ints(2, 3), segment_ids=b.ints(2), num_segments=5),
    ]


def _lookup(op, b):
    pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(['1', '5']), tf.constant([3, 4]))
    return tf.lookup.StaticHashTable(pairs, -1).lookup(b.strings(2))


def _scatter(op, b):
    x, places = b.floats(3), tf.constant([[2], [0], [2]])
    time_major = tf.transpose(b.floats(4), [1, 0])
    rows = tf.transpose(x, [1, 0])
    updated = op(tensor=time_major, indices=places, updates=rows)
    return [updated, tf.gradients(tf.square(updated), x)[0]]


def _scatter_nd(op, b):
    x = tf.transpose(b.floats(3, 2), [1, 0, 2])
    places = tf.constant([[2, 1], [0, 1], [2, 1]])
    shape = tf.stack([3, 2, tf.shape(x)[1], 2])
    scattered = op(indices=places, updates=x, shape=shape)
    return [scattered, *_slopes(scattered, x)]


def _empty(op, b):
    return op(shape=tf.shape(b.floats(3)), dtype=tf.float32, init=True)


sample('Sum Mean Max Min Prod', lambda op, b: _reduced(op, b.floats(3, 2)))
sample('All Any', lambda op, b: _reduced(op, b.bools(3, 2)))
sample('Mean', lambda op, b: op(input=b.floats(3, dtype=np.float16) * 1000, axis=[0]))
sample('Sum', _gradient_of_broadcasting)
sample('L2Loss', 'n3')
sample('Cumsum Cumprod CumulativeLogsumexp', 'n3', axis=1, reverse=True)
sample('ReverseV2', 'n32', axis=[1])
sample('ReverseSequence', 'n42 i', seq_dim=1, batch_dim=0)
sample('Roll', 'n4', shift=[1], axis=[1])
sample('ConcatV2', lambda op, b: op(values=[b.floats(3), b.floats(2)], axis=1))
sample('Split', lambda op, b: op(axis=1, value=b.floats(4), num_split=2))
sample('SplitV', 'n4', size_splits=[1, 3], axis=1, num_split=2)
sample('ExpandDims Squeeze', _dims)
sample('Pack Unpack', _pack)
sample('Transpose ConjugateTranspose', 'n32', perm=[2, 0, 1])
for _axis in (-1, 0, 1):
    sample('OneHot', 'i2', depth=4, on_value=1.0, off_value=0.0, axis=_axis)
    if _axis:
        sample('ArgMax ArgMin', 'n32', dimension=_axis)
sample('Empty', _empty)
sample('TensorScatterAdd TensorScatterMax TensorScatterMin', _scatter)
sample('TensorScatterSub TensorScatterUpdate', _scatter)
sample('ScatterNd', _scatter_nd)
sample('Gather', 'w43 i2')
sample('GatherV2', _gather)
sample('GatherNd', 'w442 i32')
sample('ResourceGather', lambda op, b: tf.gather(_variable(b), b.ints(2)))
sample('ResourceGatherNd', _gather_from_variable)
sample('LookupTableFindV2', _lookup)
sample('UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum', _segments)


# Vectors and matrices, each by itself, and their products.


def _bounds(op, b):
    edges, x = tf.constant([[0.2, 0.4, 0.4, 0.7]]), b.floats(3)
    return [
        op(sorted_inputs=tf.sort(b.floats(4)), values=x),
        op(sorted_inputs=edges, values=tf.reshape(x, [1, -1])),
    ]


def _eigenvalues(op, b, compute_v):
    return op(input=KINDS['d'](b, 3, 3), compute_v=compute_v)[0]


def _matmul(op, b):
    x, y = b.floats(3), b.floats(2)
    return [
        op(a=x, b=b.whole(3, 2)),
        op(a=b.whole(2, 3), b=x, transpose_b=True),
        op(a=x, b=y, transpose_a=True),
        op(a=x, b=x, transpose_b=True),
    ]


def _batch_matmul(op, b, **extra):
    x, y = b.floats(2, 3), b.floats(3, 2)
    return [
        op(x=x, y=y, **extra),
        op(x=x, y=x, adj_y=True, **extra),
        op(x=tf.transpose(x, [1, 2, 0]), y=tf.transpose(y, [2, 0, 1]), **extra),
    ]


def _einsum(op, b):
    x, y = b.floats(2, 3), b.floats(3)
    return [
        op(inputs=[x, y], equation='bij,bj->bi'),
        op(inputs=[x, y], equation='bij,bj->ij'),
        op(inputs=[x, b.whole(3, 4)], equation='...i,ij->...j'),
        op(inputs=[y, y], equation='bi,ci->bc'),
    ]


sample('BiasAdd', 'n223 w3')
sample('BiasAddGrad', 'n223')
sample('Softmax LogSoftmax', 'n3')
sample('TopKV2', 'n5', k=2)
sample('NthElement', 'n5', n=1)
sample('NthElement', 'n25', n=4)
sample('LowerBound UpperBound', _bounds)
sample('FFT IFFT FFT2D IFFT2D', 'c24')
for _name, _length in (('RFFT', [4]), ('RFFT2D', [2, 4])):
    sample(_name, 'n34', fft_length=_length)
    sample(f'I{_name}', 'c34', fft_length=_length)
sample('SoftmaxCrossEntropyWithLogits', 'n3 n3')
sample('SparseSoftmaxCrossEntropyWithLogits', 'n4 i')
sample('InTopK InTopKV2', 'n4 i', k=2)
sample('Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant', 'd33')
for _vectors in (True, False):
    sample('SelfAdjointEigV2', _eigenvalues, compute_v=_vectors)
sample('CholeskyGrad', 'd33 n33')
sample('MatrixSolve MatrixTriangularSolve', 'd33 n32')
sample('MatrixDiagPart', 'n33')
sample('MatrixDiagPartV2 MatrixDiagPartV3', 'n33', k=0, padding_value=0.0)
sample('MatrixBandPart', 'n33', num_lower=0, num_upper=1)
sample('MatrixSetDiag', 'n34 n3')
sample('MatrixSetDiagV2 MatrixSetDiagV3', 'n34 n3', k=1)
sample('MatrixDiag', 'n3')
sample('MatrixDiagV2 MatrixDiagV3', 'n3', k=0, num_rows=-1, num_cols=-1, padding_value=0.0)
sample('MatMul', _matmul)
sample('BatchMatMul BatchMatMulV2', _batch_matmul)
sample('BatchMatMulV3', _batch_matmul, Tout=tf.float32)
sample('BatchMatMulV2', 'n23 w134')
sample('BatchMatMulV3', 'n23 w134', Tout=tf.float32)
sample('Einsum', _einsum)


# Sparse tensors, of which each tower has its rows.


def _sparse(b, dtype, least):
    """In each row `least` entries or one more."""
    values = b.ints(2)
    places = tf.where(tf.sequence_mask(least + b.ints(below=2), 2))
    shape = tf.shape(values, out_type=tf.int64)
    return places, tf.cast(tf.gather_nd(values, places), dtype), shape


def _ctc_loss(op, b):
    logits = tf.transpose(b.floats(6, 5), [1, 0, 2])
    places, values, shape = _sparse(b, tf.int32, least=1)
    length = tf.fill([tf.cast(shape[0], tf.int32)], 6)
    losses, _ = op(
        inputs=logits, labels_indices=places, labels_values=values, sequence_length=length
    )
    return [losses, *_slopes(losses, logits)]


def _sparse_matmul(op, b):
    places, values, shape = _sparse(b, tf.float32, least=0)
    given = dict(a_indices=places, a_values=values, a_shape=shape)
    w, x = b.whole(2, 3), b.floats(3)
    rows, more_rows = op(b=w, **given), op(b=tf.transpose(w), adjoint_b=True, **given)
    sums = op(b=x, adjoint_a=True, **given)
    return [rows, more_rows, sums, *_slopes(rows, w), *_slopes(sums, x)]


def _to_dense(op, b):
    places, values, shape = _sparse(b, tf.float32, least=0)
    dense = op(sparse_indices=places, output_shape=shape, sparse_values=values, default_value=2.0)
    return dense + b.floats(2)


def _sparse_reduction(op, b):
    places, values, shape = _sparse(b, tf.float32, least=1)
    given = dict(input_indices=places, input_values=values, input_shape=shape)
    sums = op(reduction_axes=[1], **given)
    return [sums, op(reduction_axes=[-1], keep_dims=True, **given)]


sample('CTCLoss', _ctc_loss)
sample('SparseReduceMax SparseReduceSum', _sparse_reduction)
sample('SparseToDense', _to_dense)
sample('SparseTensorDenseMatMul', _sparse_matmul)


# Cells of recurrent networks, and their gradients.


def _gradient_of(op, b, gradient, name, words, **attrs):
    """The gradient, which has its own op, of what a cell makes."""
    given = _inputs(name, words, b, attrs)
    made = getattr(ops, name)(**given)._asdict()
    pulled = {'cs_grad': 2 * made.get('cs', 0.0), 'h_grad': tf.sin(made['h'])}
    pulled['d_h'] = pulled['h_grad']
    definition = op_def_registry.get(gradient)
    takes = {one.name for one in (*definition.input_arg, *definition.attr)}
    return op(**{k: v for k, v in (given | made | pulled).items() if k in takes})


_WEIGHTS = 'w58 w2 w2 w2 w8'
for _name, _words, _attrs in [
    ('BlockLSTM', f't53 n2 n2 {_WEIGHTS}', {'forget_bias': 1.0, 'seq_len_max': np.int64(5)}),
    ('BlockLSTMV2', f't53 n2 n2 {_WEIGHTS}', {'seq_len_max': np.int64(5)}),
    ('LSTMBlockCell', f'n3 n2 n2 {_WEIGHTS}', {}),
    ('GRUBlockCell', 'n3 n2 w54 w52 w4 w2', {}),
]:
    _attrs = _attrs if _name == 'GRUBlockCell' else {'use_peephole': True, **_attrs}
    _gradient = f'{_name[:9]}Grad{_name[9:]}' if 'V2' in _name else f'{_name}Grad'
    sample(_name, _words, **_attrs)
    sample(_gradient, _gradient_of, gradient=_gradient, name=_name, words=_words, **_attrs)


# Images.


WINDOW = {'ksize': [1, 3, 3, 1], 'strides': [1, 2, 2, 1], 'padding': 'SAME'}
EACH = {'strides': [1] * 4, 'padding': 'SAME'}


def _conv_3d(op, b):
    x, w = b.floats(2, 4, 4, 2), b.whole(2, 2, 2, 2, 3)
    y = tf.nn.conv3d(x, w, [1] * 5, 'SAME')
    y = tf.nn.max_pool3d(y, 3, 2, 'SAME') + tf.nn.avg_pool3d(y, 3, 2, 'SAME')
    [second] = _slopes(tf.nn.max_pool3d(tf.square(x), 3, 2, 'SAME'), x)
    third = tf.gradients(second * b.floats(2, 4, 4, 2), x)
    return [y, *tf.gradients(y, x), *_slopes(y, x, w), second, *third]


def _pools(op, b):
    x = b.floats(4, 4, 2)
    y = tf.nn.max_pool2d(x, 3, 2, 'SAME') + tf.nn.avg_pool2d(x, 3, 2, 'SAME')  # windows overlap
    [gradient], normalized = _slopes(y, x), tf.nn.local_response_normalization(x)
    again = tf.gradients([tf.square(gradient), tf.square(normalized)], x)
    return [y, gradient, normalized, *again]


def _max_pool_argmax(op, b, in_batch):
    x = b.floats(4, 4, 2)
    y, at = ops.MaxPoolWithArgmax(input=x, include_batch_in_index=in_batch, **WINDOW)
    return [y, at, *_slopes(y, x)]


def _batch_norm(op, b, forward, gradient):
    x, scale = b.floats(2, 2, 3), b.whole(3)
    given = dict(x=x, scale=scale, offset=scale, mean=scale, variance=scale + 1)
    y, mean, variance, *_ = forward(**given, is_training=False)
    return _slopes(y, x, scale) if gradient else [y, mean, variance]


def _crop(op, b, gradient):
    boxes = tf.concat([b.floats(2) * 0.4, 0.5 + b.floats(2) * 0.4], 1)
    images = b.whole(4, 6, 6, 2)
    crops = ops.CropAndResize(image=images, boxes=boxes, box_ind=b.ints(), crop_size=[2, 2])
    return _slopes(crops, images, boxes) if gradient else crops


def _own_crops(op, b, gradient):
    """Two boxes of each image, whose number is computed in two ways."""
    images, corners = b.floats(6, 6, 2), b.floats(2, 2) * 0.4
    boxes = tf.reshape(tf.concat([corners, corners + 0.5], 2), [-1, 4])
    rows = tf.range(tf.shape(images)[0])
    which = tf.ones([tf.size(rows), 2], tf.int32) * rows[:, None]
    given = dict(image=images, boxes=boxes, crop_size=[2, 2])
    crops = ops.CropAndResize(box_ind=tf.repeat(rows, 2), **given)
    crops += ops.CropAndResize(box_ind=tf.reshape(which, [-1]), **given)
    return _slopes(crops, images, boxes) if gradient else crops


def _non_max_suppression(op, b):
    boxes = b.floats(6, 1, 4) + [0.0, 0.0, 0.5, 0.5]
    return tf.image.combined_non_max_suppression(boxes, b.floats(6, 2), 3, 4)


sample('Conv2D DepthwiseConv2dNative', 'n442 w2223', **EACH)
sample('Dilation2D', 'n442 w222', rates=[1] * 4, **EACH)
for _name in ('Conv2D', 'DepthwiseConv2dNative'):
    _backward = f'{_name}BackpropInput {_name}BackpropFilter'
    sample(_backward, _slopes_of, name=_name, words='n442 w2221', **EACH)
_rated = {'name': 'Dilation2D', 'words': 'n442 w222', 'rates': [1] * 4, **EACH}
sample('Dilation2DBackpropInput Dilation2DBackpropFilter', _slopes_of, **_rated)
sample('Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2 MaxPool3D MaxPool3DGrad', _conv_3d)
sample('AvgPool3D AvgPool3DGrad MaxPool3DGradGrad', _conv_3d)
sample('MaxPool MaxPoolGrad MaxPoolGradGrad AvgPool AvgPoolGrad LRN LRNGrad', _pools)
sample('MaxPoolV2', 'n441', **WINDOW)
sample('MaxPoolGradV2', _slopes_of, name='MaxPoolV2', words='n441', **WINDOW)
for _whole in (False, True):
    sample('MaxPoolWithArgmax MaxPoolGradWithArgmax', _max_pool_argmax, _whole, in_batch=_whole)
sample('ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor', 'n441', size=[3, 6])
for _name in ('ResizeBicubic', 'ResizeBilinear', 'ResizeNearestNeighbor'):
    sample(f'{_name}Grad', _slopes_of, name=_name, words='n441', size=[3, 6])
for _version in ('', 'V2', 'V3'):
    _norm = getattr(ops, f'FusedBatchNorm{_version}')
    sample(f'FusedBatchNorm{_version}', _batch_norm, forward=_norm, gradient=False)
    sample(f'FusedBatchNormGrad{_version}', _batch_norm, forward=_norm, gradient=True)
sample('SpaceToDepth DepthToSpace', 'n444', block_size=2)
_patches = {'ksizes': WINDOW['ksize'], 'strides': WINDOW['strides'], 'rates': [1] * 4}
sample('ExtractImagePatches', 'n441', padding='SAME', **_patches)
sample('AdjustHue', 'n223', delta=0.3)
sample('AdjustSaturation', 'n223', scale=0.3)
sample('AdjustContrastv2', 'n223', contrast_factor=0.3)
sample('AdjustContrastv2', 'n23', whole=True, contrast_factor=0.3)  # one image
sample('HSVToRGB RGBToHSV', 'n223')
sample('CropAndResize', _crop, gradient=False)
sample('CropAndResizeGradImage CropAndResizeGradBoxes', _crop, gradient=True)
sample('CropAndResize', _own_crops, gradient=False)
sample('CropAndResizeGradImage CropAndResizeGradBoxes', _own_crops, gradient=True)
sample('CombinedNonMaxSuppression', _non_max_suppression)


# Entries that are arranged anew, by sizes.


def _reshape(op, b):
    x = b.floats(4, 2)
    n, time_major = tf.shape(x)[0], tf.transpose(x, [1, 0, 2])
    return [
        *(op(tensor=x, shape=shape) for shape in ([-1, 2], [-1, 2, 2, 2])),
        *(op(tensor=x, shape=tf.stack(shape)) for shape in ([n, 8], [n * 2, 4])),
        *(op(tensor=time_major, shape=tf.stack(shape)) for shape in ([2, 2, n, 2], [4, -1])),
        op(tensor=op(tensor=x, shape=[-1]), shape=tf.shape(x)),
    ]


def _strided_slice(op, b):
    x = b.floats(4, 3)
    n = tf.shape(x)[0]
    made = [x[:, 1:3], x[:n, ::2], x[..., 0], x[:, None], x[..., None], x[:, 2], x[0:, :, -1]]
    made.append(tf.transpose(x)[1, :, :n])
    return [*made, *(_slopes(y, x)[0] for y in made)]


def _slice(op, b):
    x = b.floats(4)
    sizes = [[-1, 2], tf.stack([tf.shape(x)[0], 2])]
    return [op(input=x, begin=[0, 1], size=size) for size in sizes]


def _tile(op, b):
    x = b.floats(1)
    made = op(input=b.whole(1, 2), multiples=tf.stack([tf.shape(x)[0], 2]))
    copies = op(input=x, multiples=[3, 1])  # in blocks
    return [op(input=x, multiples=[1, 3]), made + x, copies, *_slopes(copies, x)]


def _one_part(op, b):
    x = b.floats(3)
    return op(value=x, size_splits=tf.shape(x)[:1], axis=0, num_split=1)


def _blocks(op, b):
    """Several blocks of all examples, one after another: put together, and taken apart."""
    x = b.floats(3)
    rows = tf.shape(x)[0]
    three = ops.ConcatV2(values=[x, 2 * x, b.floats(3)], axis=0)
    five = ops.ConcatV2(values=[three, three[:rows], tf.split(three, 3, 0)[1]], axis=0)
    time_major = tf.reshape(five, [5, -1, 3])
    made = [three, five, three[rows:], five[rows : 4 * rows], tf.reshape(time_major, [-1, 3])]
    parts = [ops.Slice(input=five, begin=[at, 0], size=[rows, 3]) for at in (0, 2 * rows)]
    return [*made, time_major, *parts, *(_slopes(y, x)[0] for y in made)]


def _space(op, b):
    """Blocks of blocks, in two steps, which are taken apart in one."""
    x = b.floats(4, 4, 2)
    halves = ops.SpaceToBatchND(input=x, block_shape=[2, 1], paddings=[[1, 1], [0, 0]])
    eighths = ops.SpaceToBatchND(input=halves, block_shape=[2, 2], paddings=[[0, 1], [0, 0]])
    joined = ops.BatchToSpaceND(input=tf.tanh(eighths), block_shape=[2, 2], crops=[[0, 1], [0, 0]])
    made = [halves, eighths, joined, tf.reduce_mean(eighths, 0)]
    return [*made, *(_slopes(y, x)[0] for y in made)]


PADS = [[0, 0], [1, 2]]

sample('Reshape', _reshape)
sample('StridedSlice StridedSliceGrad', _strided_slice)
sample('Slice', _slice)
sample('Pad', 'n4', paddings=PADS)
sample('PadV2', 'n4', paddings=PADS, constant_values=2.0)
_reflected = {'paddings': PADS, 'mode': 'REFLECT'}
sample('MirrorPad MirrorPadGrad', _slopes_of, name='MirrorPad', words='n4', **_reflected)
sample('Tile', _tile)
sample('ConcatV2 Slice Split StridedSlice StridedSliceGrad Reshape', _blocks)
sample('SpaceToBatchND BatchToSpaceND', _space)
sample('Split', lambda op, b: op(axis=0, value=b.floats(3), num_split=1))
sample('SplitV', _one_part)

UNREACHABLE = {
    'LookupTableFind': 'TensorFlow 2 has no ops that make its kind of table.',
    'CTCLossV2': 'It only has a kernel for GPUs.',
}


@pytest.mark.parametrize('name', sorted({*RULES, *SAMPLES} - {*UNREACHABLE}))
def test_rule(name):
    assert name in SAMPLES, f'The rule for {name} has no sample.'
    for sampled in SAMPLES[name]:
        assert (name in checked(name, sampled)) == (sampled not in FULL)


def checked(name, sampled):
    """Which types of a sample's ops are divided; those of one are tried along each dimension."""
    with tf.Graph().as_default():
        batch = Batch()
        sampled(batch)
    return check_rule(lambda *given: sampled(Batch(given)), *batch.rows, types=[name])


def test_control_flow_has_rules():
    assert [op_type for op_type in CALL_RULES if not has_rule(op_type)] == []


def test_a_mean_of_integers():
    """It's rounded, so it isn't the mean of the means of parts."""
    rows = np.random.RandomState(0).randint(9, size=[7, 3]).astype(np.int32)
    assert 'Mean' not in check_rule(lambda x: tf.reduce_mean(x, 0), rows)


def test_a_split_of_examples_that_are_not_in_blocks():
    """Each has two rows, one after the other. The first half of all rows isn't one of each."""
    rows = np.random.RandomState(0).randn(7, 3).astype(np.float32)
    sharded = check_rule(lambda x: tf.split(tf.repeat(x, 2, 0), 2)[0], rows, types=[])
    assert sharded and 'Split' not in sharded


def with_letters(rule):
    """A rule with a letter in place of each word's first `_`, of each word's second, and so on."""
    words = rule.split()
    inputs = words[: words.index('->')]
    for i in range(max(word.count('_') for word in inputs)):
        text = ' '.join(with_letter(word, i) for word in words)
        yield text if 'z' in text.partition('->')[2] or '(' in text else f'{text} (sum)'


def with_letter(word, i):
    parts = word.split('_')
    before, after = '_'.join(parts[: i + 1]), '_'.join(parts[i + 1 :])
    return f'{before}z{after}' if len(parts) > i + 1 else word


RIGHT = {  # with a letter as well
    'S__z * -> S__z',  # the contrast of each channel by itself
    'nz nm -> nm (sum)',  # How many are smaller can be counted in parts.
}
WRONG = [
    (name, text)
    for name, rule in RULES.items()
    # Some kernels of recurrent layers read beyond what they are given, instead of failing.
    if isinstance(rule, str) and '_' in rule and not re.search('LSTM|GRU', name)
    for text in with_letters(rule)
    if text not in RIGHT and not name.startswith('InTopK')  # There's no sum of bools.
]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ('name', 'wrong'),
    [
        *WRONG,
        ('InTopKV2', 'nz n * -> n (any)'),
        ('LRN', 'n__c -> n__c'),
        ('MaxPool', 'nh__ -> nh__'),
        ('MaxPoolGrad', 'nS nS nS -> nS'),
        ('Conv2D', 'nh__ * -> nh__'),
        ('SpaceToDepth', 'nhwc -> nhwc'),
        ('SpaceToBatchND', 'n... * * -> n...'),
        ('Tile', 'nS * -> nS'),
        ('Cumsum', 'S * -> S'),
        ('ReverseV2', 'S * -> S'),
        ('Pad', 'S * -> S'),
        ('ReverseSequence', 'nt_ n -> nt_'),
        ('ArgMax', 'abc * -> ab (max)'),
        ('Sum', lambda op, sizes: 'abc * -> abc' if op.get_attr('keep_dims') else None),
    ],
)
def test_wrong_rule(name, wrong, monkeypatch):
    """Most hold along dimension 0, that of the examples."""
    monkeypatch.setitem(RULES, name, wrong)
    with pytest.raises(AssertionError, match=f'The rule for {name}.* is wrong along dimension'):
        for sampled in SAMPLES[name]:
            checked(name, sampled)


@pytest.mark.parametrize('made', ['ZerosLike', 'OnesLike'])
def test_what_a_branch_has_in_place_of_a_sum(made):
    """Zeros are a part of any sum, and ones aren't: check_rule compares with one device."""

    def branches(x):
        like = tf.placeholder_with_default(tf.ones([3]), [3])
        other = getattr(ops, made)
        no = tf.placeholder_with_default(False, [])
        return tf.cond(no, lambda: tf.reduce_sum(x, 0), lambda: other(x=like))

    rows = np.random.RandomState(0).rand(7, 3).astype(np.float32)
    assert {'Sum', 'Merge'} <= check_rule(branches, rows)


def test_gradients_of_a_branch():
    """What they need of the branch, they use as it is: it's in no Optional."""

    def slopes(x):
        no = tf.placeholder_with_default(False, [])
        return tf.gradients(tf.cond(no, lambda: tf.tanh(x) * x, lambda: tf.square(x)), x)

    rows = np.random.RandomState(0).rand(7, 3).astype(np.float32)
    types = check_rule(slopes, rows, types=[])
    assert {'Switch', 'Merge', 'TanhGrad'} <= types and 'OptionalFromValue' not in types


def test_a_function_that_is_called_with_and_without_a_gradient():
    """In a loop, where calls stay. Gradients add ops to the graph of the branch in Python."""

    def loop(x):
        yes = tf.placeholder_with_default(True, [])
        function = tf.function(lambda h: tf.cond(yes, lambda: tf.tanh(h) * h, lambda: h))
        body = lambda i, h: (i + 1, function(h) + tf.gradients(function(2 * h), h)[0])  # noqa: E731
        return tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]

    rows = np.random.RandomState(0).rand(7, 3).astype(np.float32)
    assert {'PartitionedCall', 'StatelessIf'} <= check_rule(loop, rows, types=[])


def test_zeros_for_each_example_are_no_part_of_a_sum():
    """As many as a tower has, where the other branch's sum has one for each feature."""

    def branches(x):
        no = tf.placeholder_with_default(False, [])
        return tf.cond(no, lambda: tf.reduce_sum(x, 0), lambda: tf.zeros_like(x[:, 0]))

    rows = np.random.RandomState(0).rand(7, 3).astype(np.float32)
    assert 'StatelessIf' not in check_rule(branches, rows, types=[])


def test_sparse_labels_of_two_blocks():
    """Those of all sequences, and then again; each device takes rows that follow each other."""

    def losses(x):
        times = tf.transpose(x, [1, 0, 2])
        labels = tf.argmax(x[:, :2], 2, output_type=tf.int32)
        labels = tf.sparse.from_dense(tf.tile(labels, [2, 1]))
        lengths = tf.fill([2 * tf.shape(x)[0]], 4)
        return tf.nn.ctc_loss(labels, tf.concat([times, 2 * times], 1), lengths)

    rows = np.random.RandomState(0).rand(7, 4, 5).astype(np.float32)
    assert 'CTCLoss' in check_rule(losses, rows, types=[])


def one_for_all_entries(x):
    sparse = tf.sparse.from_dense(x[:, 0])
    return ops.SparseToDense(
        sparse_indices=sparse.indices,
        output_shape=sparse.dense_shape,
        sparse_values=1.0,
        default_value=0.0,
    )


def of_unknown_indices(x):
    """The graph doesn't know how many dimensions they name."""
    sparse = tf.sparse.from_dense(x[:, 0])
    return ops.SparseToDense(
        sparse_indices=tf.placeholder_with_default(sparse.indices, [None, None]),
        output_shape=sparse.dense_shape,
        sparse_values=sparse.values,
        default_value=0.0,
    )


def with_what_has_no_shape(x):
    """A product with what has a row for each example, which the graph doesn't know."""
    sparse = tf.sparse.from_dense(x[:, 0])
    other = tf.numpy_function(lambda x: x, [x[:, 1]], tf.float32)
    return ops.SparseTensorDenseMatMul(
        a_indices=sparse.indices,
        a_values=sparse.values,
        a_shape=sparse.dense_shape,
        b=other,
        adjoint_a=True,
    )


@pytest.mark.parametrize(
    'function', [one_for_all_entries, of_unknown_indices, with_what_has_no_shape]
)
def test_sparse_tensors_that_are_needed_in_full(function):
    rows = np.random.RandomState(0).rand(7, 4, 5).astype(np.float32)
    sharded = check_rule(function, rows, types=[])
    assert sharded and not {'SparseToDense', 'SparseTensorDenseMatMul'} & sharded


@pytest.mark.parametrize(
    ('text', 'shapes', 'inputs', 'outputs'),
    [
        ('S+ -> S', [(5, 1), (4,)], [('S2', None), ('S1',)], [('S2', 'S1')]),
        ('nS nS -> nS', [(5, 4), (5, 4)], [('n', 'S1')] * 2, [('n', 'S1')]),
        ('n_ * -> n...', [(5, 4), (4,)], [('n', None), ()], [('n', None)]),
        ('n... n... -> * (sum)', [(5, 4), (5, 4)], [('n', None)] * 2, [(None, None)]),
        ('S_ = -> S_', [(5, 4), (4,)], [('S1', None), LOCAL], [('S1', None)]),
    ],
)
def test_text(text, shapes, inputs, outputs):
    """The labels of an addition's dimensions."""
    with tf.Graph().as_default():
        one, two = (tf.zeros(shape) for shape in shapes)
        signature = parse(text).signature((one + two).op, Sizes())
    assert (signature.inputs, signature.outputs) == (inputs, outputs)


def test_each_input_has_the_examples_somewhere_else():
    rows = RowSpace('batch', None)
    n = rows.size
    dims = [[n, Size(3)], [Size(3), n], [n, n]]
    with tf.Graph().as_default():
        tensors = [tf.zeros([4, 3]), tf.zeros([3, 4]), tf.zeros([4, 4])]
        sizes = Sizes()
        for tensor, its_dims in zip(tensors, dims):
            sizes.set_dims(tensor, its_dims)
        signature = signature_of(RULES['IdentityN'], tf.identity_n(tensors)[0].op, sizes)
    assert signature.inputs == signature.outputs == [(rows, None), (None, rows), (rows, None)]


@pytest.mark.parametrize('text', ['n__ n -> n', 'n S -> nS', 'S S -> S_'])
def test_text_for_other_ranks(text):
    with tf.Graph().as_default(), pytest.raises(NotSharded):
        parse(text).signature(tf.add(tf.zeros([5, 4]), tf.zeros([4])).op, Sizes())


def test_other_number_of_inputs():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="inputs 'S', and the op has 2"):
        parse('S -> S').signature(tf.add(1.0, 2.0).op, Sizes())


@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        ('', 'another form'),
        ('n... *', 'another form'),
        ('n.. -> n', 'another form'),
        ('n -> #n', 'another form'),
        ('mk kn -> mn (median)', 'another form'),
        ('nn -> n', 'twice'),
        ('n...... -> n...', 'twice'),
        ('ST -> ST', 'two capitals'),
        ('S... -> S...', "beside '...'"),
        ('n+ n+ -> n', "'\\+'"),
        ('n -> m', 'no input'),
        ('mk kn -> mn', 'nothing reduces'),
    ],
)
def test_malformed_text(text, problem):
    with pytest.raises(ValueError, match=problem) as error:
        parse(text)
    assert repr(text) in str(error.value) and "'mk kn -> mn (sum)'" in str(error.value)
