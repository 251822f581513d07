"""Ops, each by itself, sharded along each dimension that their rules name: do the rules hold?"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE
from estimator_mgpu.partition.plan import Label, SizesOf
from estimator_mgpu.partition.propagation.accepted_shapes import copy_of, takes
from estimator_mgpu.partition.propagation.engine import propagate
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.partition.rules import PRODUCTS, RULES
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    Signature,
    failure,
    labels_of,
    signature_of,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size
from estimator_mgpu.partition.towers.build import Towers, build_towers
from estimator_mgpu.partition.towers.placement import place_ops
from estimator_mgpu.tf_internals import graphs, private
from estimator_mgpu.tf_internals.graphs import dependents, topological_order

_SMALL = 64  # entries of an integer vector that may be sizes, or name dimensions


def try_dimensions(
    outputs: Sequence[tf.Tensor],
    feed: dict[tf.Tensor, np.ndarray],
    towers: int,
    types: Container[str],
) -> None:
    """Tries ops along each dimension that their rules name.

    What an op is given on one device is given to a copy of it, with the examples along the
    dimension: its inputs that have the dimension are transposed batches. Where there are several
    such inputs, each in turn is whole, too, of one entry if the op repeats that. Ops in functions
    that loops and branches call aren't tried.

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
        for call in _calls(outputs, feed, towers, types):
            alone = call.fed()
            for dimension in _dimensions(call, towers):
                trials += _trials(dimension, alone)
    for static in {trial.static: None for trial in trials}:
        group = [trial for trial in trials if trial.static == static]
        divided = _divided(group, static, towers if static is None else min(static, towers))
        with session_of(towers) as session:
            for trial in group:
                if trial.op.name in divided.plan.ops:
                    trial.run(session, divided)


class Call(NamedTuple):
    """An op, and what it's given on one device."""

    op: tf.Operation
    values: Sequence[Any]  # arrays, one for each input; None for a variable or a table
    used: Sequence[int]  # those of its outputs that anything uses

    def fed(self) -> tf.Operation:
        """Adds an op that does the same with whatever its inputs are fed."""
        try:
            return copy_of(self.op, [self._placeholder(i, None) for i in range(len(self.values))])
        except ValueError:
            # Its shape function needs to know how many sizes it's given, or which axes.
            shapes = [value.shape if _may_be_sizes(value) else None for value in self.values]
            return copy_of(self.op, [self._placeholder(i, own) for i, own in enumerate(shapes)])

    def _placeholder(self, index: int, shape: Any) -> tf.Tensor:
        """What is fed for an input: of any shape, if it's None; the input itself if it has none."""
        tensor = self.op.inputs[index]
        if self.values[index] is None:
            return tensor
        return tf.placeholder(tensor.dtype.base_dtype, shape)

    def key(self) -> Hashable:
        """A key that two ops share if they do the same with inputs of the same shapes."""
        attrs = self.op.node_def.attr
        own = [(name, attrs[name].SerializeToString()) for name in sorted(attrs) if name[0] != '_']
        given = [
            None if v is None else (v.shape, v.tobytes() if _may_be_sizes(v) else b'')
            for v in self.values
        ]
        return (self.op.type, *own, *given, *self.used)


def _calls(
    outputs: Sequence[tf.Tensor],
    feed: dict[tf.Tensor, np.ndarray],
    towers: int,
    types: Container[str],
) -> list[Call]:
    """Finds the ops that are to be tried, each once, and runs what they are given."""
    replaced = inline_calls(tf.get_default_graph(), frozenset())
    outputs = [replaced.get(tensor.name, tensor) for tensor in outputs]
    needed = graphs.ancestors([tensor.op for tensor in outputs])
    ops = [
        op
        for op in sorted(needed, key=private.creation_index)
        if op.type in types and _is_plain(op)
    ]
    with session_of(towers) as session:
        tensors = {t.name: t for op in ops for t in op.inputs if t.dtype != tf.resource}
        arrays = session.run(tensors, feed)

    made = {tensor.name for tensor in outputs}
    calls: dict[Hashable, Call] = {}
    for op in ops:
        values = [_array(arrays.get(tensor.name)) for tensor in op.inputs]
        used = [i for i, t in enumerate(op.outputs) if t.name in made or t.consumers()]
        call = Call(op, values, used)
        calls.setdefault(call.key(), call)
    return list(calls.values())


