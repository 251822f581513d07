"""What loops and branches have in common: functions, whose arguments are placed inside them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    ByBranch,
    NotGatherable,
    Placement,
    Shard,
)
from estimator_mgpu.partition.plan import (
    FULL,
    FULL_ON_FIRST,
    LOCAL,
    Need,
    Slice,
    VariableValue,
    local_shape_of,
)
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody, Requests
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import op_types


class CalledFunctions:
    """The functions that an op calls with the same arguments.

    Args:
      bodies: the functions' graphs. All take the same arguments.
      arguments: the tensors that they are called with.
      placements: of the arguments in `scope`.
      unchanged: indices of the arguments that are the same in every call of a function.
      are_branches: whether the op calls only one of them.
      is_joint: as in `Scope`, inside of the functions.

    Attributes:
      placements: of the arguments inside of the functions. An argument that is replicated outside
        may be sharded inside: it's sliced before the call.
      reduced: names of tensors in joint loops that are reduced where they are made.
    """

    def __init__(
        self,
        scope: Scope,
        bodies: Sequence[Any],
        arguments: Sequence[tf.Tensor],
        placements: Sequence[Placement],
        unchanged: Container[int],
        are_branches: bool = False,
        is_joint: bool = False,
    ):
        self.scope = scope
        self.bodies = bodies
        self.arguments = arguments
        self.placements = list(placements)
        self.is_joint = is_joint
        self.requests: Requests = {}
        self.reduced: set[str] = set()
        self._placements_outside = placements
        self._unchanged = unchanged
        self._are_branches = are_branches

    def visit(self, graph: Any, assumes: bool) -> FunctionBody:
        """Visits the ops of a function, and returns what was found.

        Args:
          graph: one of the bodies, or another function that takes the same arguments.
          assumes: as in `Scope`.
        """
        scope = Scope(
            self.scope.batch,
            self.scope.rules,
            self.scope.call_rules,
            Sizes(f'{graph.name}/'),
            in_function=True,
            is_joint=self.is_joint,
            assumes=assumes,
            reduced=self.reduced,
        )
        body = FunctionBody(scope, graph, self.requests)
        for index, argument in enumerate(graph.inputs):
            self._place_argument(body, index, argument)
        body.visit_all()
        return body

    def _place_argument(self, body: FunctionBody, index: int, argument: tf.Tensor) -> None:
        """Tells a function's body the placement and the sizes of an argument."""
        placement = self.placements[index]
        if isinstance(placement, ByBranch) and self._are_branches:
            placement = placement.branches[self.bodies.index(body.graph)]
        if placement != REPLICATE:
            body.scope.placements[argument.name] = placement
        if isinstance(placement, Shard):
            factor = self.factor(index, placement.axis)
            dims = body.scope.sizes.dims_of_shard(argument, placement, factor, self.rank(index))
            body.scope.sizes.set_dims(argument, dims)
        sizes = self.sizes(index)
        if sizes and argument.shape.rank in (0, 1):
            body.scope.sizes.set_entries(argument, sizes)

    def start_again(self) -> None:
        """Forgets what was found of the placements inside, but not what is reduced there."""
        self.placements = list(self._placements_outside)

    def find_placements(
        self, place_returned: Callable[[CalledFunctions, FunctionBody], None] | None = None
    ) -> None:
        """Visits the bodies, on assumptions, until no argument has to be placed otherwise.

        Args:
          place_returned: places the arguments as a body that was visited returns them, if it's a
            loop's.
        """
        while True:  # A placement changes once; requests and what is reduced only grow.
            placements = list(self.placements)
            counts = len(self.requests), len(self.reduced)
            for graph in self.bodies:
                body = self.visit(graph, assumes=True)
                if place_returned is not None:
                    place_returned(self, body)
                self._shard_requested()
            is_complete = counts == (len(self.requests), len(self.reduced))
            if is_complete and placements == self.placements:
                return

    def _shard_requested(self) -> None:
        """Shards the replicated arguments of which ops in the functions need a shard."""
        for body in self.bodies:
            for index, argument in enumerate(body.inputs):
                request = self.requests.get(argument.op)
                if request is not None and self.placements[index] == REPLICATE:
                    shard = Shard(request.axis, request.rows, request.in_blocks)
                    self.placements[index] = shard

    def sizes(self, index: int) -> list[Size]:
        """The entries of an argument that is a size, and the same in every call; [] of others."""
        if index not in self._unchanged:
            return []
        return self.scope.sizes.entries(self.arguments[index]) or []

    def rank(self, index: int) -> int:
        """How many dimensions an argument has that is sharded inside of the functions."""
        # From the body, also while a loop's condition is visited, whose arguments have no shapes.
        rank = self.bodies[-1].inputs[index].shape.rank
        if rank is None:
            rank = self.scope.sizes.rank(self.arguments[index])
        return rank

    def factor(self, index: int, axis: int) -> Size:
        """How many entries an example has along an axis of an argument.

        The axis is that of the argument's shard. If an op in a function requested the shard, it's
        the axis that was requested (see `_shard_requested`).
        """
        argument = self.arguments[index]
        factor = self.scope.sizes.per_row(argument, axis, self.scope.batch)
        if factor is not None:
            return factor
        for body in self.bodies:
            request = self.requests.get(body.inputs[index].op)
            if request is not None:
                return request.factor
        raise NotSharded(f'the size of {argument.name} is unknown')

    def needs(self, readers: Sequence[Any]) -> list[Need]:
        """The forms in which each tower's copy of the op needs the arguments.

        Args:
          readers: functions that can do with the value of a variable if they only read it: all of
            those that are given the arguments; or none.
        """
        return [
            self.variable_value(readers, index) or self._need(index)
            for index in range(len(self.arguments))
        ]

    def variable_value(self, readers: Sequence[Any], index: int) -> Need | None:
        """The value of a variable, if reading it is all that functions do with an argument.

        Then the variable is read once before the call, and sent to each tower. A call in a function
        can't do so: it's the outermost one that would have to.
        """
        if self.scope.in_function:
            return None
        users = [user for graph in readers for user in graph.inputs[index].consumers()]
        if not users or any(user.type != op_types.READ_VARIABLE for user in users):
            return None
        return VariableValue(users[0].get_attr('dtype'))

    def _need(self, index: int) -> Need:
        inside = self.placements[index]
        outside = self._placements_outside[index]
        if inside == REPLICATE:
            return self._need_of_replicated(index)
        if inside == outside:
            return LOCAL
        if isinstance(inside, Shard):
            factor = self.factor(index, inside.axis)
            return Slice(inside.axis, inside.rows, factor, inside.in_blocks)
        if isinstance(inside, NotGatherable):
            return LOCAL  # An empty list, of which each tower makes its own.
        return FULL_ON_FIRST  # A partial sum begins with it: it counts once.

    def _need_of_replicated(self, index: int) -> Need:
        """A size may depend on the number of examples; then each tower is given its own."""
        positions = [
            position
            for position, size in enumerate(self.sizes(index))
            if self.scope.batch in size.symbols
        ]
        if not positions:
            return FULL
        argument = self.arguments[index]
        entries = self.scope.sizes.entries(argument)
        local_shape = local_shape_of(entries, positions[0], self.scope.batch)
        if local_shape is None or len(positions) > 1:
            raise NotSharded(f'the sizes in {argument.name} are unknown')
        return local_shape
