"""What one tower has instead of tower 0's ops, and the import that makes it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.devices import spec_of
from estimator_mgpu.functions import Library, TowerFunctions, reseed


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
        self.passed: dict[str, tf.Tensor] = {}  # what gates hand on, by their outputs' names
        self.functions = TowerFunctions(index)
        self._taken: set[str] = set()  # names of copies, and of the scopes that they're in
        # Instead of handles, by the names of ops and of handles: see shadows.py.
        self.shadows: dict[str, dict[str, tf.Tensor]] = {}

    def new_scope(self, graph: tf.Graph, names: Iterable[str]) -> str:
        """Returns the scope for copies of ops: another one if names of theirs are taken.

        An import renames such copies, and may come to the same new name twice.
        """
        names = [name.lower() for name in names]
        taken = not self._taken.isdisjoint(names)
        for name in names:
            parts = name.split('/')
            self._taken.update('/'.join(parts[:i]) for i in range(1, len(parts) + 1))
        return graph.unique_name(f'{self.scope}/again') if taken else self.scope

    def past_gates(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor of tower 0 is without the gates that this tower does without."""
        while tensor.name in self.passed:
            tensor = self.passed[tensor.name]
        return tensor

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this tower's tensor for tower 0's: a copy, or the same where it's shared."""
        tensor = self.past_gates(tensor)
        if tensor.name in self.replaced:
            return self.replaced[tensor.name]
        if tensor.op.name in self.ops:
            return self.ops[tensor.op.name].outputs[tensor.value_index]
        return tensor


class Request(NamedTuple):
    """Ops of tower 0 that towers are to have copies of.

    Attributes:
      ops: the ops, by name.
      nodes: their `NodeDef`s.
      controls: what each op's copy waits for, by the op's name.
      writing: the names of those that may write to what outlives a step.
      gated: the names of those that wait for a tower's gate, if it has one.
    """

    ops: dict[str, tf.Operation]
    nodes: list[tf.NodeDef]
    controls: dict[str, list[tf.Operation]]
    writing: set[str]
    gated: set[str]


