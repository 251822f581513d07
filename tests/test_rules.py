"""The table of rules, walked: what each says of an op holds for it, on uneven shards."""

import ast
import functools
import pathlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow import raw_ops as ops
from tensorflow.python.framework import op_def_registry

import estimator_mgpu
from estimator_mgpu.own_ops import check_rule
from estimator_mgpu.partition import sharding
from estimator_mgpu.partition.plan import OWN
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.signature import parsed
from estimator_mgpu.partition.rules.sizes import Sizes

ROWS = 7
SAMPLES = {}


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
        return tf.constant(self._random.rand(*shape).astype(np.float32))


def sample(*names):
    def add(function):
        for name in names:
            SAMPLES.setdefault(name, []).append(functools.partial(function, name))
        return function

    return add


def _arguments(name, makers):
    """The inputs of an op of entries, of the first type that it takes."""
    definition = op_def_registry.get(name)
    allowed = {a.name: list(a.allowed_values.list.type) for a in definition.attr}
    kinds = [tf.float32, tf.int32, tf.bool, tf.string, tf.complex64]

    def type_of(arg):
        if not arg.type_attr:
            return tf.as_dtype(arg.type)
        types = allowed[arg.type_attr] or [k.as_datatype_enum for k in kinds]
        return next(k for k in kinds if k.as_datatype_enum in types)

    return {arg.name: makers[type_of(arg)]() for arg in definition.input_arg}


def _entries(name, batch, *shapes):
    """Calls an op of entries with tensors that have rows."""
    shapes = iter(shapes)

    def next_shape():
        return next(shapes, (4,))

    makers = {
        tf.float32: lambda: batch.floats(*next_shape()),
        tf.int32: lambda: batch.ints(*next_shape()) + 1,
        tf.int64: lambda: batch.ints(*next_shape(), dtype=np.int64),
        tf.bool: lambda: batch.bools(*next_shape()),
        tf.string: lambda: batch.strings(*next_shape()),
        tf.complex64: lambda: tf.complex(batch.floats(*next_shape()), batch.floats(4)),
    }
    arguments = _arguments(name, makers)
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


@sample('AddV2', 'Mul', 'Maximum', 'SquaredDifference')
def _broadcast(name, batch):
    op = getattr(ops, name)
    x = batch.floats(2, 3)
    return [
        op(x=x, y=batch.whole(3)),
        op(x=batch.whole(1, 2, 1), y=x),
        op(x=x, y=batch.floats(1, 3)),
        op(x=tf.transpose(x, [1, 0, 2]), y=batch.floats(3)),
        op(x=batch.floats(1), y=tf.transpose(batch.floats(1))),  # pairs of rows
    ]


@sample('SelectV2')
def _select_v2(name, batch):
    return ops.SelectV2(condition=batch.bools(1), t=batch.floats(3), e=batch.whole(3))


@sample('Select')
def _select(name, batch):
    one, two = batch.floats(3), batch.floats(3)
    by_row = ops.Select(condition=batch.bools(), x=one, y=two)
    return [by_row, ops.Select(condition=batch.bools(3), x=one, y=two)]


@sample('FakeQuantWithMinMaxArgs')
def _fake_quant(name, batch):
    return ops.FakeQuantWithMinMaxArgs(inputs=batch.floats(3))


@sample('FakeQuantWithMinMaxVars')
def _fake_quant_vars(name, batch):
    low, high = tf.constant(0.0), tf.constant(0.8)
    return ops.FakeQuantWithMinMaxVars(inputs=batch.floats(3), min=low, max=high)


@sample('FakeQuantWithMinMaxVarsPerChannel', 'FakeQuantWithMinMaxVarsPerChannelGradient')
@sample('FakeQuantWithMinMaxVarsGradient')
def _fake_quant_gradient(name, batch):
    x, low, high = batch.floats(3), batch.whole(3) * 0.4, 0.5 + batch.whole(3) * 0.4
    if 'PerChannel' not in name:
        low, high = low[0], high[0]
    y = getattr(ops, name.replace('Gradient', ''))(inputs=x, min=low, max=high)
    return tf.gradients(y * batch.floats(3), [x, low, high]) if 'Gradient' in name else y


