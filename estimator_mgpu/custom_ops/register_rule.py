"""`register_rule()`: how ops of a type are sharded that the package doesn't know."""

from __future__ import annotations

from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.notation import Rule, parse

_KNOWN = frozenset(RULES)


def register_rule(op_type: str, rule: Rule) -> None:
    """Says how ops of a type are divided, which otherwise run once, on the whole batch.

    Not for ops that have effects, or state of their own: each tower runs one.

    Examples:
      >>> register_rule('MyGelu', 'elementwise')
      >>> register_rule('MyLayerNorm', 'S_ * * -> S_')
      >>> register_rule('MySort', lambda op, sizes: 'n_ -> n_' if op.get_attr('axis') else None)

    Args:
      op_type: as in `op.type`, and in C++ in `REGISTER_OP`.
      rule: the name of a family: 'elementwise' (of any number of inputs, with broadcasting),
        'row by row' (of one input, rows first), 'last dimension' (each vector by itself), 'sum'
        (over rows) or 'matmul'. Or what these stand for, a text with a word for each input and each
        output, and in it a letter for each dimension; `*` is whole on each device. Or a function
        (op, sizes) -> such a text, or None where the op can't be divided. `check_rule` tries it.

    Raises:
      ValueError: for a text that isn't a rule, or a type that the package has a rule for.
    """
    if not isinstance(op_type, str) or not (isinstance(rule, str) or callable(rule)):
        raise TypeError(f'{op_type!r}, {rule!r}: give a type by name, and a text or a function.')
    if op_type in _KNOWN:
        raise ValueError(f'{op_type} has a rule already. Register one for a type that has none.')
    if isinstance(rule, str):
        parse(rule)
    RULES[op_type] = rule
