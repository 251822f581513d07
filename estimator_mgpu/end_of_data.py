"""Lets a step's writes wait for its batch, so that a step that finds no batch writes nothing.

When the data ends, the op that gets the batch fails, and so do all ops that follow from it. Other
ops may have run by then, such as a counter, or the decay of moments that no example reaches. Here
these wait for the batch. For example, `steps` below is 6 after six batches; undecorated it is 7:

    train_op = tf.group(optimizer.minimize(loss), tf.assign_add(steps, 1))

One `NoOp` a device stands for the batch, so that many writes cost one message. If several machines
read the batch, `cluster.input` says what happens when one of them has no more data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.batch import parts_of
from estimator_mgpu.partition.towers.placement import device_of
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect
from estimator_mgpu.tf_internals.graphs import topological_order


def tensors_of(features: Any, labels: Any) -> list[tf.Tensor]:
    """Lists the dense tensors that a batch consists of; those of sparse and ragged ones, too."""
    leaves = tf.nest.flatten([features, labels], expand_composites=True)
    return [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]


def hold_writes(graph: tf.Graph, batch: Iterable[tf.Tensor], spec: Any) -> None:
    """Lets what writes to variables and tables wait for the batch, if a step needs both of them.

    A step is what an `EstimatorSpec` has, or what a hook runs that follows from the batch, such as
    a train op of its own. These don't wait: initializers, writes that only a hook runs, what the
    batch itself is made by, random numbers, queues, iterators and Python functions. A write that
    waits takes a batch wherever it runs, also if a hook runs it by itself.

    Args:
      graph: a finished one, divided or not.
      batch: the tensors of the features and labels that the model_fn was called with. If they are
        constants or placeholders, the batch can't end, and nothing waits.
      spec: the `EstimatorSpec` of the model_fn.
    """
    parts = list(dict.fromkeys(part for tensor in batch for part in parts_of(tensor)))
    if not any(map(_may_end, parts)):
        return

    results = _ops_of(spec)
    needed = graphs.ancestors(results)
    # A step gets only those tensors of the batch that it needs. If the spec's results need none,
    # it's hooks that run the steps: then all tensors count that any op uses.
    used = [t for t in parts if t.op in needed] or [t for t in parts if t.consumers()]
    used = [t for t in used if _may_end(t)]
    if used:
        _wait(graph, _writes_to_hold(graph, used, results), used)


def _may_end(tensor: tf.Tensor) -> bool:
    """Whether a tensor is made by an op such as an iterator's, and isn't there to be fed."""
    return tensor.op.type not in op_types.PLACEHOLDERS and any(
        map(has_side_effect, graphs.ancestors([tensor.op]))
    )


def _writes_to_hold(
    graph: tf.Graph, batch: Sequence[tf.Tensor], results: Sequence[tf.Operation]
) -> list[tf.Operation]:
    """The ops that have to wait for a batch, in the graph's order."""
    before_batch = graphs.ancestors([tensor.op for tensor in batch])
    sources = [op for op in before_batch if has_side_effect(op)]  # almost always one: an iterator's
    waiting_already = set.intersection(*map(_after, sources))
    step = graphs.descendants(sources)
    if not step.isdisjoint(results):
        step.update(results)

    loops = _loops(graph)
    held: dict[tf.Operation, None] = {}  # a dict, for its order
    for op in graph.get_operations():
        if op in waiting_already or op in before_batch or not _writes(op):
            continue
        if not step.isdisjoint(graphs.descendants([op], until=step)):
            # An op within a loop can't wait for one outside: where the loop begins waits.
            held.update(dict.fromkeys(loops.get(op, [op])))
    return [op for op in held if op not in before_batch]


def _writes(op: tf.Operation) -> bool:
    """Whether an op, or a function that it calls, writes to a variable or a table."""
    if not has_side_effect(op) or op.type in op_types.STATE_QUERIES:
        return False
    if op.type in op_types.FUNCTION_CALLERS:
        bodies = function_calls.function_graphs(op)
        if not bodies:
            return True  # Nobody knows.
        return any(_writes(inner) for body in bodies for inner in body.get_operations())
    return any(map(_is_state, op.inputs))