@sample('IdentityN')
def _identity_n(name, batch):
    x = batch.floats(3)
    both = ops.IdentityN(input=[x, batch.whole(3), tf.transpose(x), tf.reshape(x, [-1])])
    activated = tf.nn.silu(x)
    return [*both, activated, *tf.gradients(activated, x)]


@sample('Sum', 'Mean', 'Max', 'Min', 'Prod', 'All', 'Any')
def _reductions(name, batch):
    x = batch.bools(3, 2) if name in ('All', 'Any') else batch.floats(3, 2)
    op = getattr(ops, name)
    axes = [([0], False), ([1], False), ([0, 2], True), ([-1], True), ([0, 1, 2], False)]
    return [op(input=x, axis=axis, keep_dims=keep) for axis, keep in axes]


@sample('Mean')
def _half_mean(name, batch):
    return ops.Mean(input=batch.floats(3, dtype=np.float16) * 1000, axis=[0])


@sample('Sum')
def _gradient_of_broadcasting(name, batch):
    x = batch.floats(3)
    w = batch.whole(3)
    return tf.gradients(tf.tanh(x * w) * (x + batch.floats(1)), [x, w])


@sample('L2Loss')
def _l2(name, batch):
    return ops.L2Loss(t=batch.floats(3))


@sample('BiasAdd', 'BiasAddGrad')
def _bias(name, batch):
    x = batch.floats(2, 2, 3)
    if name == 'BiasAdd':
        return ops.BiasAdd(value=x, bias=batch.whole(3))
    return ops.BiasAddGrad(out_backprop=x)


@sample('Softmax', 'LogSoftmax')
def _softmax(name, batch):
    return getattr(ops, name)(logits=batch.floats(3))


@sample('TopKV2')
def _top_k(name, batch):
    return list(ops.TopKV2(input=batch.floats(5), k=2))


@sample('NthElement')
def _nth(name, batch):
    return [
        ops.NthElement(input=batch.floats(5), n=1),
        ops.NthElement(input=batch.floats(2, 5), n=4),
    ]


@sample('LowerBound', 'UpperBound')
def _bounds(name, batch):
    op, edges = getattr(ops, name), tf.constant([[0.2, 0.4, 0.4, 0.7]])
    x = batch.floats(3)
    return [
        op(sorted_inputs=tf.sort(batch.floats(4)), values=x),
        op(sorted_inputs=edges, values=tf.reshape(x, [1, -1])),
    ]


@sample('FFT', 'IFFT', 'FFT2D', 'IFFT2D')
def _fourier(name, batch):
    return getattr(ops, name)(input=tf.complex(batch.floats(2, 4), batch.floats(2, 4)))


@sample('RFFT', 'IRFFT', 'RFFT2D', 'IRFFT2D')
def _real_fourier(name, batch):
    x = batch.floats(3, 4)
    length = [2, 4] if '2D' in name else [4]
    if name.startswith('I'):
        x = tf.complex(x, batch.floats(3, 4))
    return getattr(ops, name)(input=x, fft_length=length)


@sample('Cumsum', 'Cumprod', 'CumulativeLogsumexp')
def _cumulative(name, batch):
    return getattr(ops, name)(x=batch.floats(3), axis=1, reverse=True)


@sample('ReverseV2')
def _reverse(name, batch):
    return ops.ReverseV2(tensor=batch.floats(3, 2), axis=[1])


@sample('ArgMax', 'ArgMin')
def _arg(name, batch):
    x = batch.floats(3, 2)
    return [getattr(ops, name)(input=x, dimension=axis) for axis in (1, -1)]


@sample('SoftmaxCrossEntropyWithLogits')
def _cross_entropy(name, batch):
    return list(getattr(ops, name)(features=batch.floats(3), labels=batch.floats(3)))


@sample('SparseSoftmaxCrossEntropyWithLogits')
def _sparse_cross_entropy(name, batch):
    return list(getattr(ops, name)(features=batch.floats(4), labels=batch.ints()))


