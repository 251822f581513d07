"""Rules for ops that the table doesn't know: how they're divided, and whether that holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import batch, private
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.signature import Rule, parsed

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
        (op, sizes) -> such a text, or None where the op can't be divided. `check_rule` runs it.

    Raises:
      ValueError: for a text that isn't a rule, or a type that the package has a rule for.
    """
    if not isinstance(op_type, str) or not (isinstance(rule, str) or callable(rule)):
        raise TypeError(f'{op_type!r}, {rule!r}: give a type by name, and a text or a function.')
    if op_type in _KNOWN:
        raise ValueError(f'{op_type} has a rule already. Register one for a type that has none.')
    if isinstance(rule, str):
        parsed(rule)
    RULES[op_type] = rule


def check_rule(function: Callable[..., Any], *rows: Any, towers: int = 3) -> set[str]:
    """Runs ops on a batch and on uneven shards of it, one of them empty, and compares.

    Rows are along dimension 0; to check others, as 'S_ -> S_' has, let `function` transpose, too.

    Examples:
      >>> check_rule(tf.nn.softmax, np.random.randn(7, 3).astype('float32'))
      {'Softmax'}

    Args:
      function: makes a tensor, or a nest of tensors, of tensors; twice, with nothing random in it.
      *rows: what it's called with: arrays with a row an example, as many rows in each.
      towers: how many shards there are, at least 2, and fewer than rows.

    Returns:
      The types of which all ops ran in towers. Others ran once: by their rule, or for lack of one.

    Raises:
      AssertionError: if numbers differ by more than rounding, or in shape or dtype. TensorFlow's
        own errors, if what towers have doesn't even fit together.
    """
    arrays = [np.asarray(given) for given in rows]
    counts = {array.shape[:1] for array in arrays}
    if len(counts) != 1 or counts == {()} or not 1 < towers < len(arrays[0]):
        raise ValueError(
            'Give arrays with as many rows each, and 2 towers or more, but fewer than rows. Given: '
            f'{[array.shape for array in arrays]}, towers={towers}.'
        )
    divided: set[str] = set()
    for count in (len(arrays[0]), towers - 1):
        given = [array[:count] for array in arrays]
        expected, _ = _results(function, given, 1)
        found, types = _results(function, given, towers)
        divided |= types
        for one, other in zip(expected, found):
            np.testing.assert_equal((other.dtype, other.shape), (one.dtype, one.shape))
            if one.dtype.kind in 'fc':
                sizes = np.abs(one[np.isfinite(one)])
                eps = 4 * np.finfo(one.dtype).eps * max(np.median(sizes) if sizes.size else 0, 1)
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=eps)
            else:
                np.testing.assert_array_equal(other, one)
    return divided


def _results(function: Any, rows: list[Any], towers: int) -> tuple[list[Any], set[str]]:
    """What a function's tensors come to, and the types of the ops that are divided."""
    with tf.Graph().as_default() as graph:
        tensors = [tf.placeholder(given.dtype, [None, *given.shape[1:]]) for given in rows]
        made = tf.nest.flatten(function(*tensors), expand_composites=True)
        types: set[str] = set()
        if towers > 1:
            seen = batch.look_at(tensors, None)
            divided = divide(graph, seen, seen.total(), [f'/device:CPU:{i}' for i in range(towers)])
            assert divided is not None  # Rows are dynamic.
            once = map(graph.get_operation_by_name, divided.plan.once)
            types = {*_types(graph, divided.plan.ops)} - {op.type for op in once}
            made = [divided.whole(t) for t in made]
        config = tf.ConfigProto(device_count={'CPU': towers, 'GPU': 0})  # which round otherwise
        # Of fused batch normalization it loses outputs that are fetched.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(tf.tables_initializer())
            return session.run(made, dict(zip(tensors, rows))), types


def _types(graph: tf.Graph, plans: dict[str, Any]) -> Iterator[str]:
    """Those of ops that run in towers, in functions that they call, too."""
    for name, plan in plans.items():
        op = graph.get_operation_by_name(name)
        yield op.type
        for function, own in zip(private.function_graphs(op), plan.functions):
            yield from _types(function, own)