def _is_plain(op: tf.Operation) -> bool:
    """Whether an op has a rule, and inputs that can be fetched."""
    lists = any(tensor.dtype == tf.variant for tensor in [*op.inputs, *op.outputs])
    if RULES.get(op.type) is None or lists or private.in_v1_control_flow(op):
        return False
    return all(map(op.graph.is_fetchable, op.inputs))


def _array(value: Any) -> Any:
    """What a session makes of a tensor, as an array; a scalar string is none."""
    return np.array(value, object) if isinstance(value, bytes) else value


class Dimension(NamedTuple):
    """What a rule says is one dimension: that of each input that has the same label."""

    call: Call
    axes: dict[int, int]  # by the inputs that have the dimension, which of theirs it is
    positions: dict[int, int]  # by the inputs that are vectors of sizes, which entry is its size
    size: int  # how many entries the inputs have along it, but for those that have one
    tried: int  # how many it's tried with: as many, or some if all inputs have one

    def along(self, index: int, count: int) -> np.ndarray:
        """An input with so many entries: its first ones, or its only one, repeated."""
        value, axis = self.call.values[index], self.axes[index]
        if value.shape[axis] == 1:
            value = np.repeat(value, count, axis)
        return value.take(range(count), axis)

    def sizes(self, index: int, count: Any) -> list[Any]:
        """The entries of a vector of sizes, if there are so many entries along the dimension."""
        entries, position = np.ravel(self.call.values[index]).tolist(), self.positions[index]
        factor, left = divmod(entries[position], self.size)
        if factor > 0 and not left:
            entries[position] = count * factor
        return entries

    def vector(self, index: int, count: int) -> np.ndarray:
        """That vector."""
        value = self.call.values[index]
        return np.reshape(self.sizes(index, count), value.shape).astype(value.dtype)

    def complaint(self) -> str:
        """Says that the rule is wrong along the dimension, and what to write instead."""
        op, rule = self.call.op, RULES[self.call.op.type]
        text = f', {rule!r},' if isinstance(rule, str) else ''
        index, at = next(iter([*self.axes.items(), *self.positions.items()]))
        shape = list(self.call.values[index].shape)
        return (
            f'The rule for {op.type}{text} is wrong along {"dimension" if self.axes else "entry"} '
            f'{at} of input {index} of {op.name!r}, {op.inputs[index].name!r} of shape {shape}: '
            "write '_' for a dimension that each device needs whole, and '*' for such an input."
        )


def _dimensions(call: Call, towers: int) -> Iterator[Dimension]:
    """Yields the dimensions that a rule names, asked with the examples along each in turn."""
    found = set()
    for index, value in enumerate(call.values):
        places = [(at, False) for at in range(0 if value is None else value.ndim)]
        if _may_be_sizes(value):
            places += [(at, True) for at in range(value.size)]
        for (at, is_size), ones in itertools.product(places, (True, False)):
            signature = _signature(call, index, at, is_size, ones, towers)
            if signature is None:
                continue
            labels = _labels(signature, is_size)[index]
            if at < len(labels) and labels[at] is not None:
                if _has_several_blocks(call, signature, labels[at]):
                    continue  # Only the function as a whole tries these.
                dimension = _dimension(call, signature, labels[at], towers)
                key = (*dimension.axes.items(), '', *dimension.positions.items())
                if dimension.size > 0 and key not in found:
                    found.add(key)
                    yield dimension


def _has_several_blocks(call: Call, signature: Signature, label: Label) -> bool:
    """Whether some inputs have more blocks of all rows than others: see `Shard.in_blocks`."""
    lengths = {
        value.shape[own.index(label)]
        for value, own in zip(call.values, _labels(signature, sizes=False))
        if label in own
    }
    return bool(signature.in_blocks.get(label)) and len(lengths) > 1


