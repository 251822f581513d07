"""Which ops have a kernel on a GPU, and where the others run: on the host beside it.

Whether there is a kernel depends on the type of an op and on its attributes: a GPU can concatenate
floats, but no strings. Some kernels take or give a tensor in the memory of the host, as all do with
a shape. TensorFlow lists the kernels that it has registered, also on a machine without a GPU.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec, host_of
from estimator_mgpu.tf_internals import function_calls, op_types, private
from estimator_mgpu.tf_internals.node_defs import attr_of, types_of


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
    knows_gpus = tf.test.is_built_with_gpu_support()
    if not knows_gpus or not private.registered_kernels(node.op).kernel:
        return True
    if _kernel(node) is None:
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


def inputs_on_host(node: Any) -> list[bool]:
    """For each input of a NodeDef, whether it's taken in the memory of the host.

    What a kernel on a GPU takes there is copied from the GPU if it was made on it, and the GPU
    waits for that.
    """
    return _on_host(node, private.op_definition(node.op).input_arg)


def outputs_on_host(node: Any) -> list[bool]:
    """For each output of a NodeDef, whether it's given in the memory of the host."""
    return _on_host(node, private.op_definition(node.op).output_arg)


def _on_host(node: Any, arguments: Iterable[Any]) -> list[bool]:
    """For each tensor of arguments of a NodeDef's op, whether it's in the memory of the host."""
    is_gpus = is_gpu(node.device)
    kernel = _kernel(node) if is_gpus else None
    always = [tf.string, tf.resource]
    if node.op in op_types.FUNCTION_CALLERS:
        always.append(tf.int32)  # Most ops of which functions consist keep it there.
    is_on_host: list[bool] = []
    for argument in arguments:
        is_named = kernel is not None and argument.name in kernel.on_host
        for dtype in types_of(node, argument):
            is_on_host.append(not is_gpus or is_named or dtype in always)
    return is_on_host


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
    type_of_output = attr_of(node, output.type_attr).type if output.type_attr else output.type
    return type_of_output == tf.resource.as_datatype_enum


@functools.cache
def is_gpu(device: str) -> bool:
    """Whether a device is a GPU."""
    return bool(device) and device_spec(device).device_type == 'GPU'


class Kernel(NamedTuple):
    """A kernel for a kind of device.

    Attributes:
      constraints: the types or texts that it takes for an attribute, by the attribute's name.
      on_host: the names of inputs and outputs that it has in the memory of the host.
    """

    constraints: Mapping[str, frozenset[Any]]
    on_host: frozenset[str]


def _kernel(node: Any) -> Kernel | None:
    """The kernel by which a NodeDef runs on a GPU; None if there is none."""
    # TensorFlow takes a default kernel if a device has none of its own.
    for one in [*_kernels(node.op, 'GPU'), *_kernels(node.op, 'DEFAULT')]:
        if _takes(one.constraints, node):
            return one
    return None


@functools.cache
def _kernels(op_type: str, kind: str) -> Sequence[Kernel]:
    """The kernels for a kind of device, of those that are used without being named."""
    return [
        Kernel(
            {one.name: frozenset(_entries(one.allowed_values)) for one in kernel.constraint},
            frozenset(kernel.host_memory_arg),
        )
        for kernel in private.registered_kernels(op_type).kernel
        if kernel.device_type == kind and not kernel.label
    ]


def _takes(constraints: Mapping[str, frozenset[Any]], node: Any) -> bool:
    """Whether the attributes of a NodeDef are among those that a kernel takes."""
    for name, allowed in constraints.items():
        if not allowed.issuperset(_entries(attr_of(node, name))):
            return False
    return True


def _entries(value: Any) -> Sequence[Any]:
    """The types or texts of an AttrValue, be it a list or not."""
    kind = value.WhichOneof('value')
    if kind in (None, 'list'):
        return [*value.list.type, *value.list.s]
    return [getattr(value, kind)]
