"""How rows spread from a shard's tensors to others, along the ops of a graph and its functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import groups, private, ragged
from estimator_mgpu.axes import place_in, reduces_sparse_rows
from estimator_mgpu.products import is_product, product_axis
from estimator_mgpu.reshapes import Place, UnknownPlace
from estimator_mgpu.walks import walk

# What functions make up: v2 loops, branches and calls.
LOOPS = frozenset(['While', 'StatelessWhile'])
CALLS = LOOPS | frozenset(
    ['If', 'StatelessIf', 'Case', 'StatelessCase', 'PartitionedCall', 'StatefulPartitionedCall']
)
# Sums of what goes to one place; the third input says how many places there are.
SEGMENT_SUMS = frozenset(['UnsortedSegmentSum', 'ScatterNd'])
_COUNTS = frozenset(['Bincount', 'DenseBincount'])
# Ops that make a tensor of a shape that is their first, or their second, input.
_MAKES = re.compile(
    r'(Fill|Random(?:StandardNormal|Uniform|UniformInt)|TruncatedNormal|Stateless(?:Random|Trunc).*)'
    r'|(BroadcastTo|StatefulStandardNormalV2|StatefulUniform)'
)
# What only tells of sizes.
SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])
# Lists of tensors: which input says how many they hold, and which output they are.
_SIZED = {'TensorArrayV3': (0, 1), 'TensorListReserve': (1, 0)}
# Their outputs but the first are statistics of the batch.
BATCH_NORMS = frozenset(['FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3'])
# v1 loops and branches, and what a TensorArray's `flow` goes through in them.
ARRAYS = frozenset(['TensorArrayWriteV3', 'TensorArrayScatterV3', 'TensorArraySplitV3'])
FLOW = ARRAYS | frozenset(['Enter', 'Exit', 'Merge', 'Switch', 'NextIteration'])


class Places:
    """Which tensors of a graph have rows, and where.

    Args:
      given: where those have rows that it's known of.
      dependents: the names of the ops that depend on these; None for the ops of a function, all of
        which may.
      static: the rows of a shard where that's known.
      bounds: the names of the tensors that say where rows begin and end, in ragged ones.
      indices: the names of those that say which rows have something, in sparse ones; in a function,
        of all its integers that number rows or don't depend on them.
      shapes: the names of the shapes of sparse ones.
    """

    def __init__(
        self,
        given: Sequence[tuple[tf.Tensor, Place]],
        dependents: set[str] | None,
        static: int | None,
        bounds: Collection[str] = (),
        indices: Collection[str] = (),
        shapes: Collection[str] = (),
    ):
        self.dependents = set() if dependents is None else dependents
        self._all = dependents is None
        self.static = static
        self._bounds = set(bounds)
        self.indices = indices
        self.shapes = shapes
        self._places = {tensor.name: place for tensor, place in given}
        self._calls: dict[str, tf.Operation] = {}
        self._unknown: list[tuple[tf.Operation, tf.Tensor, tf.Tensor]] = []
        self._spread(given[0][0].graph if given else tf.get_default_graph(), [t for t, _ in given])

    def has(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has an entry, or several, for each row."""
        return tensor.name in self._places

    def axis(self, tensor: tf.Tensor) -> int | None:
        """Which dimension holds the rows, if any does."""
        place = self._places.get(tensor.name)
        return None if place is None else place.axis

    def depends(self, op: tf.Operation) -> bool:
        """Whether an op depends on the shard."""
        return self._all or op.name in self.dependents

    def dependent_inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        """Lists the inputs of an op that depend on the shard."""
        return [t for t in op.inputs if self.depends(t.op)]

    def are_bounds(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor says where rows begin and end: one entry more than there are rows."""
        while tensor.op.type == 'Identity':
            tensor = tensor.op.inputs[0]
        return tensor.name in self._bounds

    def _spread(self, graph: tf.Graph, waiting: list[tf.Tensor]) -> None:
        """Finds which tensors have rows; where sizes have to tell, after all that ops tell."""
        ops = graph.get_operations()
        arrays = [op for op in ops if op.type in _SIZED]
        makes = ((op, _MAKES.match(op.type)) for op in ops if self.depends(op))
        made = [(op, op.inputs[0 if by[1] else 1]) for op, by in makes if by]
        while waiting:
            while waiting:
                while waiting:
                    tensor = waiting.pop()
                    for op in tensor.consumers():
                        if self._all or op.name in self.dependents or op.type in FLOW:
                            waiting += self._follow(op, tensor)
                waiting = self._through_calls()
            waiting = self._arrays_of_rows(arrays) + self._made_for_rows(made)
            waiting = waiting or self._by_sizes()

    def functions(self, op: tf.Operation) -> Iterator[tuple[tf.Graph, list[Place | None]]]:
        """Yields the functions that a loop, branch or call is made of, where they can be told.

        With each comes where what it's given has rows: in a loop, after any number of rounds.
        """
        given = [self._places.get(t.name) for t in op.inputs]
        for graph in private.function_graphs(op) if op.type in CALLS else ():
            own = given[len(given) - len(graph.inputs) :]
            while op.type in LOOPS:
                results = self._in_function(op, graph, own)
                again = [a or b for a, b in zip(own, results)]
                if again == own:
                    break
                own = again
            yield graph, own

    def _in_function(
        self, op: tf.Operation, graph: tf.Graph, given: Sequence[Place | None]
    ) -> list[Place | None]:
        """Returns where the results of a function that an op calls have rows."""
        places = [(t, place) for t, place in zip(graph.inputs, given) if place is not None]
        inner = Places(places, None, self.static, indices=self.numbers(op, graph))
        return [inner._places.get(t.name) for t in graph.outputs]

    def _follow(self, op: tf.Operation, given: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs of an op that have rows because one of its inputs has."""
        if op.type in SIZES:
            return []
        if op.type in CALLS:
            self._calls[op.name] = op
            return []
        found = []
        for output in op.outputs:
            known = self._places.get(output.name)
            if known is None or self.are_groups(given) and not known.groups:
                try:
                    place = self._place_of(op, output, _place(op, given))
                except UnknownPlace:
                    self._unknown.append((op, output, given))
                    continue
                if place is not None and (known is None or place.groups):
                    self._places[output.name] = known._replace(groups=True) if known else place
                    found.append(output)
        return found

    def _place_of(self, op: tf.Operation, output: tf.Tensor, index: int) -> Place | None:
        """Returns where an output has rows, by what the op does with one of its inputs."""
        given = op.inputs[index]
        scalar = output.dtype in (tf.variant, tf.resource) or op.type in FLOW
        if output.shape.num_elements() == 1 and not (scalar and output.shape.rank == 0):
            return None
        place = self._places[given.name]
        if op.type in BATCH_NORMS and output is not op.outputs[0]:
            return None
        if groups.of_what_differs(op, place.axis):
            return place if groups.is_which(output) else Place(0, None, None, groups=True)
        if op.type in _COUNTS and self._is_as_long_as_rows(op.inputs[1]):
            return Place(0)
        passed = op.type in ('Identity', 'Cast') and self.are_bounds(given)
        if passed or ragged.is_bounds(output):
            self._bounds.add(output.name)
            return Place(0)
        if op.type in ragged.MAKES_SPARSE:
            return None if ragged.is_shape(output) else Place(0)
        if is_product(op, given):
            axis = product_axis(op, index, place.axis)
            return None if axis is None else place.at(axis)
        if self._is_summed(op, given):
            return None
        ids = groups.ids(op)
        if ids is not None:
            if index == 0 and ids.shape.rank is not None and place.axis >= ids.shape.rank:
                return place.at(place.axis - ids.shape.rank + 1)  # Not what is put into segments.
            size = output.shape.as_list()[0] if output.shape.rank else None
            alike = self._are_ids_of_groups(ids)
            return Place(0, None, None, groups=alike) if self._may_hold(size) else None
        found = place_in(op, output, index, place)
        if found is None or output.shape.rank in (0, None):
            return found
        return found if self._may_hold(output.shape.as_list()[found.axis]) else None

    def _by_sizes(self) -> list[tf.Tensor]:
        """Takes for rows what has a dimension that may hold them, where no op tells."""
        found = []
        for op, output, given in self._unknown:
            if output.name not in self._places:
                # What is as the output tells more, if there's such an input.
                alike = [t for t in op.inputs if self.has(t) and t.shape.rank == output.shape.rank]
                given = next(iter(alike), given)
                place = self._guess(op, output, self._places[given.name])
                if place is not None:
                    self._places[output.name] = place
                    found.append(output)
        self._unknown.clear()
        return found

    def _guess(self, op: tf.Operation, output: tf.Tensor, given: Place) -> Place | None:
        if output.dtype in (tf.variant, tf.resource) or output.shape.rank is None:
            # Lists of rows, say; what's in them isn't known.
            return given._replace(axis=0, outer=None, inner=None, plain=False)
        sizes = output.shape.as_list()
        holding = [i for i, size in enumerate(sizes) if self._may_hold(size)]
        if not holding:
            return None
        axis = given.axis if given.axis in holding else holding[0]
        # What ops do to rows mostly leaves them along the first dimension.
        plain = given.plain and axis == given.axis == 0 and op.type not in CALLS
        return given._replace(axis=axis, outer=None, inner=None, plain=plain)

    def _through_calls(self) -> list[tf.Tensor]:
        """Goes through the functions that loops, branches and calls are made of."""
        found = []
        for op in self._calls.values():
            places = self._results(op)
            given = next(t for t in op.inputs if self.has(t))
            for i, output in enumerate(op.outputs):
                handle = output.dtype in (tf.variant, tf.resource)
                if output.name in self._places or not handle and output.shape.num_elements() == 1:
                    continue
                if places is None and op.type in LOOPS:  # From round to round it's the same.
                    place = self._places.get(op.inputs[i].name)
                else:
                    place = None if places is None else places[i]
                if place is not None:
                    self._places[output.name] = place
                    found.append(output)
                elif places is None or handle:
                    self._unknown.append((op, output, given))
        self._calls.clear()
        return found

    def _results(self, op: tf.Operation) -> list[Place | None] | None:
        """Returns where the outputs of a loop, branch or call have rows, if that can be told."""
        found = None
        for graph, own in self.functions(op):
            results = own if op.type in LOOPS else self._in_function(op, graph, own)
            found = [a or b for a, b in zip(found or results, results)]
        return found

    def _arrays_of_rows(self, ops: Iterable[tf.Operation]) -> list[tf.Tensor]:
        """Finds TensorArrays that are made for one entry a row, whatever is written to them."""
        new = []
        for op in ops:
            size, output = _SIZED[op.type]
            if op.outputs[output].name not in self._places and self.is_row_count(op.inputs[size]):
                new.append(op.outputs[output])
        self._places.update((tensor.name, Place(0)) for tensor in new)
        return new

    def _made_for_rows(self, made: Iterable[tuple[tf.Operation, tf.Tensor]]) -> list[tf.Tensor]:
        """Finds tensors made with an entry a row, such as noise, that depend on it by size only."""
        found = []
        for op, shape in made:
            if op.outputs[0].name not in self._places:
                axis = self._axis_of_shape(shape.op)
                if axis is not None:
                    self._places[op.outputs[0].name] = Place(axis)
                    found.append(op.outputs[0])
        return found

    def _axis_of_shape(self, shape: tf.Operation) -> int | None:
        """Which entry of a shape is the number of rows."""
        if shape.type == 'Shape':
            return self.axis(shape.inputs[0])
        if shape.type != 'Pack':
            return None
        return next((i for i, size in enumerate(shape.inputs) if self.is_row_count(size)), None)

    def axis_in(self, shape: tf.Tensor) -> int | None:
        """Which entry of the shape of a tensor, dense or sparse, is the number of rows."""
        return 0 if shape.name in self.shapes else self.axis(shape.op.inputs[0])

    def is_row_count(self, size: tf.Tensor) -> bool:
        """Whether a scalar is the number of rows, taken from a shape or known statically."""
        while size.op.type in ('Identity', 'Cast'):
            size = size.op.inputs[0]
        op = size.op
        shape = op.inputs[0] if op.type in ('StridedSlice', 'Unpack') else size
        while shape.op.type in ('Identity', 'Cast'):
            shape = shape.op.inputs[0]
        if shape is size or not (shape.op.type == 'Shape' or shape.name in self.shapes):
            value = private.constant_value(size)
            return self.static is not None and value is not None and int(value) == self.static
        if shape.op.type == 'Shape' and self.are_groups(shape.op.inputs[0]):
            return False
        axis = self.axis_in(shape)
        if op.type == 'Unpack':
            return axis == size.value_index
        index = private.constant_value(op.inputs[1])
        return axis is not None and index is not None and index.tolist() == [axis]

    def numbers(self, op: tf.Operation, graph: tf.Graph) -> set[str]:
        """Returns the names of the inputs of a function that number rows, or don't depend on them.

        Args:
          op: what calls the function.
          graph: the function.
        """
        outer = op.inputs[len(op.inputs) - len(graph.inputs) :]
        pairs = zip(graph.inputs, outer)
        integers = [(t, given) for t, given in pairs if given.dtype.is_integer]
        return {t.name for t, given in integers if not self._are_ids_of_groups(given)}

    def _are_ids_of_groups(self, ids: tf.Tensor) -> bool:
        """Whether ids say which rows are alike, rather than which row something is of."""
        told = {*self.indices, *self._bounds}

        def onward(tensor: tf.Tensor) -> list[tf.Tensor]:
            given = [t for t in groups.passed_on(tensor) if self.depends(t.op)]
            # Pairs of rows, say, are taken by their place.
            paired = tensor.op.type == 'FloorDiv' and given and given[0].op.type == 'Range'
            return [] if paired and self.is_row_count(given[0].op.inputs[1]) else given

        number = (t.name in told or groups.numbers_rows(t) for t in walk([ids], onward))
        return self.depends(ids.op) and not any(number)

    def are_groups(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has an entry for rows that are alike, rather than for each row."""
        return self.has(tensor) and self._places[tensor.name].groups

    def puts_elsewhere(self, op: tf.Operation) -> bool:
        """Whether rows that lie in a way that's not known are given another dimension."""
        before, after = (self._places.get(t.name) for t in (op.inputs[0], op.outputs[0]))
        if before is None or after is None or before.axis == after.axis:
            return False
        unknown = before.outer is None and before.inner is None
        return before.plain and unknown and not after.plain

    def _is_as_long_as_rows(self, size: tf.Tensor) -> bool:
        """Whether something is counted for each row, as the entries of rows of ragged tensors."""
        if size.op.type == 'Minimum':  # Of `tf.math.bincount`, which is told both limits.
            size, least = size.op.inputs
            if not any(map(self.is_row_count, least.op.inputs)):
                return False
        return self.depends(size.op) and self.is_row_count(size)

    def _is_summed(self, op: tf.Operation, given: tf.Tensor) -> bool:
        """Whether a product of matrices, or a sum of segments, sums over an input's rows."""
        if is_product(op, given):
            return product_axis(op, _place(op, given), self._places[given.name].axis) is None
        if op.type == 'SparseReduceSum':
            return reduces_sparse_rows(op)
        if op.type == 'SparseTensorDenseMatMul':
            return bool(op.get_attr('adjoint_a'))
        first = self.axis(given) == 0
        if op.type in _COUNTS and first and op.inputs[0].shape.rank == 1:
            return True
        if op.type in SEGMENT_SUMS and first:
            size = op.outputs[0].shape.as_list()[0] if op.outputs[0].shape.rank else None
            # A number that somebody wrote, or the static size of a shard, which is the same.
            literal = is_literal(op.inputs[2])
            holds = size == self.static if literal else size is not None and self._may_hold(size)
            return not self.depends(op.inputs[2].op) and not holds
        return False

    def _may_hold(self, size: int | None) -> bool:
        if size is None:
            return True
        return self.static is not None and size % self.static == 0


def dimensions(axes: tf.Tensor, given: tf.Tensor) -> set[int]:
    """Which dimensions of what an op is given its input `axes` says."""
    value = private.constant_value(axes)
    if value is None:
        return {0}
    return {int(axis) % given.shape.rank for axis in value.flat}


def _place(op: tf.Operation, given: tf.Tensor) -> int:
    return [t.name for t in op.inputs].index(given.name)


def is_literal(size: tf.Tensor) -> bool:
    """Whether a size or a shape is made of constants only, rather than of other tensors' shapes."""
    op = size.op
    return op.type == 'Const' or op.type in ('Pack', 'Cast') and all(map(is_literal, op.inputs))