def _dimension(call: Call, signature: Signature, label: Label, towers: int) -> Dimension:
    """What has a label."""
    axes, positions = (
        {i: own.index(label) for i, own in enumerate(_labels(signature, sizes)) if label in own}
        for sizes in (False, True)
    )
    lengths = [call.values[i].shape[axis] for i, axis in axes.items()]
    told = [int(np.ravel(call.values[i])[at]) for i, at in positions.items()]
    size = max(lengths, default=1)
    if size == 1:
        size = max([*told, 1] if lengths else told)
    dimension = Dimension(call, axes, positions, size, size if size > 1 else towers)
    unlike = [n for n in lengths if n not in (1, size)]
    unlike += [n for n in told if n > 0 and size > 0 and n % size and size % n]
    if unlike:
        raise AssertionError(
            f'{dimension.complaint()} It has one letter for dimensions of inputs '
            f'{[*axes, *positions]}, which have {lengths + told} entries.'
        )
    return dimension


def _labels(signature: Signature, sizes: bool) -> list[tuple[Label, ...]]:
    """The labels of each input's dimensions; or of the dimensions whose sizes its entries are."""
    if sizes:
        return [own.labels if isinstance(own, SizesOf) else () for own in signature.inputs]
    return [labels_of(own) for own in signature.inputs]


def _signature(
    call: Call, index: int, at: int, is_size: bool, ones: bool, towers: int
) -> Signature | None:
    """What an op's rule says if an input has rows along a dimension, or if an entry is as many.

    With `ones`, sizes of 1 are given as unknown, so that the rule keeps the label of what the op
    would repeat.
    """
    sizes = Sizes()
    for tensor, value in zip(call.op.inputs, call.values):
        if value is None:
            continue
        dims = [
            sizes.unknown_dim(tensor, axis) if n == 1 and ones else Size(n)
            for axis, n in enumerate(value.shape)
        ]
        entries = [Size(n) for n in np.ravel(value).tolist()] if _may_be_sizes(value) else []
        if tensor is call.op.inputs[index]:
            count = entries[at].number if is_size else value.shape[at]
            rows = RowSpace('batch', count if count > 1 else towers)
            (entries if is_size else dims)[at] = Size(1, (rows,))
        sizes.set_dims(tensor, dims)
        if entries:
            sizes.set_entries(tensor, entries)
    try:
        return signature_of(RULES[call.op.type], call.op, sizes)
    except NotSharded:
        return None
    except Exception as error:
        raise failure(call.op, error) from error


def _may_be_sizes(value: Any) -> bool:
    return value is not None and value.dtype.kind == 'i' and value.ndim < 2 and value.size <= _SMALL


def _trials(dimension: Dimension, alone: tf.Operation) -> Iterator[Trial]:
    """Yields the ways to shard an op along a dimension."""
    with contextlib.suppress(_NotTaken):
        yield Trial(dimension, alone)
        yield Trial(dimension, alone, static=True)
    if len(dimension.axes) + len(dimension.positions) > 1:
        for index in dimension.axes:
            yield Trial(dimension, alone, whole=index)
            if _repeats(dimension, [index]):
                yield Trial(dimension, alone, whole=index, one=True)


class _NotTaken(Exception):
    """An op takes no more than the only entry that it was given along a dimension."""


