"""`Division`: a graph that is being divided, with what each step leaves for those that come later.

`divide` has the steps, in their order. Each is a function of a `Division`, which it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import Batch
from estimator_mgpu.partition.order.facts import Facts
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.rules import HEAVY
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.v1_loops import V1Loop

Result = Union[tf.Tensor, tf.Operation]
"""What a step may be run for."""

NO_BATCH = Batch([], None, {}, {})


@dataclass
class Division:
    """A graph that is being divided over devices, and over turns of each device.

    A step that asks for the order or the plan before it's there fails with an AttributeError.

    Attributes:
      graph: the graph that the model_fn has built, which is changed.
      batch: the features and labels that it was built for.
      total: how many examples there are, an int32 scalar; None if the graph knows.
      devices: one a chain of towers; each has as many towers as there are turns.
      existing_ops: names of ops that were there before the model_fn, such as the global step; they
        stay as they are.
      batch_norm: 'batch' to normalize by the statistics of the global batch, 'device' by those of
        each tower's examples.
      turns: how many towers each device has, one after the other; fewer if the graph knows that
        there are fewer examples.
      results: ops of what an EstimatorSpec gives, or whatever is wanted of the graph.
      step_results: those for which a step is run in this mode: turns may need all of these.
      gradient_calls: the gradients of each call of an optimizer's `apply_gradients`.
      recomputed_loss: the loss, if forward ops are computed again for its gradients.
      bypasses_needless_ops: whether towers have no copies of ops that give what they are given;
        otherwise each op runs as its rule says.

      replaced: what steps use in place of tensors, by their names. It grows from step to step.
      unused: names of ops that stay in the graph, but that no step of training runs. It grows, too;
        once there is a plan, `plan.unused` counts.
      user_ops: the ops of the graph once functions are inlined and branches taken apart: all that a
        user may name. What later steps add to the graph isn't among these.
      facts: what the check compares with; None if it isn't on.
      recomputation: what is computed twice; None if that wasn't asked for.
      order: in which the graph touches state.
      loops: the loops of TensorFlow 1.
      plan: which ops are sharded, and how.
      full_value_devices: where full values are made of what towers have, by the tensors' names. One
        that isn't in it may be made anywhere.
    """

    graph: tf.Graph
    batch: Batch = NO_BATCH
    total: tf.Tensor | None = None
    devices: Sequence[str] = ()
    existing_ops: Set[str] = frozenset()
    batch_norm: str = 'batch'
    turns: int = 1
    results: Sequence[tf.Operation] = ()
    step_results: Sequence[Result] = ()
    gradient_calls: Sequence[Sequence[tf.Tensor]] = ()
    recomputed_loss: tf.Tensor | None = None
    bypasses_needless_ops: bool = True

    replaced: dict[str, tf.Tensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    user_ops: Set[tf.Operation] = frozenset()
    facts: Facts | None = None
    recomputation: Any = None
    loops: Sequence[V1Loop] = ()
    order: Order = field(init=False)
    plan: Plan = field(init=False)
    full_value_devices: dict[str, str] = field(init=False)

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The tensors of the batch: whatever depends on it comes from these."""
        leaves = [self.batch.sources, self.batch.unsharded]
        return tf.nest.flatten(leaves, expand_composites=True)

    def model_ops(self, types: Iterable[str]) -> list[tf.Operation]:
        """The ops of these types that may be changed: not those from before the model_fn."""
        ops = graphs.ops_of_types(self.graph, types)
        return [op for op in ops if op.name not in self.existing_ops]

    def ops_of_total(self) -> set[tf.Operation]:
        """The ops that count the examples, and check that all features and labels have as many."""
        return set() if self.total is None else graphs.ancestors([self.total.op])

    def replacements(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """A tensor, and what one step after another uses in its place; the last one is in use."""
        chain = [tensor]
        while chain[-1].name in self.replaced:
            chain.append(self.replaced[chain[-1].name])
        return chain

    def in_place_of(self, result: Result) -> Result:
        """What is used in place of a tensor, if anything; an op stays what it is."""
        return self.replacements(result)[-1] if isinstance(result, tf.Tensor) else result

    def is_light(self, op: tf.Operation) -> bool:
        """Whether it costs little to run one of the user's ops, and nobody can tell that it runs.

        It's no matrix product, say, touches no state, and is in no loop of TensorFlow 1. Whoever
        fetches what it gives may run it on one device.
        """
        if op.type in HEAVY or op.type in op_types.FUNCTION_CALLERS:
            return False
        if self.order.bits(op) or any(map(self.order.variables_behind, op.outputs)):
            return False
        return not self.order.liveness.is_in_loop(op)

    def op_in_place_of(self, op: tf.Operation) -> tf.Operation:
        """The op that now gives what another one gave, if something is used in its place."""
        return self.replacements(op.outputs[0])[-1].op if op.outputs else op
