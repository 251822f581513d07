"""What ops do to powers of numbers that something was multiplied with."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, private
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.mixing import COMPARES
from estimator_mgpu.places import SIZES
from estimator_mgpu.products import is_product
from estimator_mgpu.rows import ELEMENTWISE

# By the number of what.
Powers = dict[str, float]

_FACTORS = {**counts.FACTORS, 'L2Loss': 2.0}
_PRODUCTS = re.compile('Mul(NoNan)?$|(Depthwise)?Conv[23]D|(Sparse)?MatMul|BatchMatMul|Einsum')
# Through which numbers go that were multiplied with something as if they weren't.
_PASSING = re.compile(
    'Identity|Neg$|(Complex)?Abs$|Real$|Imag$|Conj$|(Leaky)?Relu$|Cast|Reshape|Squeeze|ExpandDims'
    '|Transpose|StopGradient|PreventGradient|CheckNumerics|Snapshot|PlaceholderWithDefault'
    '|Fill$|BroadcastTo|Tile$|(Mirror)?Pad(V2)?$|(Strided)?Slice$|Gather|Unpack|Split|TopK|Reverse'
    '|Roll$|RandomShuffle|Cumsum|Sum$|Mean$|Max$|Min$|(Max|Avg)Pool|Resize|(Batch|Space|Depth)To'
    '|Diag|Matrix(Set)?Diag|MatrixBandPart|.*Segment(Sum|Mean|SqrtN|Max|Min)|ScatterNd$'
    '|SparseReduce|SparseToDense|Ragged|Enter|Exit|Switch|NextIteration|TensorList|TensorArray'
)
_JOINING = frozenset(
    ['Add', 'AddV2', 'AddN', 'Sub', 'BiasAdd', 'Maximum', 'Minimum', 'Select', 'SelectV2', 'Pack']
    + ['ConcatV2', 'Merge', 'TensorScatterAdd', 'TensorScatterSub', 'TensorScatterUpdate']
)
# Through which integers are numbers, rather than places: those of rows, and others.
COUNTING = ELEMENTWISE | {'FloorDiv', 'TruncateDiv', 'Sum', 'Mean', 'Max', 'Min'}
ARITHMETIC = frozenset(
    ['Add', 'AddV2', 'Sub', 'Mul', 'Maximum', 'Minimum', 'RealDiv', 'FloorDiv', 'TruncateDiv']
)
# What goes by signs or by order, and by shapes.
_ALIKE = SIZES | {'Sign', 'ArgMax', 'ArgMin', 'ZerosLike', 'OnesLike'}


def through(op: tf.Operation, powers: list[Powers]) -> Powers | None:
    """Returns the powers of what an op gives, by those of each input; None if there are none."""
    if op.type in _ALIKE:
        return {}
    if _PRODUCTS.match(op.type) or any(is_product(op, t) for t in op.inputs):
        return _product(*powers)
    if op.type in QUOTIENTS:
        return _product(powers[0], _to(powers[1], -1.0))
    if op.type in _FACTORS:
        return _to(powers[0], _FACTORS[op.type])
    # What is to be divided by is at least 1, so that nobody divides by 0.
    divides = op.type == 'Maximum' and any(power > 0 for of in powers for power in of.values())
    given = [(t, p) for t, p in zip(op.inputs, powers) if not t.dtype.is_bool]
    own = [p for t, p in given if not is_nothing(t, 1 if divides else counts.EPSILON)]
    alike = all(p == own[0] for p in own)
    if op.type in COMPARES:
        return {} if alike else None
    if op.type == 'SquaredDifference':
        return _to(own[0], 2.0) if alike else None
    if _PASSING.match(op.type):
        return passed_on(powers)
    return own[0] if op.type in _JOINING and own and alike else None


def passed_on(powers: list[Powers]) -> Powers | None:
    """Returns the powers of what was multiplied, if it was in the same way."""
    some = [p for p in powers if p]
    return some[0] if all(p == some[0] for p in some) else None


def _product(*powers: Powers) -> Powers:
    keys = [key for of in powers for key in of]
    total = {key: sum(of.get(key, 0.0) for of in powers) for key in keys}
    return {key: power for key, power in total.items() if power}


def _to(powers: Powers, factor: float) -> Powers:
    return {key: power * factor for key, power in powers.items()}


def is_nothing(tensor: tf.Tensor, largest: float = counts.EPSILON) -> bool:
    """Whether a tensor is 0, or so small a constant that it's there to guard something."""
    if tensor.op.type == 'ZerosLike':
        return True
    if tensor.op.type == 'Fill':
        tensor = tensor.op.inputs[1]
    number = tensor.dtype.is_floating or tensor.dtype.is_integer
    value = private.constant_value(tensor) if number else None
    return value is not None and value.size > 0 and bool((abs(value) <= largest).all())
