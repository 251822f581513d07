"""Lets a step's writes wait for its batch, so that a step that finds no batch writes nothing.

When the data ends, the op that gets the batch fails, and so do all ops that depend on it. Other ops
may have run by then, such as a counter, or the decay of moments that no example reaches. Here these
wait for the batch. For example, `steps` below is 6 after six batches; without this, it would be 7:

    train_op = tf.group(optimizer.minimize(loss), tf.assign_add(steps, 1))

In: the finished graph, the tensors of the batch, and the results of a step. Out: the same graph,
with control edges to the writes from a `NoOp` on each device, which runs once the batch is there.
So many writes on a device cost one message.

If several machines read the batch, `cluster.machine_input` says what happens when one of them has
no more data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.devices import HOST
from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, tracebacks
from estimator_mgpu.tf_internals.effects import has_side_effect, writes_state
from estimator_mgpu.tf_internals.liveness import Liveness


def tensors_of(features: Any, labels: Any) -> list[tf.Tensor]:
    """Lists the dense tensors of a batch, and those of which its sparse and ragged ones consist."""
    leaves = tf.nest.flatten([features, labels], expand_composites=True)
    return [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]


def hold_writes(
    graph: tf.Graph, batch: Iterable[tf.Tensor], results: Sequence[tf.Operation]
) -> None:
    """Lets what writes to variables and tables wait for the batch, if a step needs both of them.

    A step is what an `EstimatorSpec` has, or what a hook runs that depends on the batch, such as a
    train op of its own. What doesn't wait: initializers, writes that only a hook runs, ops that
    make the batch, random numbers, queues, iterators and Python functions. A write that waits takes
    a batch wherever it runs, also if a hook runs it alone.

    Args:
      graph: a finished one, divided or not.
      batch: the tensors of the features and labels that the model_fn was called with. If they are
        constants or placeholders, the batch can't end, and nothing waits.
      results: the ops of what the model_fn's EstimatorSpec gives for a step.
    """
    writes, used = writes_to_hold(graph, batch, results)
    if writes:
        _let_wait(graph, writes, used)


def writes_to_hold(
    graph: tf.Graph, batch: Iterable[tf.Tensor], results: Sequence[tf.Operation]
) -> tuple[list[tf.Operation], list[tf.Tensor]]:
    """Returns the writes of a step that don't wait for its batch, and what they have to wait for.

    The arguments are those of `hold_writes`, and the writes come in the graph's order.
    """
    parts = [part for tensor in batch for part in parts_of(tensor)]
    tensors = list(dict.fromkeys(parts))  # each once, in order
    if not any(map(_may_end, tensors)):
        return [], []
    used = [tensor for tensor in _used_in_step(tensors, results) if _may_end(tensor)]
    if not used:
        return [], []

    before_batch = graphs.ancestors([tensor.op for tensor in used])
    sources = [op for op in before_batch if has_side_effect(op)]  # almost always one: an iterator's
    waiting_already = set.intersection(*map(_ops_that_wait_for, sources))

    # The ops that only a step runs: what depends on the batch, and what else a step is run for.
    step = graphs.descendants(sources)
    if not step.isdisjoint(results):
        step.update(results)

    liveness = Liveness(graph.get_operations())
    held: dict[tf.Operation, None] = {}  # used as a set that keeps its order
    for op in graph.get_operations():
        if op in waiting_already or op in before_batch or not writes_state(op):
            continue
        is_for_step = not step.isdisjoint(graphs.descendants([op], until=step))
        if is_for_step:
            # In the place of an op in a loop, the ops wait by which the loop begins.
            held.update(dict.fromkeys(liveness.enters(op) or [op]))
    writes = [op for op in held if op not in before_batch and op not in waiting_already]
    return writes, used


def _used_in_step(tensors: Sequence[tf.Tensor], results: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Those of a batch's tensors that a step needs, and so gets.

    If the results need none of them, hooks run the steps. Then these are all tensors that
    any op uses.
    """
    needed = []
    leading_to_results = set(results)
    dead_ends: set[tf.Operation] = set()
    for tensor in tensors:
        path = graphs.path_to(leading_to_results, tensor.op, dead_ends)
        if path:
            needed.append(tensor)
            leading_to_results |= path
    return needed or [tensor for tensor in tensors if tensor.consumers()]


def _may_end(tensor: tf.Tensor) -> bool:
    """Whether a tensor comes from an op such as an iterator's, rather than from being fed."""
    return tensor.op.type not in op_types.PLACEHOLDERS and any(
        map(has_side_effect, graphs.ancestors([tensor.op]))
    )


def _ops_that_wait_for(first: tf.Operation) -> set[tf.Operation]:
    """An op, and those that never run before it has.

    An op waits for all of its inputs, with two exceptions. A `Merge` of v1 branches runs as soon as
    one input is there; that of a loop, once it has what the loop begins with. And TensorFlow takes
    calls of functions apart: ops in the branch that is taken don't wait for what only the other
    branch is given. Only control edges hold for a whole call.
    """
    waiting = {first}
    stack = [first]
    while stack:
        op = stack.pop()
        for consumer in graphs.consumers_of(op):
            if consumer not in waiting and _waits(consumer, op, waiting):
                waiting.add(consumer)
                stack.append(consumer)
    return waiting


def _waits(consumer: tf.Operation, op: tf.Operation, waiting: Set[tf.Operation]) -> bool:
    """Whether an op waits for another one that it consumes, as do the ops in `waiting`."""
    if consumer.type in op_types.MERGE:
        before = [operand.op for operand in consumer.inputs]
        return all(
            maker in waiting for maker in before if maker.type not in op_types.NEXT_ITERATION
        )
    if consumer.type in op_types.FUNCTION_CALLERS:
        return op in consumer.control_inputs
    return True


def _let_wait(graph: tf.Graph, writes: Sequence[tf.Operation], batch: Sequence[tf.Tensor]) -> None:
    """Lets writes wait for the batch, by one op on each device.

    This op waits for the values of the batch rather than for the ops that make them: if a hook
    feeds the values, those ops don't run (unless TensorFlow's own optimizer of graphs undoes that).
    If machines have read parts, each of them waits for its own, so no part is sent.
    """
    input_device = batch[0].device or HOST
    parts: dict[str, list[tf.Tensor]] = {}  # by the device that has read them
    for tensor in batch:
        parts.setdefault(tensor.device or HOST, []).append(tensor)
    made_for_batch = tracebacks.made_for(batch[0].op)
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope('batch/'), made_for_batch:
        own_part = parts.pop(input_device)
        others = [_is_there(device, part) for device, part in parts.items()]
        batch_is_there = {input_device: _is_there(input_device, own_part, others)}
        for write in writes:
            device = device_of(write) or input_device
            if device not in batch_is_there:
                message = batch_is_there[input_device]
                with tf.device(device), tf.control_dependencies([message]):
                    batch_is_there[device] = tf.no_op('is_there')
            function_calls.let_wait(write, [batch_is_there[device]])


def _is_there(
    device: str, part: Sequence[tf.Tensor], others: Sequence[tf.Operation] = ()
) -> tf.Operation:
    """An op that waits for the tensors that its device has read, and for such ops of others."""
    with tf.device(device):
        values = [tf.identity(tensor, 'is_there') for tensor in part]
        with tf.control_dependencies([*values, *others]):
            return tf.no_op('is_there')
