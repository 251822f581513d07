"""Where the rows of a tensor are, as it follows from where they are in what an op is given.

By what ops do, never by sizes: a sequence may be as long as a shard has rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.reshapes import Place, UnknownPlace, reshaped

_Rule = Callable[[tf.Operation, tf.Tensor, int, Place], 'Place | None']


# Entries stay where they are, but for broadcasting, which goes by the last dimensions.
_ELEMENTWISE = frozenset(
    ['Abs', 'Acos', 'Add', 'AddN', 'AddV2', 'Asin', 'Atan', 'Atan2', 'Cast', 'Ceil']
    + ['CheckNumerics', 'Cos', 'Cosh', 'Digamma', 'Div', 'DivNoNan', 'Elu', 'Equal', 'Erf']
    + ['Erfc', 'Exp', 'Expm1', 'Floor', 'FloorDiv', 'FloorMod', 'Greater', 'GreaterEqual']
    + ['Identity', 'IsFinite', 'IsInf', 'IsNan', 'LeakyRelu', 'Less', 'LessEqual', 'Lgamma']
    + ['Log', 'Log1p', 'LogSoftmax', 'LogicalAnd', 'LogicalNot', 'LogicalOr', 'Maximum']
    + ['Minimum', 'Mod', 'Mul', 'MulNoNan', 'Neg', 'NotEqual', 'OnesLike']
    + ['PlaceholderWithDefault', 'Pow', 'PreventGradient', 'RealDiv', 'Reciprocal', 'Relu']
    + ['Relu6', 'Rint', 'Round', 'Rsqrt', 'SelectV2', 'Selu', 'Sigmoid', 'Sign', 'Sin', 'Sinh']
    + ['Softmax', 'Softplus', 'Softsign', 'Sqrt', 'Square', 'SquaredDifference', 'StopGradient']
    + ['Sub', 'Tan', 'Tanh', 'TruncateDiv', 'Xdivy', 'Xlog1py', 'Xlogy', 'ZerosLike', 'BiasAdd']
    + ['Cumsum', 'Cumprod', 'ReverseV2', 'Roll', 'Invert', 'SnapshotGradient']
)
# Ops on images and sequences, which go over all dimensions but the first one of an input.
_BY_ROW = re.compile(
    '(DepthwiseConv|Conv|MaxPool|AvgPool)[1-3]?[dD]?(Native)?$|Conv[23]DBackpropInput|Resize|LRN$'
    '|FusedBatchNorm(V[23])?$|SpaceToDepth|DepthToSpace|ExtractImagePatches|Dilation2D$'
)
# v1 loops and branches, through which all goes as it is.
_PASSING = frozenset(['Enter', 'Exit', 'Merge', 'Switch', 'NextIteration', 'Snapshot'])


def place_in(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    """Returns where an output has rows, or None where it has none.

    Args:
      op: the op.
      output: one of its outputs.
      index: which of its inputs has rows.
      place: where that has them.

    Raises:
      UnknownPlace: if the op isn't known.
    """
    if op.type in _PASSING:
        return place if output is op.outputs[0] or op.type == 'Switch' else None
    rule = _LISTS.get(op.type)
    if rule is not None:
        return rule(op, output, index, place)
    if None in (op.inputs[index].shape.rank, output.shape.rank):
        raise UnknownPlace
    if op.type in _ELEMENTWISE:
        return place.at(place.axis - op.inputs[index].shape.rank + output.shape.rank)
    images = index == (2 if 'BackpropInput' in op.type else 0)
    if images and place.axis == 0 and _BY_ROW.match(op.type):
        return place
    if op.type not in _RULES:
        raise UnknownPlace
    return _RULES[op.type](op, output, index, place)


def _constant(tensor: tf.Tensor) -> list[int]:
    value = private.constant_value(tensor)
    if value is None:
        raise UnknownPlace
    return [int(entry) for entry in value.flat]


def reduces_sparse_rows(op: tf.Operation) -> bool:
    """Whether a reduction of a sparse tensor is over its rows, too."""
    sizes = op.inputs[2].shape.as_list()
    axes = _constant(op.inputs[3])
    return 0 in axes or sizes[0] is not None and -sizes[0] in axes


def _sparse_reduced(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return None if reduces_sparse_rows(op) else Place(0)


def _pack(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return place.at(place.axis + (op.get_attr('axis') % output.shape.rank <= place.axis))


def _unpack(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return _without(place, [op.get_attr('axis') % op.inputs[0].shape.rank])


def _without(place: Place, gone: list[int]) -> Place | None:
    if place.axis in gone:
        return None
    return place.at(place.axis - sum(other < place.axis for other in gone))


def _expand(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    [axis] = _constant(op.inputs[1])
    return place.at(place.axis + (axis % output.shape.rank <= place.axis))


def _squeeze(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    given = op.inputs[0].shape
    gone = [axis % given.rank for axis in op.get_attr('squeeze_dims')]
    return _without(place, gone or [i for i, size in enumerate(given.as_list()) if size == 1])


def _concat(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    [axis] = _constant(op.inputs[-1])
    return place._replace(outer=None) if axis % output.shape.rank == place.axis else place


def _split(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    [axis] = _constant(op.inputs[0 if op.type == 'Split' else 2])
    return place._replace(outer=None) if axis % output.shape.rank == place.axis else place


def _tile(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    times = private.constant_value(op.inputs[1])
    known = times is not None and times[place.axis] == 1
    return place if known else place._replace(outer=None)


def _slice(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return place


def _strided_slice(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    masks = {name: op.get_attr(f'{name}_mask') for name in ('ellipsis', 'new_axis', 'shrink_axis')}
    entries = op.inputs[1].shape.num_elements()
    if entries is None:
        raise UnknownPlace
    bits = range(entries)
    new = {i for i in bits if masks['new_axis'] >> i & 1}
    ellipsis = next((i for i in bits if masks['ellipsis'] >> i & 1), entries)
    named = entries - len(new) - (ellipsis < entries)
    at, to = 0, 0  # a dimension of the input, and which one of the output it is
    for i in [*bits, entries]:
        if i in (ellipsis, entries):
            rest = op.inputs[0].shape.rank - at
            whole = rest if i == entries else op.inputs[0].shape.rank - named
            if place.axis < at + whole:
                return place.at(to + place.axis - at)
            at, to = at + whole, to + whole
        elif i in new:
            to += 1
        else:
            shrinks = masks['shrink_axis'] >> i & 1
            if at == place.axis:
                return None if shrinks else place.at(to)
            at, to = at + 1, to + (not shrinks)
    raise UnknownPlace


def _gather(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    batch = op.get_attr('batch_dims')
    axis = 0
    if op.type == 'GatherV2':
        [axis] = _constant(op.inputs[2])
        axis %= op.inputs[0].shape.rank or 1
    if index == 1:
        return place.at(place.axis if place.axis < batch else axis + place.axis - batch)
    if place.axis < axis:
        return place
    more = op.inputs[1].shape.rank - batch - 1
    if place.axis == axis and place.groups:
        return None  # Rows have it if those that the indices are of do.
    if place.axis == axis:  # Some of the rows, one for each index.
        if more:
            raise UnknownPlace
        return place._replace(outer=None, inner=None)
    return place.at(place.axis + more)


def _gather_nd(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    if index == 0 and place.groups:
        return None
    if index == 0 or place.axis == op.inputs[1].shape.rank - 1:
        raise UnknownPlace
    return place


def _one_hot(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return place.at(place.axis + (op.get_attr('axis') % output.shape.rank <= place.axis))


def _arg(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    [axis] = _constant(op.inputs[1])
    return _without(place, [axis % op.inputs[0].shape.rank])


def _top(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return None if place.axis == op.inputs[0].shape.rank - 1 else place


def _transpose(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    order = _constant(op.inputs[1])
    return place.at(order.index(place.axis))


def _select(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return place  # A condition that is a vector goes by the first dimension.


def _cross_entropy(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return place if place.axis == 0 else None


def _reduce(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    axes = private.constant_value(op.inputs[1])
    if axes is None and op.inputs[1].op.type == 'BroadcastGradientArgs':
        return _unbroadcast(op, place)
    reduced = [0] if axes is None else [int(i) % op.inputs[0].shape.rank for i in axes.flat]
    if place.axis in reduced:
        return None
    return place if op.get_attr('keep_dims') else _without(place, reduced)


def _unbroadcast(op: tf.Operation, place: Place) -> Place | None:
    """For a gradient that is summed over the dimensions that a forward op's input was spread over.

    Those are the ones that the input doesn't have, or has of size 1.
    """
    axes, rank = op.inputs[1], op.inputs[0].shape.rank
    shape = axes.op.inputs[axes.value_index]
    constant = private.constant_value(shape)
    sizes = None if constant is None else [int(size) for size in constant]
    if shape.op.type == 'Shape' and shape.op.inputs[0].shape.rank is not None:
        sizes = shape.op.inputs[0].shape.as_list()
    if sizes is None or not op.get_attr('keep_dims'):
        raise UnknownPlace
    own = place.axis - rank + len(sizes)
    return None if own < 0 or sizes[own] == 1 else place


def _list(shift: int, *given: int) -> _Rule:
    """For lists of tensors, whose place is that in all of them, stacked.

    Args:
      shift: what is added to the dimension if one of `given` has the rows.
      given: numbers of inputs; what another one has stays.
    """

    def rule(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
        if index not in given:
            return place
        return None if place.axis + shift < 0 else place.at(place.axis + shift)

    return rule


def _pop(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    if output is op.outputs[0]:
        return place
    return None if place.axis == 0 else place.at(place.axis - 1)


def _nothing(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    return None


_RULES: dict[str, _Rule] = {
    'Pack': _pack,
    'Unpack': _unpack,
    'ExpandDims': _expand,
    'Squeeze': _squeeze,
    'ConcatV2': _concat,
    'Split': _split,
    'SplitV': _split,
    'Tile': _tile,
    'Pad': _slice,
    'PadV2': _slice,
    'MirrorPad': _slice,
    'Slice': _slice,
    'StridedSlice': _strided_slice,
    'GatherV2': _gather,
    'ResourceGather': _gather,
    'GatherNd': _gather_nd,
    'OneHot': _one_hot,
    'ArgMax': _arg,
    'ArgMin': _arg,
    'TopKV2': _top,
    'Transpose': _transpose,
    'Select': _select,
    'Reshape': reshaped,
    'SparseSoftmaxCrossEntropyWithLogits': _cross_entropy,
    'SoftmaxCrossEntropyWithLogits': _cross_entropy,
    **dict.fromkeys(['Sum', 'Mean', 'Max', 'Min', 'Prod', 'Any', 'All'], _reduce),
}
_LISTS: dict[str, _Rule] = {
    'TensorListFromTensor': _list(0),
    'TensorListStack': _list(0),
    'TensorListGather': _list(0),
    'TensorListResize': _list(0),
    'TensorListScatterV2': _list(0),
    'TensorListScatterIntoExistingList': _list(0),
    'TensorListSetItem': _list(1, 2),
    'TensorListPushBack': _list(1, 1),
    'TensorListGetItem': _list(-1, 0),
    'TensorListPopBack': _pop,
    'TensorListLength': _nothing,
    'TensorListElementShape': _nothing,
    'TensorArrayWriteV3': _list(1, 2),
    'TensorArrayScatterV3': _list(0),
    'TensorArrayReadV3': _list(-1, 0, 1, 2),
    'TensorArrayGatherV3': _list(0),
    'TensorArraySizeV3': _nothing,
    # What sparse reductions give has no known rank.
    'SparseReduceSum': _sparse_reduced,
    'SparseReduceMax': _sparse_reduced,
}
