"""What is known and decided of a graph, or of a function that it calls, while ops are visited."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Placement
from estimator_mgpu.partition.plan import LOCAL, Decision, Need, OpPlan
from estimator_mgpu.partition.rules import lists
from estimator_mgpu.partition.rules.notation import Rule
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.tf_internals import op_types

CallRule = Callable[['Scope', tf.Operation, Sequence[Placement]], Optional[Decision]]
"""Decides how an op that calls functions runs on every tower; None if it runs once."""


@dataclass(frozen=True)
class Rules:
    """What propagation asks about an op, by the op's type."""

    of_ops: Mapping[str, Rule]
    of_calls: Mapping[str, CallRule]  # loops, branches and calls
    products: Container[str]  # worth sharding along row spaces that aren't the batch's


@dataclass
class Scope:
    """The graph, or a function that towers call.

    Attributes:
      batch: the batch's row space.
      rules: by types of ops.
      sizes: the sizes of tensors, in terms of the global batch. In a function, which each tower
        calls, the batch in them stands for the tower's examples.
      in_function: nothing can be gathered, reduced or sliced in a function.
      assumes: while it isn't known yet how a loop's variables are placed, a function may be visited
        on the assumption that whatever an op needs is there.
      reduced: names of tensors, partial results of towers, that are reduced where they are made.
      reshardable: names of tensors that were gathered, or made once of such. They may be sharded
        again, along dimension 0.
      ops: what was decided for ops that run on every tower, by name.
      placements: of the tensors that towers make, by name.
    """

    batch: RowSpace
    rules: Rules
    sizes: Sizes
    in_function: bool = False
    assumes: bool = False
    reduced: set[str] = field(default_factory=set)
    reshardable: set[str] = field(default_factory=set)
    ops: dict[str, OpPlan] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)

    def placement_of(self, tensor: tf.Tensor) -> Placement:
        """The placement that the tensor has for the ops that use it."""
        if tensor.name in self.reduced:
            return REPLICATE
        return self.placements.get(tensor.name, REPLICATE)

    def placements_of_inputs(self, op: tf.Operation) -> list[Placement]:
        """The placements of an op's inputs, in order."""
        return [self.placement_of(tensor) for tensor in op.inputs]

    def follows_gathered(self, op: tf.Operation) -> bool:
        """Whether an op uses what was gathered, or what was made once of such."""
        return any(tensor.name in self.reshardable for tensor in op.inputs)

    def record(self, op: tf.Operation, decision: Decision) -> None:
        """Notes that an op runs on every tower."""
        self.ops[op.name] = decision.plan
        for output, placement in zip(op.outputs, decision.placements):
            if placement is not None:
                self.placements[output.name] = placement
        for output, dims in zip(op.outputs, decision.dims):
            self.sizes.set_dims(output, dims)

    def make_empty_lists(self, inputs: Iterable[tuple[tf.Tensor, Need]]) -> bool:
        """Lets each tower make the empty lists that an op is to have as its own.

        A list that is empty on one device is so on every tower, but has elements of other sizes.

        Args:
          inputs: the tensors that an op uses, each with the form in which it needs the tensor.

        Returns:
          False if one of them is a list that isn't empty and that towers don't have.
        """
        if self.assumes:
            return True
        for tensor, need in inputs:
            is_list = need == LOCAL and tensor.dtype == tf.variant
            if is_list and self.placement_of(tensor) == REPLICATE:
                if tensor.op.type not in op_types.EMPTY_LISTS:
                    return False
                self.ops[tensor.op.name] = lists.empty_list(tensor.op)
        return True