@sample('InTopKV2', 'InTopK')
def _in_top_k(name, batch):
    k = 2 if name == 'InTopK' else tf.constant(2)
    return getattr(ops, name)(predictions=batch.floats(4), targets=batch.ints(), k=k)


@sample('ReverseSequence')
def _reverse_sequence(name, batch):
    return ops.ReverseSequence(
        input=batch.floats(4, 2), seq_lengths=batch.ints(), seq_dim=1, batch_dim=0
    )


@sample('Roll')
def _roll(name, batch):
    return ops.Roll(input=batch.floats(4), shift=[1], axis=[1])


@sample('Cholesky', 'MatrixInverse', 'SelfAdjointEigV2', 'MatrixDeterminant')
@sample('LogMatrixDeterminant')
def _matrices(name, batch):
    x = batch.floats(3, 3)
    x = tf.matmul(x, x, transpose_b=True) + 2 * tf.eye(3)
    if name == 'SelfAdjointEigV2':
        return [ops.SelfAdjointEigV2(input=x, compute_v=v)[0] for v in (True, False)]
    return tf.nest.flatten(getattr(ops, name)(input=x))


@sample('CholeskyGrad')
def _cholesky_gradient(name, batch):
    x = batch.floats(3, 3) + 2 * tf.eye(3)
    return ops.CholeskyGrad(l=x, grad=batch.floats(3, 3))


@sample('MatrixSolve', 'MatrixTriangularSolve')
def _solve(name, batch):
    matrix = batch.floats(3, 3) + 2 * tf.eye(3)
    return getattr(ops, name)(matrix=matrix, rhs=batch.floats(3, 2))


@sample('MatrixDiagPart')
def _diag_part(name, batch):
    return ops.MatrixDiagPart(input=batch.floats(3, 3))


@sample('MatrixDiagPartV2', 'MatrixDiagPartV3')
def _diag_part_v2(name, batch):
    return getattr(ops, name)(input=batch.floats(3, 3), k=0, padding_value=0.0)


@sample('MatrixBandPart')
def _band(name, batch):
    return ops.MatrixBandPart(input=batch.floats(3, 3), num_lower=0, num_upper=1)


@sample('MatrixSetDiag', 'MatrixSetDiagV2', 'MatrixSetDiagV3')
def _set_diag(name, batch):
    x, op = batch.floats(3, 4), getattr(ops, name)
    if name == 'MatrixSetDiag':
        return op(input=x, diagonal=batch.floats(3))
    return op(input=x, diagonal=batch.floats(3), k=1)


@sample('MatrixDiag')
def _diag(name, batch):
    return ops.MatrixDiag(diagonal=batch.floats(3))


@sample('MatrixDiagV2', 'MatrixDiagV3')
def _diag_v2(name, batch):
    return getattr(ops, name)(
        diagonal=batch.floats(3), k=0, num_rows=-1, num_cols=-1, padding_value=0.0
    )


@sample('MatMul')
def _matmul(name, batch):
    x, y = batch.floats(3), batch.floats(2)
    return [
        ops.MatMul(a=x, b=batch.whole(3, 2)),
        ops.MatMul(a=batch.whole(2, 3), b=x, transpose_b=True),
        ops.MatMul(a=x, b=y, transpose_a=True),
        ops.MatMul(a=x, b=x, transpose_b=True),
    ]


@sample('BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3')
def _batch_matmul(name, batch):
    x, y = batch.floats(2, 3), batch.floats(3, 2)
    extra = {'Tout': tf.float32} if name == 'BatchMatMulV3' else {}
    op = functools.partial(getattr(ops, name), **extra)
    results = [
        op(x=x, y=y),
        op(x=x, y=x, adj_y=True),
        op(x=tf.transpose(x, [1, 2, 0]), y=tf.transpose(y, [2, 0, 1])),
    ]
    if name != 'BatchMatMul':
        results.append(op(x=x, y=batch.whole(1, 3, 4)))
    return results


