"""How a loss comes about from the rows of a batch: as a mean, as a sum, or from several of these.

Only the graph knows. Walking back from the loss, there is a *tail* of ops on values that no
longer have rows (additions of L2 losses, quotients, square roots, ...), and at its end are the
*leaves*, where rows are reduced: a `Sum` or a `Mean`. On several towers, a leaf's value for the
whole batch is the towers' sum, or their mean weighted by rows; the tail, computed on these values,
then gives what one device would get: for masked means, `sum / batch_size` and L2 losses alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import calls, divisors, powers, private, shard_values
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.places import BATCH_NORMS, CALLS
from estimator_mgpu.rows import LINEAR, Rows
from estimator_mgpu.walks import walk

MEAN, SUM, SHAPE, UNITS, AUTO = 'mean', 'sum', 'shape', 'units', 'auto'
# The constants of tf.losses.Reduction and tf.keras.losses.Reduction, meaning what they did for
# tf.contrib.estimator.replicate_model_fn: a sum sums, all others average.
_CONSTANTS = {
    'auto': AUTO,
    'mean': MEAN,
    'sum': SUM,
    'weighted_sum': SUM,
    'weighted_mean': MEAN,
    'weighted_sum_over_batch_size': MEAN,
    'weighted_sum_by_nonzero_weights': MEAN,
    'sum_over_batch_size': MEAN,
}
_ADVICE = (
    "Say which it is by replicate(loss_reduction='mean') or replicate(loss_reduction='sum'). If it "
    'is neither, as rows are compared with one another, say, several devices cannot give what one '
    'does: train with replicate(devices=1).'
)

# Ops whose results for several shards make no mean or sum.
_NEITHER = frozenset(
    ['Max', 'Min', 'Prod', 'ArgMax', 'ArgMin', 'All', 'Any', 'TopKV2', 'Softmax', 'LogSoftmax']
    + ['Cumsum', 'Cumprod', 'NthElement', 'Roll', 'ReverseV2', 'MatrixInverse', 'Cholesky', 'Svd']
    + ['SparseReduceMax']
)
# Ops that hand their first input on, after a look at it.
_HANDING_ON = frozenset(['CheckNumerics', 'CheckNumericsV2', 'Print'])


class Leaf(NamedTuple):
    """Where rows are reduced.

    Attributes:
      tensor: the reduced value, of one shard.
      kind: 'mean', 'sum' or 'units'; or 'shape', for a shape of which the size along `axis` is a
        sum.
      counted: whether a mean goes by the number of entries it's over, which only a step tells,
        rather than by rows.
      axis: along which dimension the rows are in what a shape is of.
      bounds: whether that's where rows begin and end, one more than there are rows.
      per: for a sum of what was divided by the number of its own rows, the tensor of which these
        are, along `axis`.
    """

    tensor: tf.Tensor
    kind: str
    counted: bool = False
    axis: int | None = None
    bounds: bool = False
    per: tf.Tensor | None = None


class Parts(NamedTuple):
    """What a loss consists of.

    Attributes:
      leaves: where rows are reduced; none if the loss doesn't depend on the batch.
      tail: the names of the ops between the leaves and the loss.
      doubts: one sentence for each thing that the graph doesn't tell, or that isn't quite so.
      lost: whether it's taken for a mean for want of anything better.
      notes: one sentence for each thing that the graph tells, but not for certain.
      mixed: the doubts that are about rows combined with values of their shard, each after the
        name of the value.
      by_count: whether one of these is how many rows the shard has.
      neither: the op, if there is one, for which it's neither a mean nor a sum.
    """

    leaves: list[Leaf]
    tail: set[str]
    doubts: list[str]
    lost: bool = False
    notes: Sequence[str] = ()
    mixed: Sequence[tuple[str, str]] = ()
    by_count: bool = False
    neither: str = ''


def check_reduction(reduction: str) -> str:
    """Returns 'auto', 'mean' or 'sum' for what the user gave as `loss_reduction`.

    >>> check_reduction(tf.losses.Reduction.SUM_OVER_BATCH_SIZE)
    'mean'

    Raises:
      ValueError: if it's none of the legal values.
    """
    key = getattr(reduction, 'value', reduction)
    if key not in _CONSTANTS:
        raise ValueError(
            f"loss_reduction={reduction!r} is not known. Legal are 'auto' (the default: found out "
            "from the loss), 'mean' and 'sum', and the constants of tf.losses.Reduction but NONE, "
            'which leaves a loss per row; reduce it first, say by tf.reduce_mean().'
        )
    return _CONSTANTS[key]


def take_apart(
    loss: tf.Tensor,
    rows: Rows,
    reduction: str,
    towers: int,
) -> Parts:
    """Finds the leaves of a loss.

    Args:
      loss: float tensor of tower 0. One with rows of its own counts as their sum, as in
        `tf.gradients`.
      rows: which tensors depend on the shard, and which have rows.
      reduction: 'auto', 'mean', 'sum' or, for a mean over units other than rows, 'units'.
      towers: how many shards there are.

    Returns:
      `Parts`.
    """
    if loss.op.name not in rows.dependents:
        return Parts([], set(), [])
    if reduction in (MEAN, UNITS):
        return Parts([Leaf(loss, reduction)], set(), [])
    walk = _Walk(rows, towers)
    walk.from_loss(loss, walk.through_linear if reduction == SUM else walk.through_any)
    if walk.lost:
        walk.leaves, walk.tail, walk.notes = [Leaf(loss, MEAN)], set(), []
    doubts = [*walk.doubts, *(sentence for _, sentence in walk.mixed)]
    told = walk.notes, walk.mixed, walk.by_count, walk.neither
    return Parts(walk.leaves, walk.tail, doubts, walk.lost, *told)


class _Walk:
    def __init__(self, rows: Rows, towers: int):
        self._rows = rows
        self._towers = towers
        self.leaves: list[Leaf] = []
        self.tail: set[str] = set()
        self.doubts: list[str] = []
        self.notes: list[str] = []
        self.mixed: list[tuple[str, str]] = []
        self._per: dict[str, tf.Tensor] = {}
        self.lost = False
        self.neither = ''
        self.by_count = False

    def from_loss(
        self, loss: tf.Tensor, through: Callable[[tf.Tensor], list[tf.Tensor] | str]
    ) -> None:
        """Walks back, `through` saying of each tensor what to go on with, or which leaf it is."""
        waiting = [loss]
        seen = set()
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            found = through(tensor)
            if isinstance(found, str):
                counted = found == MEAN and tensor.op.type == 'Mean'
                # Integers lack what is cut off, and so don't tell the batch's.
                counted = counted and (
                    tensor.dtype.is_integer or not tensor.op.inputs[0].shape.is_fully_defined()
                )
                axis = self._rows.axis_in(tensor) if found == SHAPE else None
                bounds = found == SHAPE and self._rows.are_bounds(tensor.op.inputs[0])
                per = self._per.get(tensor.name)
                axis = axis if per is None else self._rows.axis(per)
                self.leaves.append(Leaf(tensor, found, counted, axis, bounds, per))
            else:
                self.tail.add(tensor.op.name)
                waiting += found

    def through_linear(self, tensor: tf.Tensor) -> list[tf.Tensor] | str:
        """For a loss that is known to be a sum: only what leaves it one is its tail."""
        op = tensor.op
        inputs = self._rows.dependent_inputs(op)
        scaled = op.type in ('Mul', *QUOTIENTS) and len(inputs) == 1
        scaled = scaled and (op.type == 'Mul' or inputs[0] is op.inputs[0])
        summed = op.type == 'Sum' and op.inputs[0].op.type == 'Pack'
        if not (op.type in LINEAR or scaled or summed) or any(map(self._rows.has, inputs)):
            return SUM
        return inputs

    def through_any(self, tensor: tf.Tensor) -> list[tf.Tensor] | str:
        """For a loss of which nothing is known."""
        op = tensor.op
        if self._rows.has(tensor):
            self._check_groups(tensor, [tensor], SUM)
            return self._scaled(tensor, SUM)  # tf.gradients takes a loss with rows for their sum.
        inputs = self._rows.dependent_inputs(op)
        if op.type in ('Size', 'Shape') and self._rows.are_groups(op.inputs[0]):
            self._doubt(tensor, 'it counts what differs among the rows of a shard')
        if op.type == 'Size' and self._rows.has(op.inputs[0]):
            return SUM
        if self._rows.sums(op) or (op.type == 'Mean' and self._rows.has(op.inputs[0])):
            return self._reduction(op)
        if op.type in ('Sum', 'Mean'):
            self._check_inner(op)
        if tensor.name in self._rows.shapes:
            return SHAPE
        if op.type in BATCH_NORMS:
            if tensor.value_index > 1:
                self._doubt(tensor, 'it is a variance of the rows of a shard, taken for a mean')
            return MEAN
        if op.type == 'Shape':
            if not self._rows.has(op.inputs[0]) and not op.inputs[0].shape.is_fully_defined():
                self._doubt(tensor, f'{op.inputs[0].name!r} may or may not have rows')
            return SHAPE if self._rows.has(op.inputs[0]) else MEAN
        if op.type in ('Mul', *QUOTIENTS) and self._is_mean(op):
            if op.type == 'Mul' or op.inputs[1].shape.rank != 0:
                return MEAN
            # The size of the batch is that of its shards, added up.
            self.leaves.append(Leaf(op.inputs[1], SUM))
        if op.type in _HANDING_ON:
            return [t for t in inputs if t is op.inputs[0]]
        if op.type in CALLS or op.type == 'Merge' and not private.in_loop(op):
            kind = calls.kind(tensor, self._rows, self._take_apart)
            if kind:
                return kind
        opaque = any(t.dtype in (tf.variant, tf.resource) for t in inputs)
        opaque = opaque or private.in_control_flow(op) or op.type in ('Exit', 'Merge')
        if not inputs or opaque or op.op_def.is_stateful or any(map(self._rows.has, inputs)):
            # Other leaves of a quotient, say, are then not to be added up by themselves.
            self.lost = True
            culprit = f'{op.name!r} ({op.type})'
            averaged = "The towers' losses are averaged, weighted by their rows"
            if op.type in _NEITHER:
                self.neither = culprit
                self.doubts.append(
                    f'{tensor.name!r} is neither a mean nor a sum over rows: it goes back to '
                    f'{culprit}. {averaged}, which is not what one device gives: train with '
                    'replicate(devices=1).'
                )
            else:
                guard = (
                    '. If it guards a mean against having nothing to average, write '
                    'tf.math.divide_no_nan(total, n) instead'
                )
                branch = op.type in ('If', 'StatelessIf', 'Merge')
                why = f'it goes back to {culprit}. {averaged}{guard if branch else ""}'
                self._doubt(tensor, why)
            return MEAN
        return inputs

    def _take_apart(self, tensor: tf.Tensor, rows: Rows) -> Parts:
        return take_apart(tensor, rows, AUTO, self._towers)

    def _reduction(self, op: tf.Operation) -> str:
        kind = MEAN if op.type == 'Mean' else SUM
        self._check_groups(op.outputs[0], op.inputs, kind)
        given = [t for t in op.inputs if self._rows.has(t)]
        other = shard_values.joined_with(given, self._rows)
        if other is not None:
            why = (
                f'its rows were put together with {other.name!r}, which each device adds to its own'
            )
            self._doubt(op.outputs[0], why)
        divided, mixed, verdicts = shard_values.near_reduction(given, self._rows)
        if kind == SUM:
            for verdict in verdicts:
                self._tell(op.outputs[0], verdict)
            kind = MEAN if divided else SUM
        if mixed is not None:
            self._mix(op.outputs[0], mixed, kind)
        return self._scaled(op.outputs[0], kind)

    def _scaled(self, tensor: tf.Tensor, kind: str) -> str:
        """Returns what something is if its rows were divided by how many they are beforehand."""
        scale = powers.scales(self._rows).get(tensor.name)
        if scale is None:
            return kind
        if kind == SUM and scale.powers is not None and list(scale.powers.values()) == [-1.0]:
            [key] = scale.powers
            if key == powers.ROWS:
                return MEAN
            if not self._rows.has(tensor) and scale.by.graph is tensor.graph:
                self._per[tensor.name] = tensor.graph.get_tensor_by_name(key)
                return MEAN
        self.by_count = True
        self._mix(tensor, scale.by, kind)
        return kind

    def _mix(self, tensor: tf.Tensor, mixed: tf.Tensor, kind: str) -> None:
        doubt = (
            f'{tensor.name!r} is not quite the {kind} over the batch that it is taken for: its '
            f'rows are combined with {mixed.name!r}, which is a value of all rows of a shard, and '
            'each device has its own. Combine them in the input_fn, or train this model with '
            'replicate(devices=1).'
        )
        self.mixed.append((mixed.name, doubt))

    def _check_groups(self, tensor: tf.Tensor, given: Sequence[tf.Tensor], kind: str) -> None:
        """Doubts what reduces entries that aren't of a row each, but of those of one id, say."""
        groups = [t for t in given if self._rows.are_groups(t)]
        if groups and not (kind == SUM and all(map(self._rows.adds_up, groups))):
            self._doubt(
                tensor,
                f'{groups[0].name!r} has an entry for each group of rows, as of those of one id, '
                'or for each different id of a shard, and several shards may have the same one',
            )

    def _check_inner(self, op: tf.Operation) -> None:
        """Doubts that what a reduction is given has no rows, if its size might be theirs."""
        given = op.inputs[0]
        if not given.shape.rank or not self._rows.may_have(given):
            return
        for inner in self._rows.reductions(given):
            if any(map(self._rows.is_plain, inner.inputs)):
                continue
            if inner.outputs[0].shape.rank and not self._is_linear(op, inner):
                self._doubt(
                    op.outputs[0],
                    f'its rows may be reduced by the {inner.type} {inner.name!r} or, if they are '
                    f'not along dimension 0, by the {op.type} {op.name!r}. It is taken for the '
                    'former',
                )

    def _is_linear(self, op: tf.Operation, inner: tf.Operation) -> bool:
        """Whether it makes no difference which one of two reductions is that over rows."""

        def onward(other: tf.Operation) -> list[tf.Operation]:
            return [] if other is inner else [t.op for t in self._rows.dependent_inputs(other)]

        between = walk([t.op for t in self._rows.dependent_inputs(op)], onward)
        return inner.type == op.type and all(o is inner or o.type in LINEAR for o in between)

    def _is_mean(self, op: tf.Operation) -> bool:
        """Whether a quotient of a sum is a mean over the rows of the shard."""
        verdict = divisors.judge(op, self._rows, self._towers)
        self._tell(op.outputs[0], verdict)
        return verdict.is_mean

    def _tell(self, tensor: tf.Tensor, verdict: divisors.Verdict) -> None:
        if verdict.note:
            self.notes.append(verdict.note)
        if verdict.doubt:
            self._doubt(tensor, verdict.doubt)

    def _doubt(self, tensor: tf.Tensor, why: str) -> None:
        self.doubts.append(
            f'Whether {tensor.name!r} is a mean or a sum over rows cannot be told: {why}. {_ADVICE}'
        )
