"""Copies of tower 0's ops on the other towers' devices, made as they're needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, shadows, sharing
from estimator_mgpu.functions import Library
from estimator_mgpu.gates import Gates
from estimator_mgpu.importing import Importer, Request, TowerCopy, absolute_scope
from estimator_mgpu.updates import Updates


class Copies:
    """Several towers' copies of one tower 0, in one graph.

    They grow incrementally: a request copies only what earlier ones left out.

    Args:
      graph: the graph that tower 0 is in and the copies go to.
      device: tower 0's device.
      towers: the other towers.
      only: the names of the ops to copy, by default all that towers don't share.
    """

    def __init__(
        self,
        graph: tf.Graph,
        device: str,
        towers: Sequence[TowerCopy],
        only: set[str] | None = None,
    ):
        self._graph = graph
        self.towers = towers
        self._only = only
        self._boundary: set[str] = set()
        self._own: set[str] = set()
        self._gated: set[str] = set()
        self._gates = Gates(graph)
        self._library = Library(graph)
        self._importer = Importer(graph, device, self._library)
        # What TensorFlow may change after it was copied, as it was then.
        self._control_inputs: dict[str, set[str]] = {}
        self._outputs: dict[str, int] = {}

    def replace(self, tensor: tf.Tensor, by: Sequence[tf.Tensor]) -> None:
        """Puts one tensor a tower in the place of tower 0's `tensor`."""
        for tower, own in zip(self.towers, by):
            tower.replaced[tensor.name] = own

    def share(self, tensors: Iterable[tf.Tensor]) -> None:
        """Makes these tensors, which stand for the whole batch, the same for all towers."""
        self._boundary.update(t.op.name for t in tensors)

    def is_boundary(self, op: tf.Operation) -> bool:
        """Whether an op stands for the whole batch."""
        return op.name in self._boundary

    def is_gate(self, op: tf.Operation) -> bool:
        """Whether an op only hands on later what copies use at once."""
        return self._gates.can_go(op)

    def is_shared(self, op: tf.Operation) -> bool:
        """Whether all towers use this very op rather than copies of it."""
        if self._only is not None and op.name not in self._only:
            return True
        if op.name in self._own:
            return False
        if op.type == 'PlaceholderWithDefault' and not any(map(self._comes_from_shard, op.inputs)):
            return True
        return op.name in self._boundary or sharing.is_shared(op)

    def _comes_from_shard(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor depends on what towers have of their own, so that it can't be fed."""
        waiting, seen = [tensor], set()
        while waiting:
            tensor = waiting.pop()
            if self._is_replaced(tensor):
                return True
            if tensor.name not in seen and not sharing.is_shared(tensor.op):
                seen.add(tensor.name)
                waiting += tensor.op.inputs
        return False

    def dependents(self, sources: Iterable[tf.Tensor], differentiably: bool = False) -> set[str]:
        """Returns the names of the ops that depend on `sources` within a tower."""
        found: set[str] = set()
        waiting = list(sources)
        while waiting:
            for op in waiting.pop().consumers():
                if differentiably and op.type in ('StopGradient', 'PreventGradient'):
                    continue
                if op.name not in found and not self.is_shared(op):
                    found.add(op.name)
                    waiting += op.outputs
        return found

    def copy(
        self, tensors: Sequence[tf.Tensor], after: Callable[..., tf.Tensor] | None = None
    ) -> list[list[tf.Tensor]]:
        """Returns the towers' copies of tower 0's `tensors`, one list a tower.

        Args:
          tensors: tensors of tower 0.
          after: after(tower, tensors of the tower before) -> what those of a tower's ops wait for
            that `let_write` was called for.
        """
        self._gates.look()
        outgrown = self._take_outgrown()
        late = dict(self._late_control_inputs())
        sources = map(self._past_gates, tensors)
        waiting = [t.op for t in sources if not self._is_replaced(t)]
        waiting += [*outgrown, *(c for added in late.values() for c in added)]
        needed = self._not_copied(waiting)
        if needed:
            self._shadow(needed.values())
            nodes = [op.node_def for op in needed.values()]
            controls = {name: self._waits_for(op) for name, op in needed.items()}
            request = Request(needed, nodes, controls, self._own, self._gated)
            before = list(tensors)
            for tower in self.towers:
                gate = after(tower, before) if after else None
                self._importer.add(request, tower, gate)
                before = [tower.tensor(t) for t in tensors]
        for op, old in outgrown.items():
            for tower, own in zip(self.towers, old):
                move_consumers(own, tower.ops[op.name])
        for op, added in late.items():
            for tower in self.towers:
                own = [tower.ops[c.name] for c in added if c.name in tower.ops]
                private.add_control_inputs(tower.ops[op.name], own)
        for op in needed.values():
            if private.in_control_flow(op):
                self._control_inputs[op.name] = {c.name for c in op.control_inputs}
            if sharing.calls_function(op):
                self._outputs[op.name] = len(op.outputs)
        return [[tower.tensor(t) for t in tensors] for tower in self.towers]

    def can_have(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether the towers can have copies, none of which needs what only happens once."""
        try:
            sources = map(self._past_gates, tensors)
            self._not_copied([t.op for t in sources if not self._is_replaced(t)])
        except ValueError:
            return False
        return True

    def names(self) -> set[str]:
        """Returns the names of all copies."""
        return {op.name for tower in self.towers for op in tower.ops.values()}

    def has_copies(self, op: tf.Operation) -> bool:
        """Whether the other towers have an op, too."""
        return op.name in self.towers[0].ops

    def writes(self, op: tf.Operation) -> bool:
        """Whether an op, or a function that it calls, changes something that outlives a step."""
        if sharing.calls_function(op):
            return sharing.uses_shared_handle(op) and self._library.writes(op.node_def)
        return sharing.is_write(op)

    def gives_written(self, op: tf.Operation) -> bool:
        """Whether results of a function that an op calls come from variables that it writes."""
        return self._library.gives_written(op.node_def)

    def updates(self, results: Iterable[tf.Tensor | tf.Operation]) -> Updates:
        """Finds what has to be written, and read, for tensors or ops to be there."""
        found: dict[str, tf.Operation] = {}
        users: dict[str, set[str]] = {}
        writes = []
        python: set[str] = set()
        replaced = self._replaced_ops()
        waiting = [getattr(result, 'op', result) for result in results]
        while waiting:
            op = waiting.pop()
            # What is taken, from an iterator say, is there once for all towers.
            if op.name in found or op.name in self._boundary or sharing.takes(op):
                continue
            found[op.name] = op
            handles = sharing.shared_handles(op)
            if op.type in sharing.PYTHON_FUNCTIONS and op.name not in self.towers[0].ops:
                python.add(op.name)
                writes.append(op)
            if handles:
                users[op.name] = handles
                if self.writes(op):
                    writes.append(op)
            if not self.is_shared(op) or handles:
                waiting += [t.op for t in op.inputs if not self._is_replaced(t)]
                waiting += [c for c in op.control_inputs if c.name not in replaced]
        written = set().union(*(users.get(op.name, set()) for op in writes))
        own = {name for name, handles in users.items() if handles & written}
        return Updates(found, writes, own | python)

    def let_write(self, updates: Updates) -> None:
        """Lets each tower have these updates by itself, though they write."""
        self._own |= updates.own
        # Nothing outside can make an op inside a v1 loop wait; what enters the loop does.
        outside = {name for name in updates.own if not private.in_loop(updates.ops[name])}
        self._gated |= outside | updates.loops_after_writes()

    def writes_for_all(self, op: tf.Operation) -> bool:
        """Whether an op writes once, rather than on each tower."""
        return op.name not in self._own and self.writes(op)

    def _past_gates(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor is without gates, which towers are told to do without."""
        while not self._has_own(tensor) and self._gates.can_go(tensor.op):
            [source] = tensor.op.inputs
            for tower in self.towers:
                tower.passed[tensor.name] = source
            tensor = source
        return tensor

    def _has_own(self, tensor: tf.Tensor) -> bool:
        """Whether it's settled what towers have for a tensor."""
        name = tensor.op.name
        settled = name in self._gated or name in self.towers[0].ops or self.is_shared(tensor.op)
        return settled or self._is_replaced(tensor)

    def _is_replaced(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self.towers[0].replaced

    def _replaced_ops(self) -> set[str]:
        return {name.rpartition(':')[0] for name in self.towers[0].replaced}

    def _not_copied(self, waiting: list[tf.Operation]) -> dict[str, tf.Operation]:
        """Returns the ops that `waiting` need, themselves included, and no tower has yet."""
        copied = self.towers[0].ops
        replaced = self._replaced_ops()
        needed: dict[str, tf.Operation] = {}
        writes = functools.cache(self.writes_for_all)  # For all of a model may wait for the same.
        seen = set()
        while waiting:
            op = waiting.pop()
            if op.name in seen or op.name in copied:
                continue
            seen.add(op.name)
            if self.is_shared(op):
                continue
            needed[op.name] = op
            for tensor in map(self._past_gates, op.inputs):
                if not self._is_replaced(tensor):
                    self._check_can_be_had(tensor, op)
                    waiting.append(tensor.op)
            waiting += [
                c for c in self._waits_for(op) if c.name not in replaced and not writes(_source(c))
            ]
        return needed

    def _waits_for(self, op: tf.Operation) -> list[tf.Operation]:
        """Lists an op's control inputs, with what writes wait for in place of those in v1 loops.

        A copy doesn't wait for these writes; but what has no other input is in a loop only by that.
        """
        if not private.in_control_flow(op):
            return list(op.control_inputs)
        found, seen = [], set()
        waiting = list(op.control_inputs)
        while waiting:
            control = waiting.pop()
            if control.name in seen:
                continue
            seen.add(control.name)
            if private.in_control_flow(control) and self.is_shared(control):
                waiting += [*control.control_inputs, *(t.op for t in control.inputs)]
            elif control.type not in ('Enter', 'RefEnter'):  # They run in the first round only.
                found.append(control)
        return found

    def _take_outgrown(self) -> dict[tf.Operation, list[tf.Operation]]:
        """Takes out the copies of loops, branches and function calls that have more outputs now.

        Gradients of v2 loops and branches add what they need of the forward pass to its outputs.
        A second gradient may, after the first was copied. Were there two copies then, one might
        read variables that what comes of the other has written already.
        """
        outgrown = {}
        for name, outputs in list(self._outputs.items()):
            op = self._graph.get_operation_by_name(name)
            if len(op.outputs) != outputs:
                del self._outputs[name]
                outgrown[op] = [tower.ops.pop(name) for tower in self.towers]
        return outgrown

    def _late_control_inputs(self) -> Iterator[tuple[tf.Operation, list[tf.Operation]]]:
        """Finds control inputs that ops got after they were copied.

        Gradients of v1 loops push values on stacks inside the loop, and make ops that were there
        already wait for that.
        """
        for name, before in self._control_inputs.items():
            op = self._graph.get_operation_by_name(name)
            if name not in self.towers[0].ops:
                continue
            added = [c for c in op.control_inputs if c.name not in before]
            if added:
                before.update(c.name for c in added)
                yield op, added

    def _shadow(self, ops: Iterable[tf.Operation]) -> None:
        """Gives towers variables of their own for what a function both writes and reads."""
        scopes = [tower.scope for tower in self.towers]
        for op in ops:
            if sharing.calls_function(op) and op.name not in self._own:
                with absolute_scope(self._graph):
                    made = shadows.of_call(op, self._library, scopes)
                for tower, own in zip(self.towers, made):
                    tower.shadows[op.name] = own

    def _check_can_be_had(self, tensor: tf.Tensor, user: tf.Operation) -> None:
        """Checks that what is taken or written once is what a tower needs.

        Raises:
          ValueError: for what's taken from a queue, an iterator or the like, and for what is
            written inside a v1 loop, or branch, that each tower has of its own.
        """
        op = tensor.op
        if op.name in self._boundary or op.name in self._own or not sharing.is_write(op):
            return
        if self.is_shared(op) and self._only is None and not sharing.writes_variable(op):
            raise ValueError(
                f'{op.name!r} ({op.type}) was made in the model_fn, and {user.name!r} uses what it '
                'gives together with the rows of a shard. It happens once a step, for all devices, '
                'so it cannot give each its own. Let the input_fn give this as a feature, or train '
                'this model with replicate(devices=1).'
            )
        looped = private.in_loop(op)
        if looped or any(map(self._comes_from_shard, private.branched_on(op))):
            where = 'loop' if looped else 'branch that depends on the batch'
            raise ValueError(
                f'{user.name!r} uses what {op.name!r} ({op.type}) writes to a variable '
                f'inside a v1 {where}. Writes happen once, on the first device, and the other '
                f'devices cannot have what is inside its {where.split()[0]}. Write outside of it, '
                'use what was read before, or train this model with replicate(devices=1).'
            )


def _source(op: tf.Operation) -> tf.Operation:
    """Returns the op whose output an op hands on, or itself."""
    while op.type == 'Identity':
        op = op.inputs[0].op
    return op


def move_consumers(old: tf.Operation, new: tf.Operation) -> None:
    """Gives what consumes an op's outputs those of another, which may have more, instead."""
    for before, after in zip(old.outputs, new.outputs):
        for consumer in before.consumers():
            for i, tensor in enumerate(consumer.inputs):
                if tensor.name == before.name:
                    private.set_input(consumer, i, after)