@sample('Einsum')
def _einsum(name, batch):
    x, y = batch.floats(2, 3), batch.floats(3)
    return [
        ops.Einsum(inputs=[x, y], equation='bij,bj->bi'),
        ops.Einsum(inputs=[x, y], equation='bij,bj->ij'),
        ops.Einsum(inputs=[x, batch.whole(3, 4)], equation='...i,ij->...j'),
        ops.Einsum(inputs=[y, y], equation='bi,ci->bc'),
    ]


@sample('Conv2D', 'DepthwiseConv2dNative', 'Dilation2D')
def _conv(name, batch):
    x = batch.floats(4, 4, 2)
    if name == 'Dilation2D':
        return ops.Dilation2D(
            input=x, filter=batch.whole(2, 2, 2), strides=[1] * 4, rates=[1] * 4, padding='SAME'
        )
    return getattr(ops, name)(
        input=x, filter=batch.whole(2, 2, 2, 3), strides=[1] * 4, padding='SAME'
    )


@sample('Conv2DBackpropInput', 'DepthwiseConv2dNativeBackpropInput')
@sample('Conv2DBackpropFilter', 'DepthwiseConv2dNativeBackpropFilter')
def _conv_gradient(name, batch):
    x, w = batch.floats(4, 4, 2), batch.whole(2, 2, 2, 1)
    conv = tf.nn.conv2d if name.startswith('Conv') else tf.nn.depthwise_conv2d
    return tf.gradients(tf.square(conv(x, w, [1] * 4, 'SAME')), [x, w])


@sample('Dilation2DBackpropInput', 'Dilation2DBackpropFilter')
def _dilation_gradient(name, batch):
    x, w = batch.floats(4, 4, 2), batch.whole(2, 2, 2)
    y = ops.Dilation2D(input=x, filter=w, strides=[1] * 4, rates=[1] * 4, padding='SAME')
    return tf.gradients(tf.square(y), [x, w])


@sample('Conv3D', 'Conv3DBackpropInputV2', 'Conv3DBackpropFilterV2', 'MaxPool3D', 'MaxPool3DGrad')
@sample('AvgPool3D', 'AvgPool3DGrad', 'MaxPool3DGradGrad')
def _conv_3d(name, batch):
    x, w = batch.floats(2, 4, 4, 1), batch.whole(2, 2, 2, 1, 1)
    y = tf.nn.conv3d(x, w, [1] * 5, 'SAME')
    y = tf.nn.max_pool3d(y, 2, 2, 'SAME') + tf.nn.avg_pool3d(y, 2, 2, 'SAME')
    [gradient] = tf.gradients(y, x)
    second = tf.gradients(tf.nn.max_pool3d(tf.square(x), 2, 2, 'SAME'), x)[0]
    third = tf.gradients(second * batch.floats(2, 4, 4, 1), x)
    return [y, gradient, *tf.gradients(tf.square(y), [x, w]), second, *third]


@sample('MaxPool', 'MaxPoolGrad', 'MaxPoolGradGrad', 'AvgPool', 'AvgPoolGrad', 'LRN', 'LRNGrad')
def _pools(name, batch):
    x = batch.floats(4, 4, 2)
    y = tf.nn.max_pool2d(x, 2, 2, 'SAME') + tf.nn.avg_pool2d(x, 2, 2, 'SAME')
    [gradient] = tf.gradients(tf.square(y), x)
    normalized = tf.nn.local_response_normalization(x)
    again = tf.gradients([tf.square(gradient), tf.square(normalized)], x)
    return [y, gradient, normalized, *again]


@sample('MaxPoolV2')
def _max_pool_v2(name, batch):
    return ops.MaxPoolV2(
        input=batch.floats(4, 4, 1), ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding='SAME'
    )


@sample('MaxPoolGradV2')
def _max_pool_gradient_v2(name, batch):
    x = batch.floats(4, 4, 1)
    size = {'ksize': [1, 2, 2, 1], 'strides': [1, 2, 2, 1], 'padding': 'SAME'}
    y = ops.MaxPoolV2(input=x, **size)
    return ops.MaxPoolGradV2(orig_input=x, orig_output=y, grad=batch.floats(2, 2, 1), **size)


