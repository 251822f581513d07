"""What the towers' losses and gradients come to for the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private
from estimator_mgpu.copying import Copies
from estimator_mgpu.extremes import Extremes
from estimator_mgpu.importing import TowerCopy, absolute_scope
from estimator_mgpu.nests import flat_tensors
from estimator_mgpu.notices import Notices
from estimator_mgpu.placement import Placement
from estimator_mgpu.reshapes import Place
from estimator_mgpu.rows import Rows
from estimator_mgpu.walks import walk
from estimator_mgpu.weights import Weights


class Towers:
    """The towers of one model_fn's call, and what their losses and gradients come to.

    Args:
      graph: the graph the model is built in.
      devices: one device a tower; the model_fn builds tower 0.
      placement: where the model's variables live.
      weights: for each kind of leaf, one float64 scalar a tower: what its share in a mean, a sum or
        a mean over units of the whole batch counts.
      reduction: 'auto', 'mean', 'sum' or 'units'.
      static_rows: the rows of every shard where that's known.
    """

    def __init__(
        self,
        graph: tf.Graph,
        devices: Sequence[str],
        placement: Placement,
        weights: dict[str, list[tf.Tensor]],
        *,
        reduction: str = losses.AUTO,
        static_rows: int | None = None,
    ):
        self.graph = graph
        self.devices = devices
        self.placement = placement
        self.reductions = 0  # how often gradients were reduced
        self.reduced: list[tf.Tensor] = []  # and what they came to
        self._reduction = reduction
        self._static_rows = static_rows
        self.copies = Copies(
            graph,
            devices[0],
            [TowerCopy(i, unique_scope(graph, i), d) for i, d in enumerate(devices) if i],
        )
        self.weights = Weights(graph, self.copies, weights)
        self._sources: list[tf.Tensor] = []
        # Of which only who made them knows where they have rows.
        self._with_rows: list[tuple[tf.Tensor, Place]] = []
        self._bounds: set[str] = set()  # of rows of ragged tensors
        self._shapes: set[str] = set()  # of sparse tensors
        self._indices: set[str] = set()
        # What was made of a tensor of the user's to take the gradient of, by its name.
        self.made_from: dict[str, tf.Tensor] = {}
        self._counted: dict[str, list[losses.Leaf]] = {}
        self._stubs: list[tuple[tf.Tensor, losses.Leaf]] = []
        # Those of gradients with respect to activations, which aren't reduced.
        self.local_stubs: list[tuple[tf.Tensor, losses.Leaf]] = []
        self._summed: dict[str, tf.Tensor] = {}
        self.notices = Notices()
        self._extremes = Extremes(graph, self.copies, self.notices.mixing)
        self.index, *others = [self._constant(device, i) for i, device in enumerate(devices)]
        self.copies.replace(self.index, others)

    def _constant(self, device: str, index: int) -> tf.Tensor:
        with absolute_scope(self.graph, 'replicate'), tf.device(device):
            return tf.constant(index, name='tower')

    def give(self, shards: Sequence[Any]) -> None:
        """Puts each tower's shard in the place of tower 0's.

        Args:
          shards: one nest a tower. A tensor that stands in all of them goes whole to every tower.
        """
        leaves = zip(*(tf.nest.flatten(shard) for shard in shards))
        own = [leaf for leaf, *others in leaves if any(other is not leaf for other in others)]
        ragged = [x for x in own if isinstance(x, tf.RaggedTensor)]
        self._bounds.update(t.name for x in ragged for t in x.nested_row_splits)
        sparse = [x for x in own if isinstance(x, tf.SparseTensor)]
        self._shapes.update(x.dense_shape.name for x in sparse)
        self._indices.update(x.indices.name for x in sparse)
        first, *others = [flat_tensors(shard) for shard in shards]
        for tensor, *own in zip(first, *others):
            if all(t is tensor for t in own):
                self.copies.share([tensor])
            else:
                self._sources.append(tensor)
                self.copies.replace(tensor, own)

    def extremes(self) -> dict[str, tf.Tensor]:
        """Returns the greatest and the least integers of all rows, by the names of tower 0's."""
        return self._extremes.known()

    def is_off_tape(self, values: Iterable[tf.Tensor]) -> bool:
        """Whether something comes from a loop that was gone on with, which a tape doesn't know."""
        names = {op.name for op in self._extremes.continued}
        return bool(names) and any(op.name in names for op in walk([t.op for t in values]))

    def whole(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the value that a scalar of tower 0 has for the whole batch."""
        [value] = self.values([(loss, self.take_apart(loss))])
        return value

    def values(self, apart: Sequence[tuple[tf.Tensor, losses.Parts]]) -> list[tf.Tensor]:
        """Returns the values for the whole batch of tensors that were taken apart."""
        leaves = [leaf for _, parts in apart for leaf in parts.leaves]
        sums = self.sums(term for leaf in leaves for term in self.terms(leaf))
        tail = set().union(*(parts.tail for _, parts in apart))
        if leaves and not any(leaf.tensor.op.name in tail for leaf in leaves):
            values = [value for value, parts in apart if parts.leaves]
            wholes = self._tails(values, losses.Parts(leaves, tail, []), sums)
            found = dict(zip((value.name for value in values), wholes))
            return [found.get(value.name, value) for value, _ in apart]
        return [self.tail(value, parts, sums) for value, parts in apart]

    def rows(self) -> Rows:
        """Returns what is known of the rows of tower 0's tensors."""
        self._extremes.settle(self._rows)
        return self._rows()

    def _rows(self) -> Rows:
        sources = [t for t in self._sources if t.name not in self._shapes]
        given = [(t, Place(0)) for t in sources if t.shape.rank != 0]
        return Rows(
            [*given, *self._with_rows],
            self._dependents(),
            self._static_rows,
            self._bounds,
            self._indices,
            self._shapes | self._extremes.shapes,
        )

    def add_rows(self, tensors: Iterable[tf.Tensor], axis: int = 0) -> None:
        """Makes it known of tensors of tower 0 that they have rows."""
        self._with_rows += [(tensor, Place(axis)) for tensor in tensors]

    def parts(self, value: tf.Tensor, rows: Rows) -> losses.Parts:
        """Finds the leaves of a value."""
        return losses.take_apart(value, rows, losses.AUTO, len(self.devices))

    def take_apart(self, loss: tf.Tensor) -> losses.Parts:
        """Finds the leaves of a loss, and tells in the log."""
        rows = self.rows()
        parts = losses.take_apart(loss, rows, self._reduction, len(self.devices))
        if self._reduction not in (losses.MEAN, losses.UNITS):
            self.notices.loss(loss.name, parts)
            self.notices.unknown_shapes(rows, loss)
            self.notices.reshapes(rows, len(self.devices))
            self.notices.mixing(rows, loss)
        return parts

    def terms(self, leaf: losses.Leaf) -> list[losses.Leaf]:
        """Returns what is added up over the towers for a leaf: itself, or a sum and a count.

        A mean over an unknown number of entries (those of a `boolean_mask`, say) is their sum by
        their number, and these add up.
        """
        if not leaf.counted and leaf.per is None:
            return [leaf]
        if leaf.tensor.name not in self._counted:
            with absolute_scope(self.graph, 'replicate'), tf.device(leaf.tensor.device):
                source, *two = self._multiplied(leaf) if leaf.per is not None else self._sum(leaf)
            self.made_from[two[0].name] = source
            self._counted[leaf.tensor.name] = [losses.Leaf(t, losses.SUM) for t in two]
        return self._counted[leaf.tensor.name]

    def _sum(self, leaf: losses.Leaf) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns what a mean is of, its sum and how many entries it has."""
        mean = leaf.tensor.op
        total = tf.reduce_sum(*mean.inputs, keepdims=mean.get_attr('keep_dims'))
        sizes = [tf.size(t, out_type=tf.int64) for t in (mean.inputs[0], total)]
        return mean.inputs[0], total, tf.cast(sizes[0] // tf.maximum(sizes[1], 1), total.dtype)

    def _multiplied(self, leaf: losses.Leaf) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns a sum of what was divided by a number of rows, without that, and the number."""
        count = tf.cast(tf.shape(leaf.per)[leaf.axis], leaf.tensor.dtype)
        return leaf.tensor, leaf.tensor * tf.maximum(count, 1), count

    def tail(self, loss: tf.Tensor, parts: losses.Parts, terms: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the loss as it follows from other values of its leaves' terms."""
        return self._tails([loss], parts, terms)[0] if parts.leaves else loss

    def _tails(
        self,
        outputs: Sequence[tf.Tensor],
        parts: losses.Parts,
        terms: dict[str, tf.Tensor],
    ) -> list[tf.Tensor]:
        tail = TowerCopy(0, unique_scope(self.graph, 'reduced'), self.devices[0])
        copies = Copies(self.graph, self.devices[0], [tail], only=parts.tail)
        # Not in the tail's scope, where a copy may come to have the name.
        with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
            for leaf in parts.leaves:
                value, *count = [terms[term.tensor.name] for term in self.terms(leaf)]
                integer = leaf.tensor.dtype.is_integer
                if leaf.per is not None or integer and count:  # Of nothing, it's 0.
                    count = [tf.maximum(count[0], 1)]
                divide = tf.truncatediv if integer else tf.truediv  # TensorFlow's means are, too.
                copies.replace(leaf.tensor, [divide(value, *count) if count else value])
        [wholes] = copies.copy(outputs)
        self.copies.share(wholes)
        return wholes

    def sums(self, terms: Iterable[losses.Leaf]) -> dict[str, tf.Tensor]:
        """Returns what terms come to for the whole batch, by the names of tower 0's."""
        missing = {t.tensor.name: t for t in terms if t.tensor.name not in self._summed}
        if missing:
            copies = self.copies.copy([term.tensor for term in missing.values()])
            for term, *towers in zip(missing.values(), *copies):
                self._summed[term.tensor.name] = self._sum_of(term, towers)
        return self._summed

    def joined(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all towers' values, in the batch's order.

        Args:
          value: tensor of tower 0 with rows, one for each of its shard or several.
        """
        copies = [value, *(own for [own] in self.copies.copy([value]))]
        with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
            counts = self.weights.counts(losses.SUM, tf.int64)
            parts = [v[: tf.shape(v, out_type=tf.int64)[0] * n] for v, n in zip(copies, counts)]
            # Of unknown size, for it takes the place of one shard's.
            joined = tf.concat(parts, 0)
            joined = tf.placeholder_with_default(joined, [None, *joined.shape[1:]])
        self.copies.share([joined])
        return joined

    def stub(self, term: losses.Leaf) -> tf.Tensor:
        """Returns a tensor that will be a term's value for the whole batch."""
        stub = tf.identity(tf.placeholder(term.tensor.dtype, term.tensor.shape))
        self.copies.share([stub])
        self._stubs.append((stub, term))
        return stub

    def fill_stubs(self) -> None:
        """Gives the stubs their values, for which the forward pass is copied."""
        sums = self.sums(term for _, term in self._stubs)
        for stub, term in self._stubs:
            private.set_input(stub.op, 0, sums[term.tensor.name])
        self._stubs.clear()

    def _sum_of(self, term: losses.Leaf, copies: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a term's value for the whole batch."""
        with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
            fraction = term.tensor.dtype.is_floating or term.tensor.dtype.is_complex
            dtype = term.tensor.dtype if fraction else tf.float64
            parts = [tf.cast(value, dtype) for value in (term.tensor, *copies)]
            if not term.tensor.shape.is_fully_defined():
                parts[0] = _checked(parts, self.made_from.get(term.tensor.name, term.tensor).name)
            if self.weights.are_even(term.kind):
                total = tf.add_n(parts)
                if term.kind != losses.SUM:
                    total *= tf.cast(self.weights.of_leaf(term, 0, dtype.real_dtype), dtype)
            else:
                real = dtype.real_dtype
                weights = [self.weights.of_leaf(term, i, real) for i in range(len(parts))]
                parts = [part * tf.cast(w, dtype) for part, w in zip(parts, weights)]
                if self.weights.guarded:
                    parts = [tf.where(w > 0, p, tf.zeros_like(p)) for p, w in zip(parts, weights)]
                total = tf.add_n(parts)
            if term.bounds:  # Where one shard ends, the next one begins.
                active = tf.add_n(self.weights.counts(losses.SUM, dtype))
                total -= (active - 1) * self.weights.along(term, dtype)
            if not fraction:
                total = tf.cast(tf.round(total), term.tensor.dtype)
            whole = tf.identity(total, name='whole')
        self.copies.share([whole])
        return whole

    def seed(self, term: losses.Leaf, gradient: tf.Tensor, local: bool = False) -> tf.Tensor:
        """Returns what the gradient of a tower's term starts from.

        Args:
          term: the term.
          gradient: the gradient with respect to the term's value for the whole batch.
          local: whether it isn't reduced. A tower without rows of its own, which counts for
            nothing, has one like others, then: of zeros a model may make what isn't a number.
        """
        weight = self.weights.of_kind(term.kind, 0, gradient.dtype)
        even = self.weights.are_even(term.kind)
        if local and not even:
            weight = tf.where(tf.equal(weight, 0), tf.ones_like(weight), weight)
        seed = gradient * weight
        self.copies.share([gradient, seed] if even else [gradient])
        return seed

    def dependents(self) -> set[str]:
        """Returns the names of tower 0's ops that depend on its shard or its number."""
        self._extremes.settle(self._rows)
        return self._dependents()

    def _dependents(self) -> set[str]:
        sources = [*self._sources, *(tensor for tensor, _ in self._with_rows), self.index]
        return self.copies.dependents(sources) | {t.op.name for t in sources}


def _checked(parts: list[tf.Tensor], name: str) -> tf.Tensor:
    """Returns the first of the towers' values, after it was checked that their shapes agree."""
    shapes = [tf.shape(part) for part in parts]
    message = (
        f'{name!r} was taken to be reduced over rows, but what that comes to differs from shard to '
        'shard in shape: it still has rows, or is as long as the longest of the shard. Make sizes '
        'other than that of the batch known (by set_shape(), say), reduce dimension 0 last, or '
        'train this model with replicate(devices=1).'
    )
    agree = [tf.reduce_all(tf.equal(shapes[0], shape)) for shape in shapes[1:]]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(agree), [message])]):
        return tf.identity(parts[0])


def is_own(op: tf.Operation) -> bool:
    """Whether this package made an op: to divide the batch, to weight or to reduce."""
    return op.name.startswith('replicate/')


def unique_scope(graph: tf.Graph, suffix: Any) -> str:
    """Returns the name of a new scope: that of a tower, or any other."""
    name = f'tower_{suffix}' if isinstance(suffix, int) else suffix
    with absolute_scope(graph), tf.name_scope(name) as scope:
        return scope.rstrip('/')
