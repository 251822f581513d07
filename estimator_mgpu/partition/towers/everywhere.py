r"""Small values of the batch that every device makes for itself, from what all towers have.

A tower may need what the examples of all towers come to, as batch normalization needs a mean. If
one device made it, it would arrive after two messages, one after the other. Small values are sent
by each device to each other one instead, so there is one:

    tower 0:  its mean --> mean of all          tower 0:  its mean --> mean of all
                     ^   \                                        \ /
                    /     v            =>                         / \
    tower 1:  its mean    mean of all           tower 1:  its mean --> mean of all

Ops that run once lead from such values to others, as from a variance to a standard deviation. Each
device has a copy of these, too. All devices compute the same, in the same order. But devices of
different kinds may round differently, so only floats are made on each: what is counted or decided,
such as which branch is taken, is made once.

In: a tensor that towers need in full, and a device. Out: its value, made there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import machine_of, memory_of, relay
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.messages.packing import Pack, is_always_there
from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import FULL
from estimator_mgpu.partition.rewrites.copied_reads import copy_for_reads
from estimator_mgpu.partition.towers.function_copies import ATTRS_OF_GLOBAL_BATCH
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.partition.towers.values import Values
from estimator_mgpu.partition.towers.waits import Waits
from estimator_mgpu.tf_internals import op_types, private

_SMALL = 1 << 16  # bytes: sending more costs more than the time of a message
_MOST_OPS = 32  # that lead to a value: each device has a copy of them
_MOST_DEVICES = 16  # of a machine: n of them send n * (n - 1) messages


def copy_small_references(division: Division) -> None:
    """Gives copies of reference variables to the ops of which each device may have its own.

    These lead from sums to small values that towers need. An op that reads a variable's memory runs
    once, before the write. With a copy it only computes, as with a resource variable's value.
    """
    order = division.order
    if not order.late_reads or not _devices_make_their_own(division):
        return
    of_batch = set(division.plan.order)
    sent = set()
    for op in _small_and_needed(division, of_batch):
        sent |= {tensor.name for tensor in filter(order.variables_behind, op.inputs)}

    def is_given_copies(op: tf.Operation) -> bool:
        """Whether an op reads what is copied, and nothing else of which there is no copy.

        Sharded ops do, too: otherwise the variable would be sent beside its copy. What is read
        after an update depends on the batch, as the plan knows, and isn't copied.
        """
        read = list(filter(order.variables_behind, op.inputs))
        are_copied = all(_is_small(tensor) and tensor.op not in of_batch for tensor in read)
        return are_copied and any(tensor.name in sent for tensor in read)

    copy_for_reads(division.graph, order, is_given_copies)


def _small_and_needed(division: Division, of_batch: Set[tf.Operation]) -> set[tf.Operation]:
    """The ops that run once, and lead from the batch to small values that towers need."""
    plan = division.plan
    found: set[tf.Operation] = set()
    sharded = {division.graph.get_operation_by_name(name): plan.ops[name] for name in plan.ops}
    stack = [
        tensor
        for op, op_plan in sharded.items()
        for tensor, need in zip(op.inputs, op_plan.needs)
        if need == FULL
    ]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if op in of_batch and op not in sharded and op not in found and _is_small(tensor):
            found.add(op)
            stack += op.inputs
    return found


def _devices_make_their_own(division: Division) -> bool:
    """Whether devices have memory of their own, and aren't too many to send to each other."""
    devices = set(division.devices)
    # What logical CPU devices share is made once.
    is_shared = len(set(map(memory_of, devices))) == 1
    return not is_shared and len(devices) <= _MOST_DEVICES * len(set(map(machine_of, devices)))


def find_small(
    division: Division, origins: Origins, packs: Mapping[str, Pack], waits: Waits
) -> dict[str, frozenset[tf.Operation]]:
    """Finds the small values that every device may make for itself.

    Args:
      origins: tells which full values are made from what towers have.
      packs: those of tensors that share messages with others anyhow, by name.
      waits: what the user's ops wait for.

    Returns:
      The ops that lead from partial results to each of them, by its name.
    """
    if not _devices_make_their_own(division):
        return {}

    plan = division.plan
    behind: dict[str, frozenset[tf.Operation]] = {}
    for op in plan.order:
        before = [behind[operand.name] for operand in op.inputs if operand.name in behind]
        ops = frozenset([op]).union(*before)
        is_copied = before and len(ops) <= _MOST_OPS and _can_be_copied(op, division, waits)
        for tensor in filter(_is_small, op.outputs):
            if isinstance(plan.placements.get(tensor.name), Partial):
                if origins.is_made_from_all(tensor) and tensor.name not in packs:
                    behind[tensor.name] = frozenset()
            elif is_copied:
                behind[tensor.name] = ops
    return behind