@sample('MaxPoolWithArgmax', 'MaxPoolGradWithArgmax')
def _max_pool_argmax(name, batch):
    x = batch.floats(4, 4, 2)
    size = {'ksize': [1, 2, 2, 1], 'strides': [1, 2, 2, 1], 'padding': 'SAME'}
    results = []
    for whole_index in (False, True):
        y, at = ops.MaxPoolWithArgmax(input=x, include_batch_in_index=whole_index, **size)
        results += [y, at, *tf.gradients(tf.square(y), x)]
    return results


@sample('ResizeBilinear', 'ResizeNearestNeighbor', 'ResizeBicubic', 'ResizeArea')
@sample('ResizeBilinearGrad', 'ResizeNearestNeighborGrad', 'ResizeBicubicGrad')
def _resize(name, batch):
    images = batch.floats(4, 4, 1)
    resized = getattr(ops, name.replace('Grad', ''))(images=images, size=[3, 6])
    return tf.gradients(tf.square(resized), images) if 'Grad' in name else resized


@sample('SpaceToDepth', 'DepthToSpace')
def _depth(name, batch):
    return getattr(ops, name)(input=batch.floats(4, 4, 4), block_size=2)


@sample('ExtractImagePatches')
def _patches(name, batch):
    return ops.ExtractImagePatches(
        images=batch.floats(4, 4, 1),
        ksizes=[1, 2, 2, 1],
        strides=[1, 2, 2, 1],
        rates=[1] * 4,
        padding='SAME',
    )


@sample('AdjustHue', 'AdjustSaturation')
def _colors(name, batch):
    arg = {'AdjustHue': 'delta', 'AdjustSaturation': 'scale'}[name]
    return getattr(ops, name)(images=batch.floats(2, 2, 3), **{arg: 0.3})


@sample('AdjustContrastv2')
def _contrast(name, batch):
    op = ops.AdjustContrastv2
    images = [batch.floats(2, 2, 3), batch.floats(2, 3)]  # the second is one image
    return [op(images=x, contrast_factor=0.3) for x in images]


@sample('HSVToRGB', 'RGBToHSV')
def _color_spaces(name, batch):
    return getattr(ops, name)(images=batch.floats(2, 2, 3))


@sample('FusedBatchNorm', 'FusedBatchNormGrad')
@sample('FusedBatchNormV2', 'FusedBatchNormV3', 'FusedBatchNormGradV2', 'FusedBatchNormGradV3')
def _batch_norm(name, batch):
    x, scale = batch.floats(2, 2, 3), batch.whole(3)
    op = getattr(ops, name.replace('Grad', ''))
    y, mean, variance, *_ = op(
        x=x, scale=scale, offset=scale, mean=scale, variance=scale + 1, is_training=False
    )
    return tf.gradients(tf.square(y), [x, scale]) if 'Grad' in name else [y, mean, variance]


@sample('CropAndResize')
def _crop(name, batch):
    boxes = tf.concat([batch.floats(2) * 0.4, 0.5 + batch.floats(2) * 0.4], 1)
    images = batch.whole(4, 6, 6, 1)
    return ops.CropAndResize(image=images, boxes=boxes, box_ind=batch.ints(), crop_size=[2, 2])


@sample('CropAndResizeGradImage', 'CropAndResizeGradBoxes')
def _crop_gradient(name, batch):
    boxes = tf.concat([batch.floats(2) * 0.4, 0.5 + batch.floats(2) * 0.4], 1)
    images = batch.whole(4, 6, 6, 1)
    crops = ops.CropAndResize(image=images, boxes=boxes, box_ind=batch.ints(), crop_size=[2, 2])
    return tf.gradients(tf.square(crops), [images, boxes])


@sample('Reshape')
def _reshape(name, batch):
    x = batch.floats(4, 2)
    n = tf.shape(x)[0]
    time_major = tf.transpose(x, [1, 0, 2])
    return [
        ops.Reshape(tensor=x, shape=[-1, 2]),
        ops.Reshape(tensor=x, shape=[-1, 2, 2, 2]),
        ops.Reshape(tensor=x, shape=tf.stack([n, 8])),
        ops.Reshape(tensor=x, shape=tf.stack([n * 2, 4])),
        ops.Reshape(tensor=time_major, shape=tf.stack([2, 2, n, 2])),
        ops.Reshape(tensor=time_major, shape=tf.stack([4, -1])),
        ops.Reshape(tensor=ops.Reshape(tensor=x, shape=[-1]), shape=tf.shape(x)),
    ]


