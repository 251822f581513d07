"""What the towers' losses and gradients come to for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from estimator_mgpu import losses, private
from estimator_mgpu.copying import Copies, TowerCopy, Updates, absolute_scope

# compute(ys, xs, grad_ys) and compute(ys, xs, grad_ys, stop_gradients) give gradients
# TensorFlow's own way.
Compute = Callable[..., list]


class Towers:
    """The towers of one model_fn's call, and what their losses and gradients come to.

    Args:
      graph: the graph the model is built in.
      devices: one device a tower; the model_fn builds tower 0.
      weights: for 'mean' and 'sum', one float64 scalar a tower: what its share in a mean, or in a
        sum, of the whole batch counts.
      guarded: whether a tower of weight 0 may have a loss that isn't a number.
      reduction: 'auto', 'mean' or 'sum'.
      static_rows: the rows of every shard where that's known.
    """

    def __init__(
        self,
        graph: tf.Graph,
        devices: Sequence[str],
        weights: dict[str, list[tf.Tensor]],
        *,
        guarded: bool = False,
        reduction: str = losses.AUTO,
        static_rows: int | None = None,
    ):
        self.graph = graph
        self.devices = devices
        self.reductions = 0
        self._weights = weights
        self._guarded = guarded
        self._reduction = reduction
        self._static_rows = static_rows
        self.copies = Copies(
            graph,
            devices[0],
            [TowerCopy(i, _unique_scope(graph, i), d) for i, d in enumerate(devices) if i],
        )
        self._sources: list[tf.Tensor] = []
        self._cast: dict[tuple, tf.Tensor] = {}
        # What was made of a tensor of the user's to take the gradient of, by its name.
        self.made_from: dict[str, tf.Tensor] = {}
        self._counted: dict[str, list[losses.Leaf]] = {}
        self._summed: dict[str, tf.Tensor] = {}
        self._reduced: list[tf.Tensor] = []
        self._told: set[str] = set()
        self.index, *others = [
            self._constant(scope, device, i)
            for i, (scope, device) in enumerate(
                [('replicate', devices[0])] + [(t.scope, t.device) for t in self.copies.towers]
            )
        ]
        self.copies.replace(self.index, others)

    def _constant(self, scope: str, device: str, index: int) -> tf.Tensor:
        with absolute_scope(self.graph, scope), tf.device(device):
            return tf.constant(index, name='tower')

    def give(self, shards: Sequence[Any]) -> None:
        """Puts each tower's shard in the place of tower 0's.

        Args:
          shards: one nest a tower. A tensor that stands in all of them goes whole to every tower.
        """
        first, *others = [_flat_tensors(shard) for shard in shards]
        for tensor, *own in zip(first, *others):
            if all(t is tensor for t in own):
                self.copies.share([tensor])
            else:
                self._sources.append(tensor)
                self.copies.replace(tensor, own)

    def whole(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the value that a scalar of tower 0 has for the whole batch."""
        parts = self._take_apart(loss)
        terms = [term for leaf in parts.leaves for term in self._terms(leaf)]
        return self._tail(loss, parts, self._sums(terms))

    def whole_update(
        self, update: tf.Tensor, values: Sequence[tf.Tensor], updates: Updates
    ) -> tf.Tensor:
        """Returns an update that writes the values that `values` have for the whole batch."""
        parts = [self._take_apart(value) for value in values]
        leaves = [leaf for part in parts for leaf in part.leaves]
        sums = self._sums(term for leaf in leaves for term in self._terms(leaf))
        tail = updates.own.union(updates.after_writes(), *(part.tail for part in parts))
        return self._tail(update, losses.Parts(leaves, tail, []), sums, updates.own)

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of tower 0 has an entry, or several, for each row."""
        return losses.has_rows(tensor, self._dependents(), self._static_rows)

    def _take_apart(self, loss: tf.Tensor) -> losses.Parts:
        parts = losses.take_apart(
            loss, self._dependents(), self._reduction, self._static_rows, len(self.devices)
        )
        self._tell(loss, parts)
        return parts

    def _terms(self, leaf: losses.Leaf) -> list[losses.Leaf]:
        """Returns what is added up over the towers for a leaf: itself, or a sum and a count.

        A mean over an unknown number of entries (those of a `boolean_mask`, say) is their sum by
        their number, and these add up.
        """
        if not leaf.counted:
            return [leaf]
        if leaf.tensor.name not in self._counted:
            mean = leaf.tensor.op
            with absolute_scope(self.graph, 'replicate'), tf.device(mean.device):
                total = tf.reduce_sum(*mean.inputs, keepdims=mean.get_attr('keep_dims'))
                sizes = [tf.size(t, out_type=tf.int64) for t in (mean.inputs[0], total)]
                count = tf.cast(sizes[0] // tf.maximum(sizes[1], 1), total.dtype)
            self.made_from[total.name] = mean.inputs[0]
            self._counted[leaf.tensor.name] = [
                losses.Leaf(total, losses.SUM),
                losses.Leaf(count, losses.SUM),
            ]
        return self._counted[leaf.tensor.name]

    def _tail(
        self,
        loss: tf.Tensor,
        parts: losses.Parts,
        terms: dict[str, tf.Tensor],
        writing: Iterable[str] = (),
    ) -> tf.Tensor:
        """Returns the loss as it follows from other values of its leaves' terms."""
        if not parts.leaves:
            return loss
        tail = TowerCopy(0, _unique_scope(self.graph, 'reduced'), self.devices[0])
        copies = Copies(self.graph, self.devices[0], [tail], only=parts.tail)
        copies.let_write(writing)
        with absolute_scope(self.graph, tail.scope), tf.device(self.devices[0]):
            for leaf in parts.leaves:
                value, *count = [terms[term.tensor.name] for term in self._terms(leaf)]
                copies.replace(leaf.tensor, [value / count[0] if count else value])
        [[whole]] = copies.copy([loss])
        self.copies.share([whole])
        return whole

    def _sums(self, terms: Iterable[losses.Leaf]) -> dict[str, tf.Tensor]:
        """Returns what terms come to for the whole batch, by the names of tower 0's."""
        missing = {t.tensor.name: t for t in terms if t.tensor.name not in self._summed}
        if missing:
            copies = self.copies.copy([term.tensor for term in missing.values()])
            for term, *towers in zip(missing.values(), *copies):
                self._summed[term.tensor.name] = self._sum_of(term, towers)
        return self._summed

    def gradients(
        self, ys: Sequence[tf.Tensor], xs: Sequence[Any], grad_ys: Any, compute: Compute
    ) -> list:
        """Returns the gradients of the whole batch's losses, one for each variable.

        Tower 0's gradient is computed and copied to the other towers. What a tower's share counts
        comes in as the gradient of its loss, so the towers' gradients are summed as they are.

        Args:
          ys: tower 0's losses.
          xs: the variables.
          grad_ys: None, or one gradient, or None, for each loss.
          compute: computes gradients TensorFlow's own way.

        Returns:
          One dense tensor, `IndexedSlices` or None for each of `xs`.
        """
        self._check_first_order(ys)
        ys, grad_ys = self._as_scalars(ys, grad_ys)
        parts = [self._take_apart(y) for y in ys]
        leaves = [leaf for part in parts for leaf in part.leaves]
        terms = {term.tensor.name: term for leaf in leaves for term in self._terms(leaf)}
        # What a term counts in a loss may depend on its sum, and that on the copies. But taking
        # gradients changes loops of the forward pass, so it comes before copying.
        with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
            stubs = {
                name: tf.identity(tf.placeholder(term.tensor.dtype, term.tensor.shape))
                for name, term in terms.items()
            }
            wholes = [self._tail(y, part, stubs) for y, part in zip(ys, parts)]
            seeds = dict(zip(stubs, tf.gradients(wholes, list(stubs.values()), grad_ys)))
            seeds = {name: seed for name, seed in seeds.items() if seed is not None}
            weighted = [
                seed * self._weight(terms[name].kind, 0, seed.dtype) for name, seed in seeds.items()
            ]
        self.copies.share([*stubs.values(), *seeds.values()])
        once, grads = [None] * len(xs), [None] * len(xs)
        if {whole.name for whole in wholes} != {stub.name for stub in stubs.values()}:
            once = compute(wholes, xs, grad_ys, list(stubs.values()))
        if seeds:
            grads = compute([terms[name].tensor for name in seeds], xs, weighted)
        copies = self.copies.copy(_flat_tensors(grads))
        sums = self._sums(terms.values())
        for name, stub in stubs.items():
            private.set_input(stub.op, 0, sums[name])
        towers = [grads] + [_pack_tensors(grads, own) for own in copies]
        reduced = self._reduce(towers, once, xs)
        self.reductions += any(g is not None for g in reduced)
        return reduced

    def _as_scalars(self, ys: Sequence[tf.Tensor], grad_ys: Any) -> tuple[list, list]:
        """Returns scalar losses with the same gradients, as a gradient of theirs may differ."""
        scalars, seeds = [], []
        dependents = self._dependents()
        for y, grad_y in zip(ys, grad_ys or [None] * len(ys)):
            if y.shape.num_elements() != 1 or (grad_y is not None and grad_y.op.name in dependents):
                with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
                    given = tf.ones_like(y) if grad_y is None else tf.cast(grad_y, y.dtype)
                    total, grad_y = tf.reduce_sum(y * tf.stop_gradient(given)), None
                self.made_from[total.name] = y
                y = total
            scalars.append(y)
            seeds.append(grad_y)
        return scalars, seeds

    def _reduce(self, towers: list[list], once: list, xs: Sequence[Any]) -> list:
        """Sums the towers' gradients, and those that don't depend on the batch, for each of xs."""
        if self._guarded:
            towers = [self._guard(own, i) for i, own in enumerate(towers)]
        reduced = []
        for x, extra, *own in zip(xs, once, *towers):
            terms = [g for g in own + [extra] if g is not None]
            with absolute_scope(self.graph, 'replicate'), tf.device(x.device):
                reduced.append(_add(terms) if terms else None)
        tensors = _flat_tensors(reduced)
        self.copies.share(tensors)
        self._reduced += tensors
        return reduced

    def _guard(self, grads: list, tower: int) -> list:
        """Leaves out what isn't a number where a tower counts for nothing."""
        counts = self._weights[losses.MEAN][tower] > 0
        with absolute_scope(self.graph, 'replicate'):
            guarded = [
                g if g.dtype.is_integer else tf.where(counts, g, tf.zeros_like(g))
                for g in _flat_tensors(grads)
            ]
        return _pack_tensors(grads, guarded)

    def _sum_of(self, term: losses.Leaf, copies: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a term's value for the whole batch."""
        with absolute_scope(self.graph, 'replicate'), tf.device(self.devices[0]):
            parts = []
            for tower, value in enumerate([term.tensor, *copies]):
                dtype = value.dtype if value.dtype.is_floating else tf.float64
                weight = self._weight(term.kind, tower, dtype)
                part = tf.cast(value, dtype) * weight
                if self._guarded:
                    part = tf.where(weight > 0, part, tf.zeros_like(part))
                parts.append(part)
            total = tf.add_n(parts)
            if not term.tensor.dtype.is_floating:
                total = tf.cast(tf.round(total), term.tensor.dtype)
            whole = tf.identity(total, name='whole')
        self.copies.share([whole])
        return whole

    def _weight(self, kind: str, tower: int, dtype: tf.DType) -> tf.Tensor:
        key = (kind, dtype)
        if key not in self._cast:
            with absolute_scope(self.graph, 'replicate'), tf.device('/device:CPU:0'):
                # Identities, as a cast to the same type is the tensor itself.
                cast = [tf.cast(tf.identity(w), dtype) for w in self._weights[kind]]
            self._cast[key] = cast
            self.copies.replace(cast[0], cast[1:])
        return self._cast[key][tower]

    def _dependents(self) -> set[str]:
        sources = [*self._sources, self.index]
        return self.copies.dependents(sources) | {t.op.name for t in sources}

    def _check_first_order(self, ys: Sequence[tf.Tensor]) -> None:
        dependents = self.copies.dependents(self._reduced)
        for y in ys:
            if y.op.name in dependents:
                raise ValueError(
                    f'The gradient of {y.name!r} was asked for, which itself depends on a gradient '
                    'with respect to variables that was reduced over the towers. On several '
                    'devices, only gradients with respect to activations and inputs can be '
                    'differentiated again (a gradient penalty, say). Train this model with '
                    'replicate(devices=1), or stop the gradient by tf.stop_gradient().'
                )

    def _tell(self, loss: tf.Tensor, parts: losses.Parts) -> None:
        if loss.name in self._told or self._reduction == losses.MEAN:
            return
        self._told.add(loss.name)
        for doubt in parts.doubts:
            logging.warning('%s', doubt)
        for leaf in parts.leaves:
            logging.info(
                "Loss %r: the towers' %r is taken for a %s over rows.",
                loss.name,
                leaf.tensor.name,
                leaf.kind,
            )


def _add(terms: list) -> Any:
    """Adds gradients; they stay sparse if one is, as in TensorFlow's own sums."""
    if not any(isinstance(g, tf.IndexedSlices) for g in terms):
        return tf.add_n(terms, name='gradient')
    slices = [g if isinstance(g, tf.IndexedSlices) else _as_slices(g) for g in terms]
    return tf.IndexedSlices(
        tf.concat([g.values for g in slices], 0, name='gradient'),
        tf.concat([tf.cast(g.indices, slices[0].indices.dtype) for g in slices], 0),
        slices[0].dense_shape,
    )


def _as_slices(dense: tf.Tensor) -> tf.IndexedSlices:
    shape = tf.shape(dense)
    return tf.IndexedSlices(dense, tf.range(shape[0]), shape)


def _flat_tensors(nest: Any) -> list[tf.Tensor]:
    return [t for t in tf.nest.flatten(nest, expand_composites=True) if isinstance(t, tf.Tensor)]


def _pack_tensors(nest: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Puts other tensors in the place of a nest's."""
    own = iter(tensors)
    flat = tf.nest.flatten(nest, expand_composites=True)
    flat = [next(own) if isinstance(t, tf.Tensor) else t for t in flat]
    return tf.nest.pack_sequence_as(nest, flat, expand_composites=True)


def _unique_scope(graph: tf.Graph, suffix: Any) -> str:
    name = f'tower_{suffix}' if isinstance(suffix, int) else suffix
    with absolute_scope(graph), tf.name_scope(name) as scope:
        return scope.rstrip('/')