def packs_of_ops(division: Division, small: Collection[str]) -> dict[str, Pack]:
    """The partial sums of one op that share a message to each device, by their names.

    Such are the two that the gradient of batch normalization needs.

    Args:
      division: the graph, and its plan, which says what ops give.
      small: the names of the values that devices may make.
    """
    packs: dict[str, Pack] = {}
    if not small:
        return packs
    plan = division.plan
    for op in plan.order:
        sums = defaultdict[Hashable, list[tf.Tensor]](list)
        for tensor in op.outputs:
            placement = plan.placements.get(tensor.name)
            if not isinstance(placement, Partial) or placement.reduce != 'sum':
                continue
            is_there = is_always_there(tensor, division.order.liveness)
            if is_there and tensor.name in small and tensor.consumers() and tensor.shape.rank:
                sums[placement.rows, tensor.dtype].append(tensor)
        for tensors in sums.values():
            if len(tensors) > 1:
                packs.update(dict.fromkeys([one.name for one in tensors], Pack(tensors)))
    return packs


def _can_be_copied(op: tf.Operation, division: Division, waits: Waits) -> bool:
    """Whether an op that runs once only computes, whenever its operands are there."""
    order = division.order
    return (
        op.name not in division.plan.ops
        and not order.bits(op)
        and not waits.of_op(op)
        and not waits.added(op)
        and op.type not in op_types.FUNCTION_CALLERS
        and not order.liveness.is_in_loop(op)
        and not order.liveness.may_be_dead(op)
    )


class Everywhere:
    """Makes small values on every device that needs them.

    Args:
      small: those that may be made on every device, as `find_small` gives them.
      values: local and full ones.
    """

    def __init__(self, small: Mapping[str, frozenset[tf.Operation]], values: Values):
        self._behind = small
        self._plan = values.division.plan
        self._values = values
        self._nodes = values.nodes
        self._devices = list(dict.fromkeys(values.division.devices))
        self._machines = {machine_of(device) for device in self._devices}
        self._made: dict[tuple[str, str], str] = {}  # by the names of tensors, and by device

    def value(self, tensor: tf.Tensor, device: str) -> str | None:
        """The value of a tensor that a device has made; None if it's made on one device only."""
        if tensor.name not in self._behind:
            return None
        return self._made_on(tensor, self._maker(tensor, device))

    def _maker(self, tensor: tf.Tensor, device: str) -> str:
        """The device that makes a value: of several machines, one for all devices of a machine."""
        if len(self._machines) == 1:
            return device
        home = self._values.origins.device_of_full(tensor) or self._devices[0]
        return relay(self._devices, device, home) or home

    def _made_on(self, tensor: tf.Tensor, device: str) -> str:
        """The value of a tensor: made on this device, if partial results lead to it."""
        if tensor.op.type == op_types.CONST and _is_small(tensor):
            return self._nodes.copy_of_constant(tensor.op, device)
        if tensor.name not in self._behind or self._is_made_there(tensor, device):
            return self._values.full(tensor)
        key = tensor.name, device
        if key not in self._made:
            with self._nodes.serving(tensor.op):
                if isinstance(self._plan.placements.get(tensor.name), Partial):
                    self._made[key] = self._values.reduced_on(tensor, device, is_for_all=True)
                else:
                    self._copy(tensor.op, device)
        return self._made[key]

    def _is_made_there(self, tensor: tf.Tensor, device: str) -> bool:
        """Whether a tensor's one value is on a device, with all that leads to it."""
        places = {device_of(op) for op in self._behind[tensor.name]}
        places.add(self._values.origins.device_of_full(tensor))
        return places == {device}

    def _copy(self, op: tf.Operation, device: str) -> None:
        """Adds a device's copy of an op that runs once."""
        operands = [self._made_on(operand, device) for operand in op.inputs]
        number = self._devices.index(device)
        name = self._nodes.names.added(op.name, f'device_{number}/{op.name.rpartition("/")[2]}')
        index = private.creation_index(op)  # as ops of other scopes may be called the same
        node = self._nodes.copy(op.node_def, f'{name}_{index}', operands, device)
        for attr in ATTRS_OF_GLOBAL_BATCH:
            node.attr.pop(attr, None)
        for output in op.outputs:
            self._made[output.name, device] = f'{node.name}:{output.value_index}'


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether a tensor has few floats."""
    is_known = tensor.shape.is_fully_defined() and tensor.dtype.is_floating
    return is_known and bytes_of(tensor) <= _SMALL