@sample('Transpose', 'ConjugateTranspose')
def _transpose(name, batch):
    return getattr(ops, name)(x=batch.floats(3, 2), perm=[2, 0, 1])


@sample('ExpandDims', 'Squeeze')
def _dims(name, batch):
    x = batch.floats(3)
    expanded = [ops.ExpandDims(input=x, axis=axis) for axis in (0, 1, -1)]
    return expanded + [ops.Squeeze(input=e, axis=[a]) for e, a in zip(expanded, (0, 1, -1))]


@sample('Pack', 'Unpack')
def _pack(name, batch):
    x = batch.floats(3)
    packed = [ops.Pack(values=[x, 2 * x, batch.floats(3)], axis=axis) for axis in (0, 1, -1)]
    return packed + list(ops.Unpack(value=x, num=3, axis=1))


@sample('ConcatV2')
def _concat(name, batch):
    return ops.ConcatV2(values=[batch.floats(3), batch.floats(2)], axis=1)


@sample('Split', 'SplitV')
def _split(name, batch):
    x = batch.floats(4)
    if name == 'Split':
        return list(ops.Split(axis=1, value=x, num_split=2))
    return list(ops.SplitV(value=x, size_splits=[1, 3], axis=1, num_split=2))


@sample('StridedSlice')
def _strided_slice(name, batch):
    x = batch.floats(4, 3)
    n = tf.shape(x)[0]
    return [x[:, 1:3], x[:n, ::2], x[..., 0], x[:, None], x[0:, :, -1], tf.transpose(x)[1, :, :n]]


@sample('StridedSliceGrad')
def _strided_slice_gradient(name, batch):
    x = batch.floats(4, 3)
    slices = [x[:, 1:3], x[..., 0], x[:, None], x[:, 2]]
    return [tf.gradients(tf.square(s), x)[0] for s in slices]


@sample('Slice')
def _slice(name, batch):
    x = batch.floats(4)
    n = tf.shape(x)[0]
    sizes = [[-1, 2], tf.stack([n, 2])]
    return [ops.Slice(input=x, begin=[0, 1], size=size) for size in sizes]


@sample('Pad', 'PadV2', 'MirrorPad', 'MirrorPadGrad')
def _pad(name, batch):
    x, pads = batch.floats(4), [[0, 0], [1, 2]]
    if name == 'Pad':
        return ops.Pad(input=x, paddings=pads)
    if name == 'PadV2':
        return ops.PadV2(input=x, paddings=pads, constant_values=2.0)
    return tf.gradients(tf.square(tf.pad(x, pads, 'REFLECT')), x)


@sample('Tile')
def _tile(name, batch):
    x = batch.floats(1)
    n = tf.shape(x)[0]
    made = ops.Tile(input=batch.whole(1, 2), multiples=tf.stack([n, 2]))
    return [ops.Tile(input=x, multiples=[1, 3]), made + x]


@sample('Fill')
def _fill(name, batch):
    x = batch.floats(2)
    return [ops.Fill(dims=tf.shape(x), value=3.0), ops.Fill(dims=[tf.size(x)], value=1.0)]


@sample('BroadcastTo')
def _broadcast_to(name, batch):
    x = batch.floats(1)
    shape = tf.stack([2, tf.shape(x)[0], 3])
    return [ops.BroadcastTo(input=x, shape=shape), ops.BroadcastTo(input=1.0, shape=shape)]


@sample('RandomStandardNormal', 'RandomUniform', 'TruncatedNormal')
def _random(name, batch):
    x = batch.floats(2)
    drawn = getattr(ops, name)(shape=tf.shape(x), dtype=tf.float32)
    return tf.zeros_like(drawn)  # Other numbers in each run.


