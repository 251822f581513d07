"""Which ops have a kernel on a GPU, and where the others run: on the host beside it.

Whether there is a kernel depends on the type of an op and on its attributes: a GPU can concatenate
floats, but no strings. TensorFlow lists the kernels that it has registered, also on a machine
without a GPU.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec, host_of
from estimator_mgpu.tf_internals import function_calls, private

# The types or texts that a kernel takes for an attribute, by the attribute's name.
Constraints = Mapping[str, frozenset[Any]]


def device_for(node: Any, device: str, graph: tf.Graph | None = None) -> str:
    """Returns a device, or the host beside it if an op has no kernel there.

    Args:
      node: a NodeDef.
      device: where the op is meant to run.
      graph: that has the functions which the op calls, if their ops have to have a kernel, too.
    """
    if not is_gpu(device) or has_gpu_kernel(node, graph):
        return device
    return host_of(device)


def has_gpu_kernel(node: Any, graph: tf.Graph | None = None) -> bool:
    """Whether GPUs have a kernel for a NodeDef; with a graph, also for the functions it calls.

    It's True for what isn't known: in a TensorFlow without GPU support, and of calls of functions
    by their names, which have no kernel anywhere.
    """
    if not _knows_gpus() or not private.registered_kernels(node.op).kernel:
        return True
    # TensorFlow takes a default kernel if a GPU has none of its own.
    if not any(
        _takes(constraints, node)
        for kind in ('GPU', 'DEFAULT')
        for constraints in _constraints(node.op, kind)
    ):
        return False
    if graph is None:
        return True
    return all(
        has_gpu_kernel(inner, graph)
        for called in function_calls.called_functions(node)
        for inner in function_calls.definition_of(graph, called.name).node_def
    )


def place(nodes: Sequence[Any]) -> None:
    """Moves the NodeDefs on GPUs that have no kernel there to the host beside them.

    What uses a handle, of a TensorArray say, moves with all others that use it.
    """
    without_kernel = [node for node in nodes if is_gpu(node.device) and not has_gpu_kernel(node)]
    if not without_kernel:
        return
    users = _users_of_handles(nodes)
    moved: set[str] = set()
    while without_kernel:
        node = without_kernel.pop()
        if node.name not in moved:
            moved.add(node.name)
            node.device = host_of(node.device)
            without_kernel += users[node.name]


def _users_of_handles(nodes: Sequence[Any]) -> Mapping[str, list[Any]]:
    """For each NodeDef, by its name, those that give it a handle, and those that it gives one."""
    by_name = {node.name: node for node in nodes}
    users = defaultdict[str, list[Any]](list)
    for node in nodes:
        for operand in node.input:
            name, _, index = operand.partition(':')
            source = by_name.get(name)
            if source is not None and _is_handle(source, int(index or 0)):
                users[name].append(node)
                users[node.name].append(source)
    return users


def _is_handle(node: Any, index: int) -> bool:
    """Whether an output of a NodeDef is a handle."""
    outputs = private.op_definition(node.op).output_arg
    if index >= len(outputs):  # It's one of a list.
        return False
    output = outputs[index]
    # Asking for an attribute that isn't there would add it to the NodeDef.
    type_of_output = node.attr[output.type_attr].type if output.type_attr else output.type
    return type_of_output == tf.resource.as_datatype_enum


@functools.cache
def is_gpu(device: str) -> bool:
    """Whether a device is a GPU."""
    return bool(device) and device_spec(device).device_type == 'GPU'


@functools.cache
def _knows_gpus() -> bool:
    return tf.test.is_built_with_gpu_support()


@functools.cache
def _constraints(op_type: str, kind: str) -> Sequence[Constraints]:
    """What each kernel for a kind of device takes, of those that are used without being named."""
    return [
        {one.name: frozenset(_entries(one.allowed_values)) for one in kernel.constraint}
        for kernel in private.registered_kernels(op_type).kernel
        if kernel.device_type == kind and not kernel.label
    ]


def _takes(constraints: Constraints, node: Any) -> bool:
    """Whether the attributes of a NodeDef are among those that a kernel takes."""
    for name, allowed in constraints.items():
        value = node.attr[name] if name in node.attr else _default(node.op, name)
        if not allowed.issuperset(_entries(value)):
            return False
    return True


def _entries(value: Any) -> Sequence[Any]:
    """The types or texts of an AttrValue, be it a list or not."""
    entries = [*value.list.type, *value.list.s]
    kind = value.WhichOneof('value')
    return entries if kind in (None, 'list') else [getattr(value, kind)]


@functools.cache
def _default(op_type: str, name: str) -> Any:
    """The value of an attribute that a NodeDef leaves out."""
    [attr] = [attr for attr in private.op_definition(op_type).attr if attr.name == name]
    return attr.default_value
