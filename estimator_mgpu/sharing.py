"""What towers share and what each has its own of.

A copy of tower 0 has its own ops wherever that's possible. Three kinds are shared:

- what makes a handle that outlives a step: variables, hash tables, iterators, queues;
- placeholders and plain reads of variables;
- writes to any of these, which happen once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.walks import walk

_PLACEHOLDERS = frozenset(['Placeholder', 'PlaceholderV2'])
# Handles that live for one step, so each tower has its own.
_PER_STEP = ('TensorArray', 'Stack')
# Python functions, which may keep what they're given.
PYTHON_FUNCTIONS = frozenset(['PyFunc', 'EagerPyFunc'])
_VARIABLES = frozenset(
    ['VarHandleOp', 'VarHandlesOp', 'Variable', 'VariableV2', 'TemporaryVariable']
)
# Ops that only pass a handle on.
_PASSING = frozenset(
    ['Identity', 'Enter', 'RefEnter', 'Switch', 'RefSwitch', 'Merge', 'RefMerge', 'Exit']
    + ['RefExit', 'NextIteration', 'RefNextIteration', 'RefIdentity', 'IdentityN']
)
# Stateful ops that take a handle and don't change what it stands for. The random ones do advance
# a generator; each tower does so by itself, for numbers of its own.
_READS = frozenset(
    ['ReadVariableOp', 'ResourceGather', 'ResourceGatherNd', 'VariableShape', 'VarIsInitializedOp']
    + ['LookupTableFind', 'LookupTableFindV2', 'LookupTableSize', 'LookupTableSizeV2']
    + ['LookupTableExport', 'LookupTableExportV2']
    + ['RngReadAndSkip', 'StatefulRandomBinomial', 'StatefulStandardNormal']
    + ['StatefulStandardNormalV2', 'StatefulTruncatedNormal', 'StatefulUniform']
    + ['StatefulUniformFullInt', 'StatefulUniformInt', 'ResourceCountUpTo']
)


class _Traits(NamedTuple):
    """What an op's type alone says."""

    stateful: bool
    takes_handle: bool  # a resource or a v1 variable, to be given as such
    takes_ref: bool
    calls_function: bool


@functools.cache
def _traits(op_type: str) -> _Traits:
    op_def = private.op_def(op_type)
    if op_def is None:  # The op's type is the name of a function that it calls.
        return _Traits(True, False, False, True)
    refs = any(arg.is_ref for arg in op_def.input_arg)
    return _Traits(
        stateful=op_def.is_stateful,
        takes_handle=refs
        or any(arg.type == tf.resource.as_datatype_enum for arg in op_def.input_arg),
        takes_ref=refs,
        calls_function=any(attr.type in ('func', 'list(func)') for attr in op_def.attr),
    )


def is_shared(op: tf.Operation) -> bool:
    """Whether all towers use this very op rather than copies of it."""
    if op.type in _PLACEHOLDERS or makes_handle(op) or is_write(op):
        return True
    return is_plain_read(op)


def is_plain_read(op: tf.Operation) -> bool:
    """Whether an op reads a whole variable, outside of any loop or branch."""
    if op.type in ('ReadVariableOp', 'Identity') and len(op.inputs) == 1:
        return is_handle(op.inputs[0]) and makes_handle(op.inputs[0].op)
    return False


def makes_handle(op: tf.Operation) -> bool:
    """Whether an op makes a handle that outlives a step."""
    if op.type.startswith(_PER_STEP) or op.type in _PASSING:
        return False
    return any(is_handle(t) for t in op.outputs) and not any(is_handle(t) for t in op.inputs)


def is_write(op: tf.Operation) -> bool:
    """Whether an op changes something that outlives a step."""
    traits = _traits(op.type)
    if op.type in _READS or op.type.startswith(_PER_STEP) or traits.calls_function:
        return False
    if traits.takes_ref and op.type not in _PASSING:
        return True
    return traits.stateful and uses_shared_handle(op)


def writes_variable(op: tf.Operation) -> bool:
    """Whether a write is to variables only, rather than to a queue, a table or the like."""
    makers = [maker for t in op.inputs if is_handle(t) for maker in _makers(t).values()]
    return _VARIABLES.issuperset(makers)


def takes(op: tf.Operation) -> bool:
    """Whether an op takes from a queue, an iterator or the like what nobody gets again."""
    return bool(op.outputs) and is_write(op) and not writes_variable(op)


def is_write_type(op_type: str) -> bool:
    """Whether ops of a type change what the handles they're given stand for."""
    traits = _traits(op_type)
    if op_type in _READS or op_type.startswith(_PER_STEP) or traits.calls_function:
        return False
    return traits.stateful and traits.takes_handle


def uses_shared_handle(op: tf.Operation) -> bool:
    """Whether an op is given a handle that outlives a step."""
    return bool(shared_handles(op))


def shared_handles(op: tf.Operation) -> set[str]:
    """Returns the names of the ops that made the handles an op is given, if they outlive a step."""
    return set().union(*(_makers(t) for t in op.inputs if is_handle(t)))


def calls_function(op: tf.Operation) -> bool:
    """Whether an op runs a function: a v2 loop or branch, or a `tf.function`'s call."""
    return _traits(op.type).calls_function


def is_pure(op: tf.Operation) -> bool:
    """Whether an op does nothing but compute its outputs from its inputs."""
    traits = _traits(op.type)
    return not traits.stateful and not traits.calls_function


def stays_with_variable(op: tf.Operation) -> bool:
    """Whether an op has to be on the device of a variable that it uses."""
    return not calls_function(op) and uses_shared_handle(op)


def is_handle(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a resource handle or a v1 variable itself."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype


def _makers(handle: tf.Tensor) -> dict[str, str]:
    """Follows a handle back through loops and branches to the ops for which `makes_handle`.

    Returns:
      These ops' types, by name.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in op.inputs if is_handle(t)] if op.type in _PASSING else []

    return {op.name: op.type for op in walk([handle.op], onward) if makes_handle(op)}