@sample('Gather', 'GatherV2')
def _gather(name, batch):
    table, ids = batch.whole(4, 3), batch.ints(2)
    if name == 'Gather':
        return ops.Gather(params=table, indices=ids)
    x = batch.floats(4, 2)
    return [
        ops.GatherV2(params=table, indices=ids, axis=0),
        ops.GatherV2(params=x, indices=ids, axis=1, batch_dims=1),
        ops.GatherV2(params=x, indices=[0, 3, 3], axis=1),
        ops.GatherV2(params=x, indices=ids % tf.shape(x)[0], axis=0),
    ]


@sample('ResourceGather', 'ResourceGatherNd')
def _resource_gather(name, batch):
    table = tf.get_variable('table', initializer=batch.whole(4, 3), use_resource=True)
    ids = batch.ints(2)
    if name == 'ResourceGather':
        return tf.gather(table, ids)
    return ops.ResourceGatherNd(resource=table.handle, indices=ids % 3, dtype=tf.float32)


@sample('GatherNd')
def _gather_nd(name, batch):
    return ops.GatherNd(params=batch.whole(4, 4, 2), indices=batch.ints(3, 2))


@sample('OneHot')
def _one_hot(name, batch):
    ids = batch.ints(2)
    return [
        ops.OneHot(indices=ids, depth=4, on_value=1.0, off_value=0.0, axis=axis)
        for axis in (-1, 0, 1)
    ]


@sample('LookupTableFindV2')
def _lookup(name, batch):
    pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(['1', '5']), tf.constant([3, 4]))
    return tf.lookup.StaticHashTable(pairs, -1).lookup(batch.strings(2))


@sample('UnsortedSegmentSum', 'UnsortedSegmentMax', 'UnsortedSegmentMin', 'UnsortedSegmentProd')
def _segments(name, batch):
    op = getattr(ops, name)
    return [
        op(data=batch.floats(3), segment_ids=batch.ints() - 1, num_segments=4),
        op(data=batch.ints(2, 3), segment_ids=batch.ints(2), num_segments=5),
    ]


@sample('BlockLSTM', 'BlockLSTMV2', 'BlockLSTMGrad', 'BlockLSTMGradV2')
def _block_lstm(name, batch):
    x = tf.transpose(batch.floats(5, 3), [1, 0, 2])
    states, weights = [batch.floats(2), batch.floats(2)], [batch.whole(5, 8), *[batch.whole(2)] * 3]
    given = [x, *states, *weights, batch.whole(8)]
    names = ['x', 'cs_prev', 'h_prev', 'w', 'wci', 'wcf', 'wco', 'b']
    more = {} if 'V2' in name else {'forget_bias': 1.0}
    op = getattr(ops, name.replace('Grad', ''))
    found = op(seq_len_max=np.int64(5), use_peephole=True, **dict(zip(names, given)), **more)
    if 'Grad' not in name:
        return list(found)
    made = found._asdict()
    pulled = {'cs_grad': made['cs'] * 2, 'h_grad': tf.sin(made['h'])}
    return list(
        getattr(ops, name)(
            seq_len_max=np.int64(5), use_peephole=True, **dict(zip(names, given)), **made, **pulled
        )
    )


@sample('LSTMBlockCell', 'LSTMBlockCellGrad')
def _lstm_cell(name, batch):
    names = ['x', 'cs_prev', 'h_prev', 'w', 'wci', 'wcf', 'wco', 'b']
    states, peepholes = [batch.floats(2), batch.floats(2)], [batch.whole(2)] * 3
    given = dict(zip(names, [batch.floats(3), *states, batch.whole(5, 8), *peepholes]))
    given['b'] = batch.whole(8)
    found = ops.LSTMBlockCell(use_peephole=True, **given)
    if name == 'LSTMBlockCell':
        return list(found)
    pulled = {'cs_grad': found.cs * 2, 'h_grad': tf.sin(found.h)}
    made = {key: value for key, value in found._asdict().items() if key != 'h'}
    return list(ops.LSTMBlockCellGrad(use_peephole=True, **given, **made, **pulled))