class Importer:
    """Copies ops of a graph within it, from tower 0 to other towers.

    Args:
      graph: the graph.
      device: tower 0's device.
      library: the graph's functions.
    """

    def __init__(self, graph: tf.Graph, device: str, library: Library):
        self._graph = graph
        self._device = spec_of(device)
        self._library = library
        self._tokens: dict[frozenset[str], tf.Tensor] = {}

    def add(self, request: Request, tower: TowerCopy, gate: tf.Tensor | None = None) -> None:
        """Gives a tower copies of ops.

        Args:
          request: the ops.
          tower: the tower.
          gate: what the gated ones wait for.

        Raises:
          RuntimeError: if an op can't be copied.
        """
        graph_def = tf.GraphDef()
        graph_def.versions.CopyFrom(self._graph.graph_def_versions)
        input_map: dict[str, tf.Tensor] = {}
        op = None
        scope = tower.new_scope(self._graph, request.ops)
        try:
            for op, node in zip(request.ops.values(), request.nodes):
                graph_def.node.append(self._node(request, tower, op, node, gate, input_map))
            op = None
            graph_def.library.function.extend(tower.functions.take_new())
            with absolute_scope(self._graph):
                copies = tf.import_graph_def(
                    graph_def, input_map, return_elements=list(request.ops), name=f'{scope}/'
                )
        except Exception as error:
            what = repr(op.name) if op is not None else _named(error, scope, request.ops)
            raise RuntimeError(
                f'Copying {what} to tower {tower.index} on {tower.device} failed: '
                f'{type(error).__name__}: {error} Report '
                'this model to the developers of estimator_mgpu, and train it with '
                'replicate(devices=1).'
            ) from error
        tower.ops.update(zip(request.ops, copies))

    def _node(
        self,
        request: Request,
        tower: TowerCopy,
        op: tf.Operation,
        original: tf.NodeDef,
        gate: tf.Tensor | None,
        input_map: dict[str, tf.Tensor],
    ) -> tf.NodeDef:
        """Returns a tower's node for an op; puts what it takes from outside into `input_map`."""
        node = tf.NodeDef()
        node.CopyFrom(original)
        del node.input[:]
        shadowed = tower.shadows.get(op.name, {})
        for tensor in op.inputs:
            tensor = tower.past_gates(shadowed.get(tensor.name, tensor))
            node.input.append(tensor.name)
            own = tower.tensor(tensor)
            if own is not tensor or tensor.op.name not in request.ops:
                input_map[tensor.name] = own
        outside = []
        for control in request.controls[op.name]:
            if control.name in request.ops:
                node.input.append(f'^{control.name}')
            else:
                outside += self._outside(tower, control)
        if outside:
            token = self._token(outside)
            node.input.append(f'^{token.op.name}')
            input_map[f'^{token.op.name}'] = token
        if gate is not None and op.name in request.gated:
            node.input.append(f'^{gate.op.name}')
            input_map[f'^{gate.op.name}'] = gate
        self._adapt(tower, op, node, request.ops, bool(shadowed) or op.name in request.writing)
        return node

    def _outside(self, tower: TowerCopy, control: tf.Operation) -> list[tf.Operation]:
        """Returns what a copy waits for where tower 0's op waits for `control`, if anything."""
        if control.name in tower.ops:
            return [tower.ops[control.name]]
        for tensor in control.outputs:
            if tensor.name in tower.replaced:
                return [tower.replaced[tensor.name].op]
        # An edge can't lead from inside one loop to another; a loop's copy is another.
        return [] if private.in_control_flow(control) else [control]

    def _token(self, ops: list[tf.Operation]) -> tf.Tensor:
        """Returns a tensor that is there once all of `ops` have run.

        An edge is remapped to a tensor. And one edge will do where gradients wait for all updates
        of a model's moving averages.
        """
        if len(ops) == 1 and ops[0].outputs:
            return ops[0].outputs[0]
        key = frozenset(op.name for op in ops)
        if key not in self._tokens:
            with absolute_scope(self._graph, 'replicate'), tf.device(ops[0].device):
                with tf.control_dependencies(ops):
                    self._tokens[key] = tf.constant(0, name='done')
        return self._tokens[key]

    def _goes_along(self, other: tf.Operation | None, stays: bool) -> bool:
        """Whether an op's copy goes where that of `other` does, with which it's colocated."""
        return other is not None and (stays or not sharing.stays_with_variable(other))

    def _adapt(
        self,
        tower: TowerCopy,
        op: tf.Operation,
        node: tf.NodeDef,
        needed: dict[str, tf.Operation],
        writes: bool,
    ) -> None:
        """Gives a copied node what must differ: device, colocation, loop, seed, functions."""
        stays = sharing.stays_with_variable(op)
        if node.device and not stays:
            spec = spec_of(node.device)
            if (spec.device_type, spec.device_index) == (
                self._device.device_type,
                self._device.device_index,
            ):
                to = spec_of(tower.device)
                node.device = spec.make_merged_spec(to).to_string()
        if '_class' in node.attr:
            names = [
                name
                for name in node.attr['_class'].list.s
                if self._goes_along(needed.get(name.decode()[len('loc:@') :]), stays)
            ]
            del node.attr['_class']
            if names:
                node.attr['_class'].list.s.extend(names)
        if 'frame_name' in node.attr:
            node.attr['frame_name'].s = tower.scope.encode() + b'/' + node.attr['frame_name'].s
        reseed(node, tower.index)
        tower.functions.adapt(node, self._library, writes)


def _named(error: Exception, scope: str, ops: dict[str, tf.Operation]) -> str:
    """Returns the op that an error of an import is about, if it says so."""
    for name in re.findall(r"[Nn]ode '?([\w./>-]+)", str(error)):
        name = name[len(scope) + 1 :] if name.startswith(f'{scope}/') else name
        if name in ops:
            return repr(name)
    return f'one of {len(ops)} ops'


@contextlib.contextmanager
def absolute_scope(graph: tf.Graph, name: str | None = None) -> Iterator[None]:
    """Leaves the user's scopes, devices and dependencies, for a name scope of ours or none."""
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        with tf.name_scope(f'{name}/' if name else None):
            yield
