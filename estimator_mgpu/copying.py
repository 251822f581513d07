"""Copies of tower 0's ops on the other towers' devices, made as they're needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, shadows, sharing
from estimator_mgpu.devices import spec_of
from estimator_mgpu.functions import Library, TowerFunctions, reseed
from estimator_mgpu.updates import Updates


class TowerCopy:
    """What one tower has instead of tower 0's ops.

    Args:
      index: the tower's number; 0 for a copy that draws the same random numbers as tower 0.
      scope: the name scope that its ops live under.
      device: its device.
    """

    def __init__(self, index: int, scope: str, device: str):
        self.index = index
        self.scope = scope
        self.device = device
        self.replaced: dict[str, tf.Tensor] = {}  # by the name of tower 0's tensor
        self.ops: dict[str, tf.Operation] = {}  # by the name of tower 0's op
        self.functions = TowerFunctions(index)
        # Instead of handles, by the names of ops and of handles: see shadows.py.
        self.shadows: dict[str, dict[str, tf.Tensor]] = {}

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this tower's tensor for tower 0's: a copy, or the same where it's shared."""
        if tensor.name in self.replaced:
            return self.replaced[tensor.name]
        if tensor.op.name in self.ops:
            return self.ops[tensor.op.name].outputs[tensor.value_index]
        return tensor


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
        self._device = spec_of(device)
        self.towers = towers
        self._only = only
        self._boundary: set[str] = set()
        self._own: set[str] = set()
        self._gated: set[str] = set()
        self._library = Library(graph)
        self._tokens: dict[str, tf.Tensor] = {}
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
        self._forget_outgrown()
        late = dict(self._late_control_inputs())
        waiting = [t.op for t in tensors if not self._is_replaced(t)]
        needed = self._not_copied(waiting + [c for added in late.values() for c in added])
        if needed:
            self._shadow(needed.values())
            nodes = [op.node_def for op in needed.values()]
            before = list(tensors)
            for tower in self.towers:
                gate = after(tower, before) if after else None
                self._copy_to(tower, needed, nodes, gate)
                before = [tower.tensor(t) for t in tensors]
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

    def updates(self, tensors: Iterable[tf.Tensor]) -> Updates:
        """Finds what has to be written, and read, for `tensors` to be there."""
        found: dict[str, tf.Operation] = {}
        users: dict[str, set[str]] = {}
        writes = []
        python: set[str] = set()
        waiting = [t.op for t in tensors]
        while waiting:
            op = waiting.pop()
            if op.name in found or op.name in self._boundary:
                continue
            found[op.name] = op
            handles = sharing.shared_handles(op)
            if op.type in sharing.PYTHON_FUNCTIONS and op.name not in self.towers[0].ops:
                python.add(op.name)
                writes.append(op)
            if handles:
                users[op.name] = handles
                calls = sharing.calls_function(op)
                if self._library.writes(op.node_def) if calls else sharing.is_write(op):
                    writes.append(op)
            if not self.is_shared(op) or handles:
                waiting += [t.op for t in op.inputs if not self._is_replaced(t)]
                waiting += op.control_inputs
        written = set().union(*(users.get(op.name, set()) for op in writes))
        own = {name for name, handles in users.items() if handles & written}
        return Updates(found, writes, own | python)

    def let_write(self, updates: Updates) -> None:
        """Lets each tower have these updates by itself, though they write."""
        self._own |= updates.own
        # Nothing outside can make an op inside a v1 loop wait; what enters the loop does.
        outside = {name for name in updates.own if not private.in_loop(updates.ops[name])}
        self._gated |= outside | updates.loops_after_writes()

    def _is_replaced(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self.towers[0].replaced

    def _not_copied(self, waiting: list[tf.Operation]) -> dict[str, tf.Operation]:
        """Returns the ops that `waiting` need, themselves included, and no tower has yet."""
        copied = self.towers[0].ops
        replaced = {name.rpartition(':')[0] for name in self.towers[0].replaced}
        needed: dict[str, tf.Operation] = {}
        seen = set()
        while waiting:
            op = waiting.pop()
            if op.name in seen or op.name in copied:
                continue
            seen.add(op.name)
            if self.is_shared(op):
                continue
            needed[op.name] = op
            waiting += [t.op for t in op.inputs if not self._is_replaced(t)]
            waiting += [c for c in self._waits_for(op) if c.name not in replaced]
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

    def _forget_outgrown(self) -> None:
        """Forgets copies of loops, branches and function calls that have more outputs now.

        Gradients of v2 loops and branches add what they need of the forward pass to its outputs.
        A second gradient may, after the first was copied; then there are two copies.
        """
        for name, outputs in list(self._outputs.items()):
            op = self._graph.get_operation_by_name(name)
            if len(op.outputs) != outputs:
                del self._outputs[name]
                for gone in self.dependents(op.outputs) | {name}:
                    for tower in self.towers:
                        tower.ops.pop(gone, None)

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
            if op.name not in self._own:
                with absolute_scope(self._graph):
                    made = shadows.of_call(op, self._library, scopes)
                for tower, own in zip(self.towers, made):
                    tower.shadows[op.name] = own

    def _copy_to(
        self,
        tower: TowerCopy,
        needed: dict[str, tf.Operation],
        nodes: Sequence[tf.NodeDef],
        gate: tf.Tensor | None,
    ) -> None:
        graph_def = tf.GraphDef()
        graph_def.versions.CopyFrom(self._graph.graph_def_versions)
        input_map: dict[str, tf.Tensor] = {}
        for op, original in zip(needed.values(), nodes):
            node = graph_def.node.add()
            node.CopyFrom(original)
            del node.input[:]
            shadowed = tower.shadows.get(op.name, {})
            for tensor in op.inputs:
                tensor = shadowed.get(tensor.name, tensor)
                node.input.append(tensor.name)
                own = tower.tensor(tensor)
                if own is tensor and tensor.op.name not in needed:
                    self._check_shared_by_all(op, tensor)
                if own is not tensor or tensor.op.name not in needed:
                    input_map[tensor.name] = own
            for control in self._waits_for(op):
                own = self._control(tower, control, needed)
                if own is not None:
                    node.input.append(f'^{control.name}')
                    if control.name not in needed:
                        input_map[f'^{control.name}'] = own
            if gate is not None and op.name in self._gated:
                node.input.append(f'^{gate.op.name}')
                input_map[f'^{gate.op.name}'] = gate
            self._adapt(tower, op, node, needed, writes=bool(shadowed) or op.name in self._own)
        graph_def.library.function.extend(tower.functions.take_new())
        with absolute_scope(self._graph):
            copies = tf.import_graph_def(
                graph_def, input_map, return_elements=list(needed), name=f'{tower.scope}/'
            )
        tower.ops.update(zip(needed, copies))

    def _check_shared_by_all(self, op: tf.Operation, tensor: tf.Tensor) -> None:
        """Raises an error where what is written in a v1 loop or branch isn't there for copies."""
        looped = private.in_loop(tensor.op)
        if looped or any(map(self._comes_from_shard, private.branched_on(tensor.op))):
            where = 'loop' if looped else 'branch that depends on the batch'
            raise ValueError(
                f'{op.name!r} uses what {tensor.op.name!r} ({tensor.op.type}) writes to a variable '
                f'inside a v1 {where}. Writes happen once, on the first device, and the other '
                f'devices cannot have what is inside its {where.split()[0]}. Write outside of it, '
                'use what was read before, or train this model with replicate(devices=1).'
            )

    def _control(
        self, tower: TowerCopy, control: tf.Operation, needed: dict[str, tf.Operation]
    ) -> Any:
        """Returns what a copy waits for where tower 0's op waits for `control`, if anything."""
        if control.name in needed:
            return control
        if control.name in tower.ops:
            return self._token(tower.ops[control.name])
        for tensor in control.outputs:
            if tensor.name in tower.replaced:
                return tower.replaced[tensor.name]
        # An edge can't lead from inside one loop to another; a loop's copy is another.
        return None if private.in_control_flow(control) else self._token(control)

    def _token(self, op: tf.Operation) -> tf.Tensor:
        """Returns a tensor that is there once `op` has run: an edge is remapped to a tensor."""
        if op.outputs:
            return op.outputs[0]
        if op.name not in self._tokens:
            with absolute_scope(self._graph, 'replicate'), tf.device(op.device):
                with tf.control_dependencies([op]):
                    self._tokens[op.name] = tf.constant(0, name='done')
        return self._tokens[op.name]

    def _adapt(
        self,
        tower: TowerCopy,
        op: tf.Operation,
        node: tf.NodeDef,
        needed: dict[str, tf.Operation],
        writes: bool,
    ) -> None:
        """Gives a copied node what must differ: device, colocation, loop, seed, functions."""
        if node.device and not sharing.stays_with_variable(op):
            spec = spec_of(node.device)
            if (spec.device_type, spec.device_index) == (
                self._device.device_type,
                self._device.device_index,
            ):
                to = spec_of(tower.device)
                node.device = spec.make_merged_spec(to).to_string()
        if '_class' in node.attr:
            names = [s for s in node.attr['_class'].list.s if s.decode()[len('loc:@') :] in needed]
            del node.attr['_class']
            if names:
                node.attr['_class'].list.s.extend(names)
        if 'frame_name' in node.attr:
            node.attr['frame_name'].s = tower.scope.encode() + b'/' + node.attr['frame_name'].s
        reseed(node, tower.index)
        tower.functions.adapt(node, self._library, writes)


@contextlib.contextmanager
def absolute_scope(graph: tf.Graph, name: str | None = None) -> Iterator[None]:
    """Leaves the user's scopes, devices and dependencies, for a name scope of ours or none."""
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        with tf.name_scope(f'{name}/' if name else None):
            yield