class Trial:
    """A copy of an op whose inputs that have a dimension are sharded along it.

    The graph knows how many examples there are if that's `static`. All inputs that have the
    dimension are sharded, or all but one that is `whole`. How many entries this has only a step
    knows, unless it's `one`.
    """

    def __init__(
        self,
        dimension: Dimension,
        alone: tf.Operation,
        static: bool = False,
        whole: int | None = None,
        one: bool = False,
    ):
        self.static = dimension.tried if static else None
        self._dimension, self._alone, self._whole, self._one = dimension, alone, whole, one
        self.rows = tf.placeholder(tf.float32, [self.static], 'rows')  # that sizes are of
        self.sources: dict[int, tf.Tensor] = {}
        self._fed: tf.Tensor | None = None  # what is whole, if its size isn't known
        inputs = [self._input(i) for i in range(len(dimension.call.values))]
        try:
            self.op = copy_of(dimension.call.op, inputs)
        except ValueError as error:  # TensorFlow's, of shapes
            raise _NotTaken from error

    def _input(self, index: int) -> tf.Tensor:
        """What the copy is given for an input."""
        tensor, value = self._dimension.call.op.inputs[index], self._dimension.call.values[index]
        dtype = tensor.dtype.base_dtype
        if value is None:
            return tensor
        if index in self._dimension.positions:
            sizes = tf.stack(self._dimension.sizes(index, tf.shape(self.rows)[0]))
            return tf.cast(tf.reshape(sizes, value.shape), dtype)
        if index not in self._dimension.axes:
            return tf.constant(value, dtype)

        axis, shape = self._dimension.axes[index], list(value.shape)
        if index == self._whole and self._one:
            return tf.constant(self._dimension.along(index, 1), dtype)
        if index == self._whole:
            shape[axis] = None
            self._fed = tf.placeholder(dtype, shape)
            return self._fed
        others = [i for i in range(len(shape)) if i != axis]
        source = tf.placeholder(dtype, [self.static, *(shape[i] for i in others)])
        self.sources[index] = source
        return tf.transpose(source, np.argsort([axis, *others])) if axis else source

    def run(self, session: tf.Session, divided: Towers) -> None:
        """Compares what the op gives sharded and on one device, for several sizes."""
        for rows, whole in self._sizes(len(divided.devices)):
            beside = '' if self._whole is None else f', and {whole} in input {self._whole},'
            title = f'{self._dimension.complaint()} With {rows} entries there{beside}'
            feed, values = self._feed(rows, whole)
            if divided.total is not None:
                feed[divided.total] = rows
            try:
                expected = self._expected(session, values)
            except tf.errors.OpError:
                return  # It isn't made for other sizes than it's given in the function.
            draws = self._draws(session, values, expected)
            try:
                found = self._found(session, divided, feed)
            except tf.errors.OpError as error:
                raise AssertionError(f'{title} a tower fails: {_first(error)}') from error
            for output, arrays, one in zip(self._dimension.call.used, found, expected):
                try:
                    for array in arrays:
                        assert_same(array, one, numbers=not draws)
                except AssertionError as error:
                    text = f'{title} output {output} is not that of one device: {error}'
                    raise AssertionError(text) from error

    def _feed(self, rows: int, whole: int) -> tuple[dict[tf.Tensor, Any], list[Any]]:
        """What is fed, and what that makes of the op's inputs."""
        dimension, values = self._dimension, list(self._dimension.call.values)
        feed: dict[Any, Any] = {self.rows: np.zeros(rows)}
        for index in dimension.positions:
            values[index] = dimension.vector(index, rows)
        for index, axis in dimension.axes.items():
            values[index] = dimension.along(index, whole if index == self._whole else rows)
            if index in self.sources:
                feed[self.sources[index]] = np.moveaxis(values[index], axis, 0)
            elif self._fed is not None:
                feed[self._fed] = values[index]
        return feed, values

    def _expected(self, session: tf.Session, values: Sequence[Any]) -> list[Any]:
        """What the op gives on one device."""
        fed = {t: value for t, value in zip(self._alone.inputs, values) if value is not None}
        return session.run([self._alone.outputs[i] for i in self._dimension.call.used], fed)

    def _draws(self, session: tf.Session, values: Sequence[Any], first: Sequence[Any]) -> bool:
        """Whether the op gives other numbers each time."""
        stateful = self._alone.op_def.is_stateful
        return stateful and not all(map(np.array_equal, first, self._expected(session, values)))

    def _found(self, session: tf.Session, divided: Towers, feed: dict[Any, Any]) -> list[Any]:
        """What towers' outputs come to; what each has, where that's said to be the same."""
        fetches = []
        for i in self._dimension.call.used:
            output = self.op.outputs[i]
            alike = divided.plan.placements[output.name] == REPLICATE
            fetches.append(divided.local_values(output) if alike else [divided.full_value(output)])
        return session.run(fetches, feed)

    def _sizes(self, towers: int) -> list[tuple[int, int]]:
        """How many examples, and how many entries of what is whole, the op is run with."""
        dimension, count = self._dimension, self._dimension.tried
        if self._whole is None:
            counts = {count} if self.static else {count, min(count, towers - 1)}
            return [(rows, 0) for rows in sorted(counts, reverse=True)]
        if self._one:
            return [(count, 1)]
        others = [index for index in dimension.axes if index != self._whole]
        sizes = [(count, count)]
        if _repeats(dimension, [self._whole]):
            sizes.append((count, 1))
        if others and _repeats(dimension, others):
            sizes.append((1, count))
        return sizes