def _is_state(tensor: tf.Tensor) -> bool:
    """Whether a tensor refers to a variable or a table, or to an argument of a function."""
    maker = tensor.op
    while maker.type in op_types.FORWARD_VARIABLES and maker.inputs:
        maker = maker.inputs[0].op
    refers = tensor.dtype == tf.resource or graphs.is_reference_variable(tensor)
    return refers and (maker.type in op_types.STATE_HOLDERS or maker.type in op_types.PLACEHOLDERS)


def _ops_of(spec: Any) -> list[tf.Operation]:
    """The ops of what an EstimatorSpec gives for a step."""
    results = [spec.loss, spec.train_op, spec.predictions, spec.eval_metric_ops]
    leaves = tf.nest.flatten(results, expand_composites=True)
    ops = [leaf if isinstance(leaf, tf.Operation) else getattr(leaf, 'op', None) for leaf in leaves]
    return [op for op in ops if op is not None]


def _after(first: tf.Operation) -> set[tf.Operation]:
    """An op and those that never run before it has.

    An op waits for all of its inputs, but for two kinds. A `Merge` of v1 branches runs as soon as
    one input is there; that of a loop, once it has what the loop begins with. And TensorFlow takes
    calls of functions apart: ops in the branch that is taken don't wait for what only the other
    branch is given. Only control edges hold for a whole call.
    """
    reached, stack = {first}, [first]
    while stack:
        op = stack.pop()
        for user in graphs.consumers_of(op):
            if user.type in op_types.MERGE:
                begin = [t.op for t in user.inputs if t.op.type not in op_types.NEXT_ITERATION]
                waits = reached.issuperset(begin)
            elif user.type in op_types.FUNCTION_CALLERS:
                waits = op in user.control_inputs
            else:
                waits = True
            if waits and user not in reached:
                reached.add(user)
                stack.append(user)
    return reached


def _loops(graph: tf.Graph) -> dict[tf.Operation, list[tf.Operation]]:
    """For each op within a v1 loop, the ops by which the outermost loop around it begins."""
    ops = graph.get_operations()
    if not any(op.type in op_types.ENTER for op in ops):
        return {}
    frames: dict[tf.Operation, tuple[bytes, ...]] = {}  # the loops around what an op gives
    entries: dict[bytes, list[tf.Operation]] = {}  # by the outermost loop
    for op in topological_order(ops):
        frame = max(
            (frames.get(before, ()) for before in graphs.direct_inputs(op)), key=len, default=()
        )
        if op.type in op_types.ENTER:
            name = op.get_attr('frame_name')
            if not frame:
                entries.setdefault(name, []).append(op)
            frame = (*frame, name)
        elif op.type in op_types.EXIT:
            frame = frame[:-1]
        frames[op] = frame
    return {op: entries[frame[0]] for op, frame in frames.items() if frame}


def _wait(graph: tf.Graph, writes: Sequence[tf.Operation], batch: Sequence[tf.Tensor]) -> None:
    """Lets writes wait for the batch, by one op on each device.

    That waits for the values of the batch rather than for the ops that make them, which don't run
    where a hook feeds the values (unless TensorFlow's own optimizer of graphs undoes that).
    """
    host = batch[0].device
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope('batch/'):
        there: dict[str, tf.Operation] = {}
        for write in writes:
            device = device_of(write) or host
            if host not in there:
                with tf.device(host or None):
                    with tf.control_dependencies([tf.identity(t, 'is_there') for t in batch]):
                        there[host] = tf.no_op('is_there')
            if device not in there:
                with tf.device(device or None), tf.control_dependencies([there[host]]):
                    there[device] = tf.no_op('is_there')
            private.add_control_inputs(write, [there[device]])