@sample('GRUBlockCell', 'GRUBlockCellGrad')
def _gru_cell(name, batch):
    weights = dict(w_ru=batch.whole(5, 4), w_c=batch.whole(5, 2), b_ru=batch.whole(4))
    given = dict(x=batch.floats(3), h_prev=batch.floats(2), b_c=batch.whole(2), **weights)
    found = ops.GRUBlockCell(**given)
    if name == 'GRUBlockCell':
        return list(found)
    made = {key: value for key, value in found._asdict().items() if key != 'h'}
    return list(ops.GRUBlockCellGrad(**given, **made, d_h=tf.sin(found.h)))


@sample('CombinedNonMaxSuppression')
def _non_max_suppression(name, batch):
    boxes = batch.floats(6, 1, 4) + [0.0, 0.0, 0.5, 0.5]
    return list(tf.image.combined_non_max_suppression(boxes, batch.floats(6, 2), 3, 4))


UNREACHABLE = {'LookupTableFind': 'TensorFlow 2 has no ops that make its kind of table.'}


@sample('OnesLike', 'ZerosLike')
def _alike(name, batch):
    """In a loop, as fills take their place elsewhere."""

    def body(i, x):
        return i + 1, x + getattr(ops, name)(x=x)

    return tf.while_loop(lambda i, x: i < 2, body, [0, batch.floats(2)])


def again(sampled, *tensors):
    return sampled(Batch(tensors))


@pytest.mark.parametrize('name', sorted(set(RULES) - set(UNREACHABLE)))
def test_rule(name):
    assert name in SAMPLES, f'The rule for {name} has no sample.'
    reached = set()
    for sampled in SAMPLES[name]:
        with tf.Graph().as_default():
            batch = Batch()
            sampled(batch)
        reached |= check_rule(functools.partial(again, sampled), *batch.rows)
    assert name in reached, f'No sample reaches the rule for {name}.'


def test_types_of_ops_are_told_apart_in_rules_only():
    """Elsewhere the code names only those that it makes itself."""
    package = pathlib.Path(estimator_mgpu.__file__).parent
    named = set()
    for path in package.rglob('*.py'):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        called = [getattr(call.func, 'attr', getattr(call.func, 'id', '')) for call in calls]
        made = [call.args[0] for call, f in zip(calls, called) if f in ('add', '_add', 'node_def')]
        for node in ast.walk(tree) if 'rules' not in path.parts else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in made:
                named |= {node.value} if op_def_registry.get(node.value) else set()
    assert named - {'B'} == set(sharding._PAIRWISE.values())  # B is a unit in explain, too.


def test_no_sample_is_without_rule():
    assert set(SAMPLES) <= set(RULES)


@pytest.mark.parametrize(
    ('text', 'shapes', 'inputs', 'outputs'),
    [
        ('S+ -> S', [(5, 1), (4,)], [('S2', None), ('S1',)], [('S2', 'S1')]),
        ('nS nS -> nS', [(5, 4), (5, 4)], [('n', 'S1')] * 2, [('n', 'S1')]),
        ('n_ * -> n...', [(5, 4), (4,)], [('n', None), ()], [('n', None)]),
        ('n... n... -> * (sum)', [(5, 4), (5, 4)], [('n', None)] * 2, [(None, None)]),
        ('S_ = -> S_', [(5, 4), (4,)], [('S1', None), OWN], [('S1', None)]),
    ],
)
def test_text(text, shapes, inputs, outputs):
    with tf.Graph().as_default():
        one, two = (tf.zeros(shape) for shape in shapes)
        signature = parsed(text)((one + two).op, Sizes())
    assert (signature.inputs, signature.outputs) == (inputs, outputs)


@pytest.mark.parametrize('text', ['n__ n -> n', 'n S -> nS', 'S S -> S_'])
def test_other_ranks(text):
    with tf.Graph().as_default():
        assert parsed(text)(tf.add(tf.zeros([5, 4]), tf.zeros([4])).op, Sizes()) is None


def test_other_number_of_inputs():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match='1 words for 2 tensors'):
            parsed('S -> S')(tf.add(1.0, 2.0).op, Sizes())


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
        parsed(text)
    assert repr(text) in str(error.value) and "'mk kn -> mn (sum)'" in str(error.value)
