"""Where variables live, by `replicate(variables=...)`: spread over the devices by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import HOST, host_of, machine_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.tf_internals import function_calls, graphs, kernels, op_types, private
from estimator_mgpu.tf_internals.effects import maker_of_state

Variables = Literal['cpu', 'first', 'spread']  # where they are placed


def place_variables(choice: Variables, devices: Sequence[str], existing_ops: Set[str]) -> None:
    """Places a model's variables on devices, but for those that have one already.

    Slots such as Adam's moments go with their variable, and so does any variable whose name begins
    with another one's. The variables of a function that XLA compiles are together, as the compiled
    function can use those of one device only. A reference variable that is used in a loop of
    TensorFlow 1 is on the first device: if the loop runs once, then all of it does so there. A loop
    that has ops on two devices never ends if one of them is given a reference. TensorFlow itself
    places what else has to be where a variable is. If a GPU has no kernel for one of these ops, the
    variable is on the host beside it: an update of rows by RMSProp, say.

    Args:
      choice: as for `replicate()`.
      devices: one for each tower, or for each parameter server.
      existing_ops: names of ops that were there before the model_fn: their variables stay.
    """
    variables = [
        variable
        for variable in tf.global_variables() + tf.local_variables()
        if variable.op.name not in existing_ops and not variable.device
    ]
    names = {variable.op.name for variable in variables}
    groups: dict[str, list[Any]] = {}  # of variables that are placed together
    for variable in variables:
        groups.setdefault(_leader(variable, names), []).append(variable)
    together = _variables_used_together()
    in_loops = _reference_variables_of_loops()
    not_on_gpus = _variables_without_gpu_kernels(devices)
    for used in together:
        _join_groups(groups, {op.name for op in used})

    load: Counter[str] = Counter()  # bytes, of devices and of machines
    # The largest first: so the bytes are spread most evenly.
    for group in sorted(groups.values(), key=_bytes_of_group, reverse=True):
        placed = [op for op in _used_with(group, together) if op.name not in names]
        if placed:
            device = placed[0].device or devices[0]
        else:
            is_in_loop = any(variable.op in in_loops for variable in group)
            device = _device_for(group, choice, [devices[0]] if is_in_loop else devices, load)
        if any(variable.op in not_on_gpus for variable in group):
            device = host_of(device)
        load[device] += _bytes_of_group(group)
        load[machine_of(device)] += _bytes_of_group(group)
        for variable in group:
            private.set_device(variable.op, device)


def _variables_used_together() -> list[list[tf.Operation]]:
    """For each call that needs its variables on one device, these."""
    return [
        [tensor.op for tensor in op.inputs if tensor.op.type in op_types.STATE_HOLDERS]
        for op in graphs.ops_of_types(tf.get_default_graph(), op_types.FUNCTION_CALLERS)
        if function_calls.calls_compiled(op) or _returns_variables(op)
    ]


def _returns_variables(op: tf.Operation) -> bool:
    """Whether a function returns variables: TensorFlow then puts all that it's given on one device.

    One that is differentiated returns those of its loops.
    """
    is_call = op.type in op_types.PARTITIONED_CALLS
    return is_call and any(output.dtype == tf.resource for output in op.outputs)


def _reference_variables_of_loops() -> set[tf.Operation]:
    """The variables that enter loops of TensorFlow 1 as references, not as values.

    An assignment gives a reference, too: a loop that waits for one, as it was made under
    `tf.control_dependencies()`, is given it.
    """
    enters = graphs.ops_of_types(tf.get_default_graph(), op_types.ENTER)
    operands = [op.inputs[0] for op in enters]
    return {maker_of_state(tensor) for tensor in operands if graphs.is_reference_variable(tensor)}


def _variables_without_gpu_kernels(devices: Sequence[str]) -> set[tf.Operation]:
    """The variables with which an op has to be that has no kernel on GPUs; none without GPUs."""
    variables: set[tf.Operation] = set()
    if not any(map(kernels.is_gpu, devices)):
        return variables
    graph = tf.get_default_graph()
    for op in graph.get_operations():
        node = op.node_def
        if not kernels.has_gpu_kernel(node):
            variables.add(op)
            variables.update(map(graph.get_operation_by_name, graphs.colocated_with(op)))
        takes_references = any(arg.is_ref for arg in op.op_def.input_arg)
        for index in _operands_without_gpu_kernels(node, graph):
            tensor = op.inputs[index]
            # A reference that is only read needn't be on the same device.
            if graphs.is_handle(tensor) and (tensor.dtype == tf.resource or takes_references):
                variables.add(maker_of_state(tensor))
    return variables


def _operands_without_gpu_kernels(node: Any, graph: tf.Graph) -> set[int]:
    """Which operands of a NodeDef are given to an op that has no kernel on GPUs.

    That is the NodeDef's, or one of the functions that it calls: other ops of these may run on
    another device than the one that uses a variable.
    """
    operands = [name for name in node.input if not name.startswith('^')]
    if not kernels.has_gpu_kernel(node):
        return set(range(len(operands)))
    found = set()
    for called in function_calls.called_functions(node):
        definition = function_calls.definition_of(graph, called.name)
        # The last operands are the arguments: before them, there may be a condition.
        arguments = definition.signature.input_arg
        first = len(operands) - len(arguments)
        index_of = {argument.name: first + i for i, argument in enumerate(arguments)}
        for inner in definition.node_def:
            for index in _operands_without_gpu_kernels(inner, graph):
                if inner.input[index] in index_of:
                    found.add(index_of[inner.input[index]])
    return found


def _used_with(
    group: Sequence[Any], together: Sequence[Sequence[tf.Operation]]
) -> list[tf.Operation]:
    """The variables that have to be on the device of one of a group."""
    of_group = {variable.op for variable in group}
    return [op for used in together if of_group.intersection(used) for op in used]


def _join_groups(groups: dict[str, list[Any]], names: set[str]) -> None:
    """Makes the groups one that have a variable of these names."""
    leaders = [
        leader
        for leader, group in groups.items()
        if any(variable.op.name in names for variable in group)
    ]
    for leader in leaders[1:]:
        groups[leaders[0]] += groups.pop(leader)


def _bytes_of_group(group: Sequence[Any]) -> int:
    return sum(bytes_of(variable) for variable in group)


def _device_for(
    group: Sequence[Any], choice: Variables, devices: Sequence[str], load: Counter[str]
) -> str:
    """The device for some variables; spread, the one that has the fewest bytes so far."""
    if choice == 'cpu':
        return HOST
    is_trained = any(variable.trainable for variable in group)
    if choice == 'first' or not is_trained:
        return devices[0]  # Towers don't need counters, metrics and moving averages.
    return min(devices, key=lambda device: (load[device], load[machine_of(device)]))


def _leader(variable: Any, names: set[str]) -> str:
    """The name of the variable that another one is placed with: its own, if there is none.

    It's one that the variable is colocated with, or whose name is above it: `w` for `w/Adam`.
    """
    name = variable.op.name
    parts = name.split('/')
    names_above = ['/'.join(parts[:count]) for count in range(1, len(parts))]
    for candidate in [*graphs.colocated_with(variable.op), *names_above]:
        if candidate in names and candidate != name:
            return candidate
    return name
