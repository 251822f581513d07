"""`register_rule()`: how ops are sharded of a type that the package has no rule for.

In: a type of op that TensorFlow knows, and a rule. Out: one more entry in the table of rules, which
`partition` asks. What can be told of a rule without an op is checked here; what its text says of
dimensions, `check_rule()` tries.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules import RULES, has_rule
from estimator_mgpu.partition.rules.notation import Rule, parse, word_for_each
from estimator_mgpu.tf_internals import private
from estimator_mgpu.tf_internals.effects import is_declared_stateful

_OF_PACKAGE = frozenset(RULES)  # the types in the table before a user adds any


def register_rule(op_type: str, rule: Rule) -> None:
    """Says how ops of a type are sharded, which otherwise run once, on the global batch.

    The type has to be known to TensorFlow: load an op of your own first, by `tf.load_op_library`.
    Ops that have side effects, draw random numbers or call Python cannot have a rule.

    Examples:
      >>> register_rule('Dawsn', 'elementwise')
      >>> register_rule('Cross', 'S_ S_ -> S_')
      >>> def values_and_vectors(op, sizes):
      ...     return 'n__ -> n_ n__ n__' if op.get_attr('compute_uv') else None
      >>> register_rule('Svd', values_and_vectors)

    Args:
      op_type: as in `op.type`, and in C++ in `REGISTER_OP`.
      rule: the name of a family: 'elementwise' (of any number of inputs, with broadcasting),
        'row by row' (of one input, with the examples along dimension 0), 'last dimension' (each
        vector by itself), 'sum' (over the examples) or 'matmul'. Or what these stand for, a text
        with a word for each input and each output, and in it a letter for each dimension; `*` is a
        tensor that each device needs in full. Or a function (op, sizes) that returns such a text,
        or None if the op cannot be sharded. `check_rule` tries it.

    Raises:
      TypeError: if the type isn't a str, or the rule is neither a text nor a function of two
        arguments.
      ValueError: if TensorFlow knows no such type, if the package has a rule for it, or if its ops
        may have side effects; if the text isn't a rule, or is for another number of inputs or
        outputs.
    """
    if not isinstance(op_type, str) or not (isinstance(rule, str) or callable(rule)):
        raise TypeError(
            f'register_rule({op_type!r}, {rule!r}): give a type by name, and a text or a function. '
            "For example register_rule('MyOp', 'n_ -> n_')."
        )
    if has_rule(op_type) and not is_registered(op_type):
        raise ValueError(f'{op_type} has a rule already. Register one for a type that has none.')

    definition = private.op_definition(op_type)
    if definition is None:
        alike = difflib.get_close_matches(op_type, dir(tf.raw_ops), n=1)
        question = f'Did you mean {alike[0]}? ' if alike else ''
        raise ValueError(
            f'TensorFlow has no ops of the type {op_type!r}. {question}Load an op of your own '
            'before its rule is registered, by tf.load_op_library().'
        )
    if is_declared_stateful(definition):
        raise ValueError(
            f'{op_type} cannot have a rule: its ops may have side effects, draw random numbers or '
            'call Python, as TensorFlow declares them as stateful or as taking a variable. Without '
            'a rule they run once, on the global batch.'
        )
    if isinstance(rule, str):
        _check_number_of_words(op_type, rule, definition)
    else:
        _check_arguments(op_type, rule)
    RULES[op_type] = rule


def is_registered(op_type: str) -> bool:
    """Whether the rule for a type is a user's."""
    return op_type in RULES and op_type not in _OF_PACKAGE


def _check_number_of_words(op_type: str, text: str, definition: Any) -> None:
    """Raises ValueError if a text is for more inputs or outputs than ops of a type have, or fewer.

    Args:
      definition: the type's OpDef, with its arguments. If one of them is a list, only the op knows
        how many inputs it has.
    """
    rule = parse(text)
    try:
        if not _has_list(definition.input_arg):
            word_for_each(rule.inputs, len(definition.input_arg), 'inputs')
        if not _has_list(definition.output_arg):
            word_for_each(rule.outputs, len(definition.output_arg), 'outputs')
    except ValueError as error:
        raise ValueError(
            f'{text!r} is no rule for {op_type}: {error}. Give a word for each.'
        ) from error


def _check_arguments(op_type: str, rule: Callable[..., Any]) -> None:
    """Raises TypeError if a function cannot be called with an op and the sizes."""
    try:
        signature = inspect.signature(rule)
    except ValueError:
        return  # Some functions of C have no signature.
    try:
        signature.bind('op', 'sizes')
    except TypeError as error:
        raise TypeError(
            f'The rule for {op_type} is a function of {signature}, and is called with an op and '
            'the sizes of its tensors. Give a function (op, sizes).'
        ) from error


def _has_list(arguments: Any) -> bool:
    return any(argument.number_attr or argument.type_list_attr for argument in arguments)