def _repeats(dimension: Dimension, indices: Sequence[int]) -> bool:
    """Whether an op repeats what has one entry in some inputs.

    It does if it's given that, or if TensorFlow takes one there, but no other number. No op is run
    with what it may not be made for: a few crash then.
    """
    call = dimension.call
    if all(call.values[i].shape[dimension.axes[i]] == 1 for i in indices):
        return dimension.size > 1

    def is_taken(count: int) -> bool:
        return takes(call.op, [shape(i, count) for i in range(len(call.values))])

    def shape(index: int, count: int) -> Any:
        if index in dimension.positions:
            return dimension.vector(index, dimension.tried)
        if index not in dimension.axes:
            value = call.values[index]
            return value if _may_be_sizes(value) else np.shape(value)
        dims = list(call.values[index].shape)
        dims[dimension.axes[index]] = count if index in indices else dimension.tried
        return dims

    return is_taken(1) and not is_taken(dimension.tried + 1)


def _divided(trials: Sequence[Trial], static: int | None, towers: int) -> Towers:
    """Divides copies of ops at once, by the rules alone; how many rows there are may be fed."""
    graph = tf.get_default_graph()
    sources = [source for trial in trials for source in (trial.rows, *trial.sources.values())]
    order, rows = topological_order(dependents(sources, frozenset())), RowSpace('batch', static)
    plan = propagate(sources, [], order, rows, RULES, PRODUCTS, frozenset(), {})
    total = tf.placeholder(tf.int32, []) if static is None else None
    devices = [f'/device:CPU:{i}' for i in range(towers)]
    return build_towers(graph, plan, total, devices, place_ops(graph, plan), {})


@contextlib.contextmanager
def session_of(towers: int) -> Iterator[tf.Session]:
    """A session with a device a tower, in which variables and tables are initialized."""
    config = tf.ConfigProto(device_count={'CPU': towers, 'GPU': 0})  # which round otherwise
    # Of fused batch normalization it loses outputs that are fetched.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Session(config=config) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(tf.tables_initializer())
        yield session


def assert_same(found: np.ndarray, expected: np.ndarray, numbers: bool = True) -> None:
    """Fails if arrays differ in shape or dtype, or in numbers by more than rounding."""
    found, expected = _array(found), _array(expected)
    np.testing.assert_equal((found.dtype, found.shape), (expected.dtype, expected.shape))
    if numbers and expected.dtype.kind in 'fc':
        sizes = np.abs(expected[np.isfinite(expected)]).astype(np.float64)
        eps = 4 * np.finfo(expected.dtype).eps * max(np.median(sizes) if sizes.size else 0, 1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=eps)
    elif numbers:
        np.testing.assert_array_equal(found, expected)


def _first(error: tf.errors.OpError) -> str:
    """What the first op that failed says."""
    found = re.search(r"(?:\(0\) |Node: '.*'\n)(?!Detected|\d+ root error)(.*)", error.message)
    return found[1] if found else error.message
