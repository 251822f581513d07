"""`check_rule()`: whether the rules of the ops that a function makes hold.

In: a function, and arrays to call it with. Each op is tried by itself (`trials`), then the function
as a whole: on several towers it has to give what it gives on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import is_positive_integer
from estimator_mgpu.batches import batch
from estimator_mgpu.custom_ops import op_calls, runs, trials
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.plan import OpPlan
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.tf_internals import function_calls
from estimator_mgpu.tf_internals.effects import has_side_effect


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

    Then the whole function is sharded along dimension 0 of its arrays: with all examples, and with
    the first `towers - 1`, so that one device has none. It has to take so many. Ops in loops and
    branches are tried only so, and all ops only with the attributes that they have in the function.
    An op that doesn't check the shapes of its inputs may crash if its rule is wrong.

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
        to give the same numbers each time.
      *rows: what it's called with: arrays with the examples along dimension 0, as many in each.
      towers: how many shards there are, at least 2, and fewer than examples.
      types: of which ops to try all dimensions, by type; all that the function makes, by default.

    Returns:
      The types of which all ops were sharded. Others ran once: by their rule, or for lack of one.

    Raises:
      AssertionError: if numbers differ by more than rounding, or in shape or dtype, if an op fails
        on a shard, if a rule makes an op without a kernel, or if a registered rule is for other
        ranks than the op has. For an op by itself it says which op, along which dimension of which
        input; for the function as a whole, only what differs.
      ValueError: if an argument isn't as described above; if the function draws random numbers.
      RuntimeError: if a rule that is a function fails, or returns what isn't a rule; if a rule
        reduces a type by what it doesn't have, as strings by a sum.
      tf.errors.OpError: TensorFlow's own, if the function as a whole fails.
    """
    arrays = [np.asarray(array) for array in rows]
    _check_arguments(arrays, towers, types)

    with tf.Graph().as_default():
        placeholders, outputs = _call(function, arrays)
        feed = dict(zip(placeholders, arrays))
        trials.try_dimensions(outputs, feed, towers, RULES if types is None else types)

    on_one, on_towers = (_build(function, arrays, count) for count in (1, towers))
    for count in (len(arrays[0]), towers - 1):  # with fewer examples than towers, one gets none
        batch_arrays = [array[:count] for array in arrays]
        expected = on_one.run(batch_arrays)
        try:
            runs.assert_all_same(on_towers.run(batch_arrays), expected)
        except AssertionError:
            _check_repeatable(function, batch_arrays, expected)
            raise
    return on_towers.sharded


def _check_arguments(arrays: Sequence[np.ndarray], towers: Any, types: Any) -> None:
    """Raises ValueError for arguments of `check_rule()` that cannot be."""
    shapes = ', '.join(str(list(array.shape)) for array in arrays)
    if not arrays:
        raise ValueError(
            'check_rule() was given no arrays to call the function with. Give one for each of its '
            'arguments: check_rule(function, np.random.randn(7, 3)).'
        )
    if not all(array.shape for array in arrays) or len({len(array) for array in arrays}) > 1:
        raise ValueError(
            f'The arrays have the shapes {shapes}. Each has to have the examples along dimension '
            '0, as many as the others. What has no examples is no argument of the function: '
            'lambda x: my_op(x, table).'
        )
    if not is_positive_integer(towers) or towers < 2:
        raise ValueError(
            f'towers={towers!r}: give the number of shards that are compared with one device, 2 or '
            'more.'
        )
    if len(arrays[0]) <= towers:
        raise ValueError(
            f'The arrays have the shapes {shapes}, so {len(arrays[0])} examples are too few for '
            f'{towers} towers, whose shards are to differ in size. Give {towers + 1} examples or '
            'more, or fewer towers.'
        )
    is_list = isinstance(types, Collection) and not isinstance(types, str)
    if types is not None and not (is_list and RULES.keys() >= {*types}):
        raise ValueError(
            f'types={types!r}: give a list of types of ops that have rules, by register_rule() if '
            'the package has none.'
        )


class _Program(NamedTuple):
    """What a function made in a graph of its own."""

    graph: tf.Graph
    placeholders: list[tf.Tensor]
    outputs: list[tf.Tensor]  # flat
    towers: int
    sharded: set[str]  # types of which all ops are sharded

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the values of the outputs; variables start anew."""
        with self.graph.as_default(), runs.session_of(self.towers) as session:
            return session.run(self.outputs, dict(zip(self.placeholders, arrays)))


def _call(
    function: Callable[..., Any], arrays: Sequence[np.ndarray]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Calls the function in the default graph; returns placeholders for arrays, and its tensors."""
    placeholders = [tf.placeholder(array.dtype, [None, *array.shape[1:]]) for array in arrays]
    given = function(*placeholders)
    tensors = tf.nest.flatten(given, expand_composites=True)
    if not tensors or not all(map(tf.is_tensor, tensors)):
        raise TypeError(
            f'The function returns {given!r}. It has to make a tensor, or a nest of tensors, of '
            'those that it is given.'
        )
    return placeholders, tensors


def _build(function: Callable[..., Any], arrays: Sequence[np.ndarray], towers: int) -> _Program:
    """Calls the function, for one device, or to be sharded along dimension 0 of such arrays."""
    with tf.Graph().as_default() as graph:
        placeholders, outputs = _call(function, arrays)
        sharded: set[str] = set()
        if towers > 1:
            examples = batch.look_at(placeholders, None)
            devices = [f'/device:CPU:{i}' for i in range(towers)]
            results = [tensor.op for tensor in outputs]
            division = Division(
                graph,
                examples,
                examples.total(),
                devices,
                results=results,
                bypasses_needless_ops=False,  # All rules are to be tried.
            )
            divided = divide(division)
            assert divided is not None  # The number of examples is dynamic.

            sharded = _types_of(graph, division.plan.ops)
            sharded -= {graph.get_operation_by_name(name).type for name in division.plan.once}
            outputs = [divided.full_value(tensor) for tensor in outputs]
    return _Program(graph, placeholders, outputs, towers, sharded)


def _types_of(graph: tf.Graph, plans: dict[str, OpPlan]) -> set[str]:
    """The types of the ops that are sharded, also in functions that they call."""
    types = set()
    for name, plan in plans.items():
        op = graph.get_operation_by_name(name)
        types.add(op.type)
        for function, function_plans in zip(function_calls.function_graphs(op), plan.functions):
            types |= _types_of(function, function_plans)
    return types


def _check_repeatable(
    function: Callable[..., Any], arrays: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> None:
    """Raises ValueError if the function gives other values on one device, too, in another run."""
    try:
        runs.assert_all_same(_build(function, arrays, 1).run(arrays), values)
    except AssertionError as error:
        with tf.Graph().as_default():
            _, outputs = _call(function, arrays)
            needed = op_calls.ops_of(op_calls.inlined(outputs))
            ops = [op for op in needed if has_side_effect(op)]
        names = ', '.join(f'{op.name!r} (a {op.type})' for op in ops)
        cause = f'These ops draw random numbers, call Python or have a state: {names}.'
        if not ops:
            cause = 'Perhaps it draws random numbers in Python.'
        raise ValueError(
            'The function gives other numbers each time it runs, on one device as well, so there '
            f'is nothing to compare with. {cause} Give such numbers to the function as an array, '
            'or leave them out.'
        ) from error
