"""The rules: for each type of op, along which dimensions it can be sharded.

Comes in: an op, and the symbolic sizes of its tensors. Comes out: a `Signature`, with a label for
each dimension, or `NotSharded`. `notation` says how a rule is written. `row_indices` and `zeros`
tell rules what the graph says of a tensor. Each other module is a family of ops, with its table and
the functions for its special ops. `lists`, `tensor_arrays`, `selections`, `entries`, `ragged` and
`unique_ids` are apart: these are functions of placements.

An op whose type isn't here runs once, unsharded, which is exact: a missing rule costs parallelism,
never a number. An op that may run only once a step, such as a print, must have none: outside of
functions, nobody else asks. Rules know sizes, but no towers and no devices.
"""

from __future__ import annotations

from estimator_mgpu.partition.rules import (
    elementwise,
    entries,
    images,
    linear_algebra,
    lookups,
    neural_networks,
    random,
    reductions,
    selections,
    shapes,
    sorting,
    sparse,
    spectral,
    strings,
)
from estimator_mgpu.partition.rules.notation import Rule
from estimator_mgpu.tf_internals import op_types

# Ops worth sharding by rows that aren't the examples, such as the entries that a mask leaves. What
# is sharded so has to be gathered in the end, so cheap ops aren't: they only go on with it.
HEAVY: dict[str, Rule] = {
    **images.RULES,
    **linear_algebra.RULES,
    **neural_networks.RULES,
    **sorting.RULES,
    **sparse.RULES,
    **spectral.RULES,
}

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **lookups.RULES,
    **random.RULES,
    **reductions.RULES,
    **shapes.RULES,
    **strings.RULES,
    **HEAVY,
}

# These take the place of the same ops' rules if each device uses its own batch norm statistics.
OF_DEVICE = neural_networks.OF_DEVICE

OF_PLACEMENTS = frozenset([*selections.TYPES, *entries.TYPES])
"""Types of ops that are sharded by what towers have of their inputs, if they can be.

If they can't, the rule of the table counts, if there is one.
"""

# What `propagation` decides without a rule of the table.
_DECIDED_APART = frozenset(
    [
        *OF_PLACEMENTS,
        *op_types.SHAPE_QUERIES,
        *op_types.FUNCTION_CALLERS,
        *op_types.SWITCH,
        *op_types.MERGE,
        op_types.V1_LOOP,
    ]
)


def has_rule(op_type: str) -> bool:
    """Whether there is a way to shard ops of a type: a rule of the table, or another one."""
    is_of_list = op_type.startswith((*op_types.LIST_PREFIXES, *op_types.HANDLE_PREFIXES))
    return op_type in RULES or op_type in _DECIDED_APART or is_of_list
