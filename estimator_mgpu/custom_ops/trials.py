"""Ops, each by itself, sharded along each dimension that their rules name: do the rules hold?

In: what a function makes, and what is fed. A `Trial` is a copy of an op, whose inputs are sharded
along one dimension in one way. All copies are divided at once, by the rules alone, and each is run
with several sizes and compared with the op on one device. Inputs have the values that they have in
the function, of which `Dimension.input_with` takes some, or takes some twice.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.custom_ops.dimensions import Dimension, dimensions_of
from estimator_mgpu.custom_ops.op_calls import calls_of, may_be_sizes
from estimator_mgpu.custom_ops.runs import assert_same, session_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.once_devices import place_ops
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.placements import REPLICATE
from estimator_mgpu.partition.propagation.engine import propagate
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.build_towers import Towers, build_towers
from estimator_mgpu.tf_internals.error_messages import reason
from estimator_mgpu.tf_internals.graphs import dependents, topological_order
from estimator_mgpu.tf_internals.shape_functions import copy_of, takes


def try_dimensions(
    outputs: Sequence[tf.Tensor],
    feed: dict[tf.Tensor, np.ndarray],
    towers: int,
    types: Container[str],
) -> None:
    """Tries ops along each dimension that their rules name.

    What an op is given on one device is given to a copy of it, with the examples along the
    dimension: its inputs that have the dimension are transposed batches. If there are several such
    inputs, each in turn is unsharded, too, and of one entry if the op broadcasts that. Ops in loops
    and branches aren't tried.

    Args:
      outputs: what a function makes in the default graph, to which copies of ops are added.
      feed: the values of the graph's placeholders.
      towers: how many shards there are.
      types: the types of the ops to be tried.

    Raises:
      AssertionError: if a rule doesn't hold; it says for which op, and along which dimension.
    """
    trials: list[Trial] = []
    with tf.control_dependencies(None):
        for call in calls_of(outputs, feed, towers, types):
            on_one_device = call.fed()
            for dimension in dimensions_of(call, towers):
                trials += _trials_of(dimension, on_one_device)

    # One division for all trials whose number of examples is dynamic, and one for each static one.
    by_static: dict[int | None, list[Trial]] = {}
    for trial in trials:
        by_static.setdefault(trial.static, []).append(trial)
    for static, group in by_static.items():
        divided = _divided(group, static, towers if static is None else min(static, towers))
        with session_of(towers) as session:
            _check_kernels(session)
            for trial in group:
                if trial.op.name in divided.division.plan.ops:
                    trial.run(session, divided)


def _trials_of(dimension: Dimension, on_one_device: tf.Operation) -> list[Trial]:
    """The ways to shard an op along a dimension that it takes.

    Args:
      on_one_device: does what the op does with whatever is fed.
    """
    trials: list[Trial] = []
    try:
        trials.append(Trial(dimension, on_one_device))
        trials.append(Trial(dimension, on_one_device, is_static=True))
    except _NotTaken:
        pass  # The op takes no more than the only entry that it was given.
    if len(dimension.axes) + len(dimension.positions) == 1:
        return trials

    for index in dimension.axes:
        trials.append(Trial(dimension, on_one_device, unsharded=index))
        if _broadcasts(dimension, [index]):
            trials.append(Trial(dimension, on_one_device, unsharded=index, has_one_entry=True))
    return trials


def _check_kernels(session: tf.Session) -> None:
    """Raises AssertionError if no op of the graph can run, as one of them has no kernel.

    Each trial would fail, as if its op weren't made for other sizes than it's given.
    """
    try:
        session.run(tf.no_op())
    except tf.errors.OpError as error:
        raise AssertionError(
            f'A rule makes an op that TensorFlow has no kernel for: {reason(error)}. A mean '
            'of integers, for example, has none: give the rule another reduction.'
        ) from error


class _NotTaken(Exception):
    """TensorFlow doesn't make an op of inputs of some sizes."""


class _Counts(NamedTuple):
    """The sizes with which a trial is run."""

    examples: int
    unsharded: int = 0  # entries of the input that is unsharded, if any


