"""With which power of the number of rows what they have goes, by which their sums are means or not.

Rows may be divided by how many they are before they are summed, rather than afterwards: then their
sum is a mean over rows. What goes by the number of rows otherwise, such as by its square root, or
where only a part was divided, is something else on each device than on one.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, mixing, private, scaling
from estimator_mgpu.bodies import Body, called, inside
from estimator_mgpu.places import CALLS, LOOPS, SIZES, Places, dimensions
from estimator_mgpu.rows import Rows
from estimator_mgpu.scaling import Powers
from estimator_mgpu.walks import walk

# The number of all rows, rather than of those that were chosen, or of what these consist of.
ROWS = ''
# Ops that may give fewer entries than they're given rows, or more.
_CHOOSES = re.compile(
    'Where|Unique|ListDiff|Dynamic|.*(Ragged|Sparse|Segment|SetOperation)|NonMax|String|CTC|Parse'
    '|Unicode|TensorListConcat|Tile|ConcatV2|Pad'
)
# The scopes of gradients, which start from what each tower counts.
_GRADIENTS = re.compile(r'(.*/)?(gradients(_\d+)?/.*_grad(_\d+)?/|gradient_tape/)')


class Scale(NamedTuple):
    """What something was multiplied with.

    Attributes:
      powers: with which power of which numbers it goes: of `ROWS`, or of the rows of a tensor, by
        its name. None if it's no power of these.
      by: one of them.
    """

    powers: Powers | None
    by: tf.Tensor


def scales(rows: Rows) -> Mapping[str, Scale]:
    """Returns what tensors with rows, and what they're reduced to, were multiplied with, by name.

    What isn't there was multiplied with no number of rows.
    """
    if rows not in _known:
        _known[rows] = _Finder(rows.graph, rows).found
    return _known[rows]


_known: weakref.WeakKeyDictionary[Rows, dict[str, Scale]] = weakref.WeakKeyDictionary()


def in_gradient(op: tf.Operation) -> bool:
    """Whether TensorFlow made an op for a gradient."""
    return _GRADIENTS.match(op.name) is not None


class _Finder:
    """Goes through a graph, or a function that is called in it.

    Args:
      graph: the graph.
      rows: which of its tensors have rows.
      outer: for a function, what goes through what calls it.
      arguments: for a function, what it's given, by the names of its arguments.
      loops: whether it runs once a round, maybe with one row each.
    """

    def __init__(
        self,
        graph: tf.Graph,
        rows: Places,
        outer: _Finder | None = None,
        arguments: Mapping[str, tf.Tensor] | None = None,
        loops: bool = False,
    ):
        self._rows = rows
        self._loops = loops
        given = arguments or {}
        self._given = {name: (outer, t) for name, t in given.items() if outer is not None}
        # What comes from shapes alone, and what was multiplied with that.
        self._sizes: set[str] = {
            name for name, (of, t) in self._given.items() if t.name in of._sizes
        }
        found = {name: of.found.get(t.name) for name, (of, t) in self._given.items()}
        self.found: dict[str, Scale] = {
            name: scale for name, scale in found.items() if scale is not None
        }
        self._integers: dict[str, Scale] = {}  # Those that were multiplied with numbers of rows.
        self._again = False  # Whether it's known what rounds of v1 loops hand on.
        own = [op for op in graph.get_operations() if rows.depends(op)]
        own = [op for op in own if not in_gradient(op)]
        self._look_at(own)
        if any(op.type == 'Switch' for op in own):  # Of v1's, some are made before their inputs.
            self._look_until_known(own)
            self._again = True
            self._look_until_known(own)

    def _look_until_known(self, ops: list[tf.Operation]) -> None:
        before: object = None
        known: object = ()
        while known != before:
            before = known
            self._look_at(ops)
            scales = [*self.found.items(), *self._integers.items()]
            known = set(self._sizes), {name: scale.powers for name, scale in scales}

    def _look_at(self, ops: list[tf.Operation]) -> None:
        for op in ops:
            given = self._rows.dependent_inputs(op)
            sized = bool(given) and all(t.name in self._sizes for t in given)
            if self._has_rows(op, sized):
                results = self._called(op) if op.type in CALLS else self._results(op)
                for output, scale in results:
                    self._note(self.found, output, scale)
            elif sized or op.type in SIZES:
                self._sizes.update(t.name for t in op.outputs)
            self._sizes.update(t.name for t in op.outputs if t.name in self._rows.shapes)

    def _note(self, found: dict[str, Scale], tensor: tf.Tensor, scale: Scale) -> None:
        known = found.get(tensor.name)
        # A loop that multiplies again and again comes to no end otherwise.
        changed = self._again and known is not None and known.powers != scale.powers
        found[tensor.name] = scale._replace(powers=None) if changed else scale

    def _has_rows(self, op: tf.Operation, sized: bool) -> bool:
        """Whether an op has to do with rows, or with one of them in a loop over these."""
        if op.type in SIZES:
            return False
        if any(map(self._rows.has, (*op.inputs, *op.outputs))):
            return True
        return not sized and (self._loops or private.in_loop(op))

    def _results(self, op: tf.Operation) -> Iterator[tuple[tf.Tensor, Scale]]:
        rounds = op.type == 'Merge' and op.inputs[-1].op.type == 'NextIteration'
        # What a v1 loop starts from is known before what its rounds hand on.
        inputs = op.inputs[: 1 if rounds and not self._again else None]
        parts = [self._part(t, op) for t in inputs]
        if not any(parts):
            return
        if op.type == 'IdentityN':
            yield from ((t, part) for t, part in zip(op.outputs, parts) if part is not None)
            return
        by = next(part.by for part in parts if part is not None)
        powers = [{} if part is None else part.powers for part in parts]
        known = [part for part in powers if part is not None]
        result: Powers | None = None
        if len(known) == len(powers):
            is_list = rounds and op.outputs[0].shape.rank == 0 and self._rows.has(op.outputs[0])
            result = scaling.passed_on(known) if is_list else scaling.through(op, known)
        counted = [t for t, part in zip(inputs, parts) if part and t.name not in self.found]
        counting = any(t.dtype.is_integer for t in counted)
        for output in op.outputs if result != {} else ():
            if counting and output.dtype.is_integer:
                self._note(self._integers, output, Scale(result, by))
            elif not output.dtype.is_integer:
                yield output, Scale(result, by)
            elif result is None or op.type == 'Cast':  # Not a place, say, which goes by order.
                yield output, Scale(None, by)

    def _called(self, op: tf.Operation) -> Iterator[tuple[tf.Tensor, Scale]]:
        results = []
        loops = self._loops or op.type in LOOPS
        for graph, rows in self._functions(op):
            outer = op.inputs[len(op.inputs) - len(graph.inputs) :]
            arguments = {t.name: given for t, given in zip(graph.inputs, outer)}
            found = _Finder(graph, rows, self, arguments, loops).found
            results.append([(scaling.is_nothing(t), found.get(t.name)) for t in graph.outputs])
        for i, output in enumerate(op.outputs if results else ()):
            own = [scale for nothing, scale in (of[i] for of in results) if not nothing]
            scale = next((scale for scale in own if scale is not None), None)
            if scale is None:
                continue
            if op.type in LOOPS and output.dtype != tf.variant:
                own.append(self.found.get(op.inputs[i].name))  # What each round goes on from.
            same = all(other is not None and other.powers == scale.powers for other in own)
            yield output, scale if same else Scale(None, scale.by)

    def _functions(self, op: tf.Operation) -> Iterator[tuple[tf.Graph, Places]]:
        if op.type not in LOOPS:
            yield from called(op, self._rows)
            return
        for body in inside(op, Body([op], self._rows)):
            if body.ops:  # It isn't the condition.
                yield body.ops[0].graph, body.rows

    def _part(self, tensor: tf.Tensor, op: tf.Operation) -> Scale | None:
        """Returns what an input of an op was multiplied with, or is as a number."""
        in_loop = self._loops or private.in_loop(tensor.op)
        if self._rows.has(tensor) or in_loop and tensor.name not in self._sizes:
            counting = self._integers.get(tensor.name) if op.type in scaling.COUNTING else None
            return self.found.get(tensor.name, counting)
        number = tensor.dtype.is_floating or tensor.dtype.is_complex
        number = number or tensor.dtype.is_integer and op.type in scaling.ARITHMETIC
        if tensor.name not in self._sizes or not number:
            return None
        powers = {}
        for key in self._counted(tensor):
            power = counts.same(self._growths(key).of(tensor))
            if power is None:
                return Scale(None, tensor)
            powers[key] = power
        powers = {key: power for key, power in powers.items() if power}
        return Scale(powers, tensor) if powers else None

    def _counted(self, tensor: tf.Tensor) -> set[str]:
        """Returns the keys of what a number counts."""
        found = set()
        ops = walk([tensor.op], lambda op: [t.op for t in self._sized_inputs(op)])
        for op in ops:
            found |= {self.key(t) for t in op.inputs if op.type in SIZES and self._rows.has(t)}
            found |= {ROWS for t in op.outputs if t.name in self._rows.shapes}
            for t in op.outputs:
                if t.name in self._given:
                    outer, value = self._given[t.name]
                    found |= outer._counted(value)
        return found

    def _sized_inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        return [t for t in op.inputs if t.name in self._sizes] if op.type not in SIZES else []

    def _growths(self, key: str) -> counts.Growths:
        """Returns how numbers go with those of one key, if the others stay as they are."""
        known = {
            name: outer._growths(key).of(value)
            for name, (outer, value) in self._given.items()
            if value.name in outer._sizes
        }
        return counts.Growths(self._rows, lambda tensor: self.key(tensor) == key, known)

    def key(self, tensor: tf.Tensor) -> str:
        """Returns `ROWS` for a tensor with a fixed number of entries for each row, or its name."""
        if tensor.name in self._rows.shapes:
            return ROWS
        axis = self._rows.axis(tensor)
        rank = tensor.shape.rank
        if self._rows.static and rank and axis is not None and tensor.shape.as_list()[axis]:
            return ROWS  # There are as many in each shard.
        keys = set()
        for op in walk([tensor.op], lambda op: [t.op for t in self._before(op)]):
            if self._chooses(op):
                return tensor.name
            for t in op.outputs if op.type == 'Placeholder' else ():
                if t.name in self._given:
                    outer, value = self._given[t.name]
                    keys.add(outer.key(value))
        [key] = keys if len(keys) == 1 else [tensor.name if keys else ROWS]
        return key

    def _before(self, op: tf.Operation) -> list[tf.Tensor]:
        return [t for t in op.inputs if self._rows.has(t)]

    def _chooses(self, op: tf.Operation) -> bool:
        """Whether an op may choose among its rows, rather than give as many."""
        own = [i for i, t in enumerate(op.inputs) if self._rows.has(t)]
        if not own or op.type in CALLS:
            return op.type in CALLS
        if op.type == 'GatherV2':  # Of what is looked up, or by indices that rows have.
            given, _, axes = op.inputs
            return 0 in own and self._rows.axis(given) in dimensions(axes, given)
        if op.type == 'StridedSlice':
            return self._rows.axis(op.inputs[0]) != 0 or mixing.cuts(op, self._rows)
        return op.type in ('Slice', 'GatherNd') or _CHOOSES.match(op.type) is not None
