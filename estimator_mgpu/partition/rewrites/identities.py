"""Identities that only make their users wait are bypassed.

Three things let a tensor wait for others from which it isn't computed:

- `tf.gradients` ties the gradients of an op together by a `tf.tuple`: a group that waits for all of
  them, and an entry for each, which waits for the group.
- `tf.custom_gradient` ends in an `IdentityN` of all its gradients.
- `with tf.control_dependencies([assertion]): x = tf.identity(x)`.

    gradient a ---+-------------> entry a --> user        gradient a --> user
                  |                 ^
                  +---> group ------+                =>
                  |                 v
    gradient b ---+-------------> entry b --> user        gradient b --> user

As the gradients of the loss are tied as well, no tower could begin with its gradients before all
towers have their losses. Side effects that the identities waited for, and reads that have to come
before writes, keep their order by `towers.waits`.

One kind of identity stays: that between the gradient of a convolution's output and the gradient of
its kernel. It waits for the gradient of the bias only. If the gradients of kernel and bias used the
same tensor, TensorFlow would let oneDNN compute both by one op on CPUs, which takes 1.05 to 1.9
times as long as the two. Of a model of six convolutions with biases on two CPU devices, a step
would take 1.03 to 1.05 times the CPU time, and 1.7 times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.rewrites.copied_reads import copy_for_idle_reads
from estimator_mgpu.tf_internals import graphs, op_types, private


def bypass_identities(division: Division) -> None:
    """Lets the users of identities that wait for something use the identities' inputs.

    The identities stay in the graph, for whoever fetches them. Some stay in use: those in v1
    control flow, those of the number of examples, which wait for the check that all features and
    labels have as many, and those before the gradient of a convolution's kernel, as said above.
    """
    order = division.order
    ops_of_total = division.ops_of_total()
    identities = [
        op
        for op in division.model_ops((op_types.IDENTITY, op_types.IDENTITY_N))
        if op not in ops_of_total and _only_waits(op, order)
    ]
    copy_for_idle_reads(division.graph, set(identities), order)

    before_kernels = dict.fromkeys(filter(_is_before_gradient_of_kernel, identities))
    _bypass(division, [op for op in identities if op not in before_kernels])
    # Those before gradients of kernels come last: then it's known which tensors others use.
    for op in before_kernels:
        users_of_input = op.inputs[0].consumers()
        bias_gradients = [user for user in users_of_input if user.type == op_types.BIAS_GRADIENT]
        if bias_gradients:
            graphs.set_control_inputs(op, bias_gradients)
        else:
            _bypass(division, [op])


def _bypass(division: Division, identities: Sequence[tf.Operation]) -> None:
    """Lets the users of identities use what these are given, and wait for that."""
    redirections = graphs.Redirections()
    for op in identities:
        sources = [redirections.in_place_of(operand) for operand in op.inputs]
        redirections.add_wait(op, sources[0].op)
        for output, source in zip(op.outputs, sources):
            redirections.add(output, source)
            division.replaced[output.name] = source
    redirections.make()


def find_unused_ops(division: Division) -> None:
    """Finds the ops in whose place others are used, and groups for which only such ops wait."""
    division.unused |= {name.partition(':')[0] for name in division.replaced}
    groups = set()
    for op in division.model_ops([op_types.NO_OP]):
        users = {user.name for user in private.control_consumers(op)}
        if users and users <= division.unused:
            groups.add(op.name)
    division.unused |= groups


def _only_waits(op: tf.Operation, order: Order) -> bool:
    """Whether an identity is of values, and is there later than these."""
    if not order.liveness.always_runs(op):
        return False
    if any(operand.dtype in (tf.resource, tf.variant) for operand in op.inputs):
        return False
    if op.type == op_types.IDENTITY_N:
        return not op.control_inputs
    # An identity that reads a variable's memory reads it when it does.
    return bool(op.control_inputs) and not order.bits(op)


def _is_before_gradient_of_kernel(op: tf.Operation) -> bool:
    """Whether an identity gives a convolution's gradient to the gradient of the kernel."""
    users = op.outputs[0].consumers()
    return any(user.type == op_types.CONVOLUTION_KERNEL_GRADIENT for user in users)