class Trial:
    """A copy of an op whose inputs that have a dimension are sharded along it.

    Attributes:
      op: the copy.
      static: how many examples there are, if the graph knows.
      sources: placeholders with the examples along dimension 0.

    Args:
      on_one_device: does what the op does with whatever is fed.
      is_static: whether the graph knows how many examples there are.
      unsharded: an input that has the dimension, and isn't sharded along it; None if all are. How
        many entries this input has is known only when a step runs.
      has_one_entry: whether that input has one entry instead, which the graph knows.

    Raises:
      _NotTaken: if TensorFlow doesn't make the op of inputs of these sizes.
    """

    def __init__(
        self,
        dimension: Dimension,
        on_one_device: tf.Operation,
        is_static: bool = False,
        unsharded: int | None = None,
        has_one_entry: bool = False,
    ):
        self.static = dimension.tried if is_static else None
        self._examples = tf.placeholder(tf.float32, [self.static], 'rows')  # shapes are of it
        self._dimension = dimension
        self._on_one_device = on_one_device
        self._unsharded = unsharded
        self._has_one_entry = has_one_entry
        self._placeholders: dict[int, tf.Tensor] = {}  # by input, with the examples first
        inputs = [self._input(index) for index in range(len(dimension.call.values))]
        try:
            self.op = copy_of(dimension.call.op, inputs)
        except ValueError as error:
            raise _NotTaken from error
        self.sources = [self._examples]
        self.sources += [p for index, p in self._placeholders.items() if index != unsharded]

    def _input(self, index: int) -> tf.Tensor:
        """What the copy is given for an input."""
        dimension = self._dimension
        tensor = dimension.call.op.inputs[index]
        value = dimension.call.values[index]
        dtype = tensor.dtype.base_dtype
        if value is None:
            return tensor
        if index in dimension.positions:
            entries = dimension.entries_with(index, tf.shape(self._examples)[0])
            return tf.cast(tf.reshape(tf.stack(entries), value.shape), dtype)
        if index not in dimension.axes:
            return tf.constant(value, dtype)
        if index == self._unsharded and self._has_one_entry:
            return tf.constant(dimension.input_with(index, 1), dtype)

        # A batch, transposed so that its examples are along the dimension.
        axis = dimension.axes[index]
        other_axes = [other for other in range(value.ndim) if other != axis]
        source = tf.placeholder(dtype, [self.static, *[value.shape[other] for other in other_axes]])
        self._placeholders[index] = source
        return tf.transpose(source, np.argsort([axis, *other_axes])) if axis else source

    def run(self, session: tf.Session, divided: Towers) -> None:
        """Compares what the op gives on towers and on one device, for several sizes.

        Args:
          session: one for the graph with the copies.
          divided: the towers of all copies.

        Raises:
          AssertionError: if the rule doesn't hold.
        """
        for counts in self._counts(len(divided.towers)):
            values = self._values(counts)
            try:
                expected = self._run_on_one_device(session, values)
            except tf.errors.OpError:
                return  # It isn't made for other sizes than it's given in the function.
            self._compare(session, divided, counts, expected, values)

    def _counts(self, towers: int) -> list[_Counts]:
        """The sizes with which the op is run."""
        dimension = self._dimension
        tried = dimension.tried
        if self._unsharded is None:
            # With fewer examples than towers, one of these has none.
            fewer = tried if self.static else min(tried, towers - 1)
            return [_Counts(count) for count in sorted({tried, fewer}, reverse=True)]
        if self._has_one_entry:
            return [_Counts(tried, 1)]

        others = [index for index in dimension.axes if index != self._unsharded]
        counts = [_Counts(tried, tried)]
        if _broadcasts(dimension, [self._unsharded]):
            counts.append(_Counts(tried, 1))
        if others and _broadcasts(dimension, others):
            counts.append(_Counts(1, tried))
        return counts

    def _values(self, counts: _Counts) -> list[Any]:
        """The op's inputs of these sizes."""
        dimension = self._dimension
        values = list(dimension.call.values)
        for index in dimension.positions:
            values[index] = dimension.shape_with(index, counts.examples)
        for index in dimension.axes:
            count = counts.unsharded if index == self._unsharded else counts.examples
            values[index] = dimension.input_with(index, count)
        return values

    def _run_on_one_device(self, session: tf.Session, values: Sequence[Any]) -> list[Any]:
        """What those outputs of the op are that anything uses."""
        op = self._on_one_device
        feed = {tensor: value for tensor, value in zip(op.inputs, values) if value is not None}
        return session.run([op.outputs[index] for index in self._dimension.call.used], feed)

    def _compare(
        self,
        session: tf.Session,
        divided: Towers,
        counts: _Counts,
        expected: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """Compares what the op gives on towers, of such values, with what it gave on one device."""
        complaint = f'{self._dimension.complaint()} With {counts.examples} entries there'
        if self._unsharded is not None:
            complaint += f', and {counts.unsharded} in input {self._unsharded},'
        draws = self._draws(session, values, expected)
        feed: dict[tf.Tensor, Any] = {self._examples: np.zeros(counts.examples)}
        for index, placeholder in self._placeholders.items():
            feed[placeholder] = np.moveaxis(values[index], self._dimension.axes[index], 0)
        if divided.division.total is not None:
            feed[divided.division.total] = counts.examples
        try:
            outputs = self._run_on_towers(session, divided, feed)
        except tf.errors.OpError as error:
            raise AssertionError(f'{complaint} a tower fails: {reason(error)}') from error

        for index, arrays, expected_array in zip(self._dimension.call.used, outputs, expected):
            try:
                for array in arrays:
                    assert_same(array, expected_array, compare_numbers=not draws)
            except AssertionError as error:
                text = f'{complaint} output {index} is not that of one device: {error}'
                raise AssertionError(text) from error

    def _draws(self, session: tf.Session, values: Sequence[Any], first: Sequence[Any]) -> bool:
        """Whether the op gives other numbers each time."""
        if not self._on_one_device.op_def.is_stateful:
            return False
        second = self._run_on_one_device(session, values)
        return not all(np.array_equal(one, other) for one, other in zip(first, second))

    def _run_on_towers(
        self, session: tf.Session, divided: Towers, feed: dict[tf.Tensor, Any]
    ) -> list[list[Any]]:
        """For each output: its full value; or what each tower has, if these are to be the same."""
        fetches = []
        for index in self._dimension.call.used:
            output = self.op.outputs[index]
            if divided.division.plan.placements[output.name] == REPLICATE:
                fetches.append(divided.local_values(output))
            else:
                fetches.append([divided.full_value(output)])
        return session.run(fetches, feed)


def _broadcasts(dimension: Dimension, indices: Sequence[int]) -> bool:
    """Whether the op broadcasts some inputs if they have one entry along the dimension.

    It does if it's given that in the function, or if TensorFlow takes one there, but no other
    number. The op isn't run to find out: a few crash with what they aren't made for.
    """
    values = dimension.call.values
    if all(values[index].shape[dimension.axes[index]] == 1 for index in indices):
        return dimension.size > 1

    def is_taken(count: int) -> bool:
        shapes = [shape_with(index, count) for index in range(len(values))]
        return takes(dimension.call.op, shapes)

    def shape_with(index: int, count: int) -> Any:
        """The shape of an input; or its value, if that may be a shape."""
        value = values[index]
        if index in dimension.positions:
            return dimension.shape_with(index, dimension.tried)
        if index not in dimension.axes:
            return value if may_be_sizes(value) else np.shape(value)
        shape = list(value.shape)
        shape[dimension.axes[index]] = count if index in indices else dimension.tried
        return shape

    return is_taken(1) and not is_taken(dimension.tried + 1)


def _divided(trials: Sequence[Trial], static: int | None, towers: int) -> Towers:
    """Divides copies of ops at once, by the rules alone.

    Args:
      trials: those with the copies.
      static: how many examples there are, if the graph knows; otherwise the number may be fed.
    """
    graph = tf.get_default_graph()
    sources = []
    for trial in trials:
        sources += trial.sources
    ops = list(topological_order(dependents(sources, frozenset())))

    rows = RowSpace('batch', static)
    total = tf.placeholder(tf.int32, []) if static is None else None
    devices = [f'/device:CPU:{i}' for i in range(towers)]
    results = [trial.op for trial in trials]
    division = Division(graph, total=total, devices=devices, results=results)
    division.plan = propagate(sources, [], ops, rows, RULES, frozenset(), {})
    place_ops(division)
    division.order = Order(graph)
    return build_towers(division)
