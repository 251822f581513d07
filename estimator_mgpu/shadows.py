"""Variables of a tower's own, for functions that write to a variable and read it, too.

Writes happen once, in tower 0. A function of another tower that reads what it would have written,
or what tower 0 is about to write, finds that in a copy of the variable, which it may write to.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.functions import Library


def of_call(
    op: tf.Operation, library: Library, scopes: Sequence[str]
) -> list[dict[str, tf.Tensor]]:
    """Makes towers' own variables for a call, a loop or a branch that needs them.

    Args:
      op: tower 0's.
      library: the graph's functions.
      scopes: each tower's name scope.

    Returns:
      For each tower, other handles by the names of tower 0's.
    """
    made: list[dict[str, tf.Tensor]] = [{} for _ in scopes]
    if private.in_control_flow(op):
        return made
    written, read = library.uses(op.node_def)
    handles = {op.inputs[i].name: op.inputs[i] for i in sorted(written)}
    known = all(handle.op.type == 'VarHandleOp' for handle in handles.values())
    if not (written & read and known):
        return made
    # The values that tower 0's call finds: it waits for these, and they for all that it does.
    before = [*op.control_inputs, *(t.op for t in op.inputs)]
    for name, handle in handles.items():
        dtype, shape = handle.op.get_attr('dtype'), handle.op.get_attr('shape')
        with tf.control_dependencies(before), tf.device(handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        private.add_control_inputs(op, [value.op])
        for scope, own in zip(scopes, made):
            # Handles that go to one function have to be on one device.
            with tf.name_scope(f'{scope}/'), tf.device(handle.device):
                shared_name = f'{scope}/{op.name}/{handle.op.name}'
                shadow = tf.raw_ops.VarHandleOp(
                    dtype=dtype, shape=shape, shared_name=shared_name, name='shadow'
                )
                filled = tf.raw_ops.AssignVariableOp(resource=shadow, value=value)
                with tf.control_dependencies([filled]):
                    own[name] = tf.identity(shadow)
    return made
