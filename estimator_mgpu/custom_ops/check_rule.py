"""Rules for ops that the table doesn't know: how they're divided, and whether that holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import batch
from estimator_mgpu.custom_ops import trials
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.tf_internals import function_calls


def check_rule(
    function: Callable[..., Any],
    *rows: Any,
    towers: int = 3,
    types: Collection[str] | None = None,
) -> set[str]:
    """Tries the rules of the ops that a function makes, along each dimension that they name.

    First, each op is tried alone, with the inputs that it has in the function. Once for each letter
    of its rule, these are transposed so that the examples are along the dimension with the letter.
    The op is then tried with:

    - shards of different sizes, one of them empty; the graph knows how many examples there are, or
      it doesn't. If the dimension has one entry, it's made longer, if the op takes that;
    - if several inputs have the letter, each of them in turn unsharded, and of a size that is known
      only when the step runs;
    - each of them in turn with one entry, if the op broadcasts it: because the function has such an
      input, or because TensorFlow accepts 1 there, and no other number, when it builds the graph.

    Then the whole function is sharded along dimension 0 of its arrays. Ops in loops and branches
    are tried only so, and all ops only with the attributes that they have in the function. An op
    that doesn't check the shapes of its inputs may crash if its rule is wrong.

    Examples:
      >>> rows = np.random.randn(7, 3).astype('float32')
      >>> check_rule(tf.nn.softmax, rows)
      {'Softmax'}
      >>> from estimator_mgpu import register_rule
      >>> register_rule('Cross', 'S S -> S')  # That is 'S_ S_ -> S_': it needs all of a vector.
      >>> check_rule(tf.linalg.cross, rows, rows)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      AssertionError: The rule for Cross, 'S S -> S', is wrong along dimension 1 of input 0 ...

    Args:
      function: makes a tensor, or a nest of tensors, of tensors. It's called several times, and has
        nothing random in it.
      *rows: what it's called with: arrays with the examples along dimension 0, as many in each.
      towers: how many shards there are, at least 2, and fewer than examples.
      types: of which ops to try all dimensions, by type; all that the function makes, by default.

    Returns:
      The types of which all ops were sharded. Others ran once: by their rule, or for lack of one.

    Raises:
      AssertionError: if numbers differ by more than rounding, or in shape or dtype, or if an op
        fails on a shard. For an op by itself it says which op, along which dimension of which
        input; for the function as a whole, only what differs.
      tf.errors.OpError: TensorFlow's own, if the function as a whole fails.
    """
    arrays = [np.asarray(given) for given in rows]
    counts = {array.shape[:1] for array in arrays}
    if len(counts) != 1 or counts == {()} or not 1 < towers < len(arrays[0]):
        raise ValueError(
            'Give arrays with as many examples each, and 2 towers or more, but fewer than '
            'examples. Given: '
            f'{[array.shape for array in arrays]}, towers={towers}.'
        )
    listed = isinstance(types, Collection) and not isinstance(types, str)
    if types is not None and not (listed and RULES.keys() >= {*types}):
        raise ValueError(
            f'types={types!r}: give a list of types of ops that have rules, by register_rule() if '
            'the package has none.'
        )
    with tf.Graph().as_default():
        tensors, outputs = _called(function, arrays)
        feed = dict(zip(tensors, arrays))
        trials.try_dimensions(outputs, feed, towers, RULES if types is None else types)
    divided: set[str] = set()
    for count in (len(arrays[0]), towers - 1):
        given = [array[:count] for array in arrays]
        expected, _ = _results(function, given, 1)
        found, in_towers = _results(function, given, towers)
        divided |= in_towers
        for one, other in zip(expected, found):
            trials.assert_same(other, one)
    return divided


def _called(function: Any, rows: list[Any]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Placeholders of rows, and what a function makes of them."""
    tensors = [tf.placeholder(given.dtype, [None, *given.shape[1:]]) for given in rows]
    return tensors, tf.nest.flatten(function(*tensors), expand_composites=True)


def _results(function: Any, rows: list[Any], towers: int) -> tuple[list[Any], set[str]]:
    """What a function's tensors come to, and the types of the ops that are divided."""
    with tf.Graph().as_default() as graph:
        tensors, made = _called(function, rows)
        types: set[str] = set()
        if towers > 1:
            seen = batch.look_at(tensors, None)
            divided = divide(graph, seen, seen.total(), [f'/device:CPU:{i}' for i in range(towers)])
            assert divided is not None  # Rows are dynamic.
            once = map(graph.get_operation_by_name, divided.plan.once)
            types = {*_types(graph, divided.plan.ops)} - {op.type for op in once}
            made = [divided.full_value(t) for t in made]
        with trials.session_of(towers) as session:
            return session.run(made, dict(zip(tensors, rows))), types


def _types(graph: tf.Graph, plans: dict[str, Any]) -> Iterator[str]:
    """The types of the ops that are sharded, also in functions that they call."""
    for name, plan in plans.items():
        op = graph.get_operation_by_name(name)
        yield op.type
        for function, own in zip(function_calls.function_graphs(op), plan.functions):
            yield from _types(function, own)
