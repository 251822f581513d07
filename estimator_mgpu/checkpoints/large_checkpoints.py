"""Checkpoints of tables that no device has room for: no device has another one's parts.

In: a graph with a saver, and maybe a warm start. Out: the same graph, in which

- a variable is restored on its own device, if that is a CPU. TensorFlow would read all variables on
  the first CPU of a machine;
- parts of tables are read for one device of a machine after the other, so that a machine doesn't
  read those of all its GPUs at once. If a table was saved as a whole, TensorFlow reads all of it to
  cut out a part;
- a variable is saved without a copy of it. TensorFlow makes one on the variable's device if a step
  has updated some rows: the op that turns this off is in the graph, but nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec, machine_of
from estimator_mgpu.partition.towers.op_devices import device_of
from estimator_mgpu.tf_internals import function_calls, op_types, private


class _Restore(NamedTuple):
    """How variables are restored by one op."""

    read: tf.Operation
    between: Sequence[tf.Operation]  # those that pass on what was read
    assigns: Sequence[tf.Operation]


def save_and_restore_in_place(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold change how the graph saves and restores, once it has a saver."""
    finalize = scaffold.finalize

    def finalize_and_change() -> Any:
        result = finalize()
        graph = tf.get_default_graph()
        _save_without_copies(graph)
        _restore_in_place(graph)
        return result

    scaffold.finalize = finalize_and_change
    return scaffold


def _save_without_copies(graph: tf.Graph) -> None:
    for op in graph.get_operations():
        if op.type == op_types.DISABLE_COPIES:
            scope = op.name.rpartition('/')[0]
            for read in op.inputs[0].consumers():
                is_of_scope = read.name.rpartition('/')[0] == scope
                if is_of_scope and read.type == op_types.READ_VARIABLE:
                    _wait_for(read, op)


def _restore_in_place(graph: tf.Graph) -> None:
    # By the machine and the file, the op that reads parts from it.
    last: dict[tuple[str, str], tf.Operation] = {}
    for op in graph.get_operations():
        restore = _restore_of(op) if op.type == op_types.CHECKPOINT_READ else None
        if restore is None:
            continue
        _place(restore)
        if _reads_parts(op):
            key = machine_of(op.device), _file_of(op)
            if key in last:
                _wait_for(op, last[key])
            last[key] = op


def _wait_for(op: tf.Operation, before: tf.Operation) -> None:
    """Lets an op wait for another one, unless it does: a scaffold is finalized for each session."""
    if before not in op.control_inputs:
        function_calls.let_wait(op, [before])


def _restore_of(read: tf.Operation) -> _Restore | None:
    """How all that is read is assigned to variables; None if any of it is used in another way."""
    between: list[tf.Operation] = []
    assigns: list[tf.Operation] = []
    for tensor in read.outputs:
        consumers = tensor.consumers()
        while len(consumers) == 1 and consumers[0].type in op_types.VIEWS:
            between.append(consumers[0])
            consumers = consumers[0].outputs[0].consumers()
        assigns += consumers
    if any(op.type not in op_types.ASSIGNS for op in assigns):
        return None
    return _Restore(read, between, assigns)


def _place(restore: _Restore) -> None:
    """Restores variables on their device, if that is one CPU, of the machine that reads them."""
    devices = {device_of(assign) or '' for assign in restore.assigns}
    if len(devices) != 1:
        return
    [device] = devices
    is_near = machine_of(device) == machine_of(restore.read.device)
    if device and is_near and device_spec(device).device_type == 'CPU':
        for op in [restore.read, *restore.between]:
            if op.device != device:
                private.set_device(op, device)


def _reads_parts(read: tf.Operation) -> bool:
    """Whether any tensor that is read is a part of a variable."""
    slices = private.constant_value(read.inputs[2])
    return slices is not None and any(slices.tolist())


def _file_of(read: tf.Operation) -> str:
    """The path, if the graph knows it, as that of a warm start; or the tensor that has it."""
    tensor = read.inputs[0]
    if tensor.op.type == op_types.CONST:
        return str(private.constant_value(tensor))
    return tensor.name
