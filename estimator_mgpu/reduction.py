"""The reduction: gradients of the whole batch's losses from those of the towers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private
from estimator_mgpu.backward import has_custom_gradients
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.nests import flat_tensors, pack_tensors
from estimator_mgpu.rows import LINEAR
from estimator_mgpu.subjects import is_variable
from estimator_mgpu.towers import Towers
from estimator_mgpu.walks import inputs, walk

# compute(ys, xs, grad_ys) and compute(ys, xs, grad_ys, stop_gradients) give gradients
# TensorFlow's own way.
Compute = Callable[..., list[Any]]


def reduced_gradients(
    towers: Towers, ys: Sequence[tf.Tensor], xs: Sequence[Any], grad_ys: Any, compute: Compute
) -> list[Any]:
    """Returns the gradients of the whole batch's losses, one for each weight.

    Tower 0's gradient is computed and copied to the other towers. What a tower's share counts
    comes in as the gradient of its loss, so the towers' gradients are summed as they are.

    Args:
      towers: the towers.
      ys: tower 0's losses.
      xs: variables, and tensors that are the same on all towers.
      grad_ys: None, or one gradient, or None, for each loss.
      compute: computes gradients TensorFlow's own way.

    Returns:
      One dense tensor, `IndexedSlices` or None for each of `xs`.
    """
    _check_first_order(towers, ys, xs)
    # Where a weight is in the middle of the graph, all towers go on from the same.
    made = [x for x in xs if not is_variable(x) and not private.in_control_flow(x.op)]
    towers.copies.share(made)
    towers.placement.settle(towers.graph)
    ys, grad_ys = _as_scalars(towers, ys, grad_ys)
    wholes, stubs, terms, seeds = _seeds(towers, ys, grad_ys)
    once, grads = [None] * len(xs), [None] * len(xs)
    if {whole.name for whole in wholes} != {stub.name for stub in stubs.values()}:
        with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
            once = compute(wholes, xs, grad_ys, list(stubs.values()))
    first = len(towers.graph.get_operations())
    if seeds:
        grads = compute([terms[name].tensor for name in seeds], xs, list(seeds.values()))
    if has_custom_gradients(towers.graph):
        towers.notices.gradients(ys[0], towers.rows(), flat_tensors(grads), first)
    copies = towers.copies.copy(flat_tensors(grads))
    towers.fill_stubs()
    every = [grads] + [pack_tensors(grads, own) for own in copies]
    reduced = _reduce(towers, every, once, xs)
    towers.reductions += any(g is not None for g in reduced)
    return reduced


def local_gradients(
    towers: Towers, ys: Sequence[tf.Tensor], xs: Sequence[Any], grad_ys: Any, compute: Compute
) -> list[Any]:
    """Returns the gradients of the whole batch's losses with respect to tower 0's activations.

    Nothing is reduced, but the gradient of a mean is a share in that over the batch, and what a
    term of a quotient counts goes by the whole batch's.

    Args and returns: as `reduced_gradients`.
    """
    if not all(isinstance(x, tf.Tensor) and x.graph is towers.graph for x in xs):
        return compute(ys, xs, grad_ys)
    rows = towers.rows()
    # A loss with rows counts as their sum.
    parts = [towers.take_apart(y) for y in ys if not rows.has(y)]
    of_batch = {leaf.tensor.op.name for part in parts for leaf in part.leaves}
    of_batch.update(*(part.tail for part in parts))
    of_rows = [x.op.name not in of_batch for x in xs]
    if not all(of_rows):  # With respect to a loss's terms, say: the tail of another value.
        if any(of_rows):
            each = [local_gradients(towers, ys, [x], grad_ys, compute) for x in xs]
            return [gradient for [gradient] in each]
        return compute(ys, xs, grad_ys)
    if any(part.doubts for part in parts) or all(_adds_up(towers, part) for part in parts):
        return compute(ys, xs, grad_ys)
    ys, grad_ys = _as_scalars(towers, ys, grad_ys)
    _, stubs, terms, seeds = _seeds(towers, ys, grad_ys, local=True)
    towers.local_stubs += [(stub, terms[name]) for name, stub in stubs.items()]
    return compute([terms[name].tensor for name in seeds], xs, list(seeds.values()))


def _adds_up(towers: Towers, parts: losses.Parts) -> bool:
    """Whether a loss is a plain sum over rows, so that its gradient is that of the batch's."""
    dependents = towers.dependents()

    def is_linear(op: tf.Operation) -> bool:
        own = [i for i, t in enumerate(op.inputs) if t.op.name in dependents]
        scaled = op.type in ('Mul', *QUOTIENTS) and len(own) == 1
        return op.type in LINEAR or (scaled and (op.type == 'Mul' or own == [0]))

    tail = map(towers.graph.get_operation_by_name, parts.tail)
    return all(leaf.kind == losses.SUM for leaf in parts.leaves) and all(map(is_linear, tail))


def _seeds(
    towers: Towers, ys: Sequence[tf.Tensor], grad_ys: Any, local: bool = False
) -> tuple[Any, ...]:
    """Returns what losses' gradients start from.

    What a term counts in a loss may depend on its sum over the towers, and that on the copies. But
    taking gradients changes loops of the forward pass, so it comes before copying: stubs stand
    for the sums until then.

    Returns:
      The losses, of the stubs; the stubs; the terms; and the gradients with respect to tower 0's
      terms: the last three by the terms' names.
    """
    parts = [towers.take_apart(y) for y in ys]
    leaves = [leaf for part in parts for leaf in part.leaves]
    terms = {term.tensor.name: term for leaf in leaves for term in towers.terms(leaf)}
    with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
        stubs = {name: towers.stub(term) for name, term in terms.items()}
        wholes = [towers.tail(y, part, stubs) for y, part in zip(ys, parts)]
        found = dict(zip(stubs, tf.gradients(wholes, list(stubs.values()), grad_ys)))
        seeds = {
            name: towers.seed(terms[name], gradient, local)
            for name, gradient in found.items()
            if gradient is not None
        }
    return wholes, stubs, terms, seeds


def _as_scalars(
    towers: Towers, ys: Sequence[tf.Tensor], grad_ys: Any
) -> tuple[list[Any], list[Any]]:
    """Returns scalar losses with the same gradients, as a gradient of theirs may differ."""
    scalars, seeds = [], []
    dependents = towers.dependents()
    for y, grad_y in zip(ys, grad_ys or [None] * len(ys)):
        if y.shape.num_elements() != 1 or (grad_y is not None and grad_y.op.name in dependents):
            with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
                given = tf.ones_like(y) if grad_y is None else tf.cast(grad_y, y.dtype)
                total, grad_y = tf.reduce_sum(y * tf.stop_gradient(given)), None
            towers.made_from[total.name] = y
            y = total
        scalars.append(y)
        seeds.append(grad_y)
    return scalars, seeds


def _reduce(
    towers: Towers, grads: list[list[Any]], once: list[Any], xs: Sequence[Any]
) -> list[Any]:
    """Sums the towers' gradients, and those that don't depend on the batch, for each of xs."""
    if towers.weights.guarded:
        grads = [_guard(towers, own, i) for i, own in enumerate(grads)]
    reduced = []
    for x, extra, *own in zip(xs, once, *grads):
        terms = [[g for g in grads if g is not None] for grads in (own, [extra])]
        with absolute_scope(towers.graph, 'replicate'), tf.device(x.device):
            reduced.append(_add(*terms) if any(terms) else None)
    # The shape of a sparse one is as good in each tower's own backward pass, before the reduction.
    sparse = [[g.values, g.indices] for g in reduced if isinstance(g, tf.IndexedSlices)]
    tensors = flat_tensors([sparse, [g for g in reduced if isinstance(g, tf.Tensor)]])
    towers.copies.share(tensors)
    towers.reduced += tensors
    return reduced


def _guard(towers: Towers, grads: list[Any], tower: int) -> list[Any]:
    """Leaves out what isn't a number where a tower counts for nothing."""
    counts = towers.weights.counts(losses.UNITS, tf.float64)[tower] > 0
    with absolute_scope(towers.graph, 'replicate'):
        guarded = [
            g if g.dtype.is_integer else tf.where(counts, g, tf.zeros_like(g))
            for g in flat_tensors(grads)
        ]
    return pack_tensors(grads, guarded)


def _check_first_order(towers: Towers, ys: Sequence[tf.Tensor], xs: Sequence[Any]) -> None:
    dependents = towers.copies.dependents(towers.reduced, differentiably=True)
    dependents |= {t.op.name for t in towers.reduced}
    late = [y for y in ys if y.op.name in dependents]
    _check_local(towers, ys, xs)
    if not late:
        return
    # Weights that were themselves made of gradients (MAML's, say) may be differentiated by.
    before = {op.name for op in walk([t.op for t in towers.reduced], inputs)}
    if any(is_variable(x) or x.op.name in before for x in xs):
        raise ValueError(
            f'The gradient of {late[0].name!r} was asked for, which is or depends on a gradient '
            'with respect to variables that was reduced over the towers. On several '
            'devices, only gradients with respect to activations and inputs can be '
            'differentiated again (a gradient penalty, say). Train this model with '
            'replicate(devices=1), or stop the gradient by tf.stop_gradient().'
        )


def _check_local(towers: Towers, ys: Sequence[tf.Tensor], xs: Sequence[Any]) -> None:
    """Checks that what gradients of rows take from the whole batch needs no gradient of its own."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        stopped = op.type in ('StopGradient', 'PreventGradient')
        return (
            []
            if stopped
            else [t.op for t in op.inputs if not (t.dtype.is_integer or t.dtype.is_bool)]
        )

    names = {getattr(x, 'handle', x).op.name for x in xs}
    used = {op.name for op in walk([y.op for y in ys if towers.local_stubs], onward)}
    for stub, term in towers.local_stubs:
        if stub.op.name in used and any(o.name in names for o in walk([term.tensor.op], onward)):
            raise ValueError(
                f'The gradient of {ys[0].name!r} was asked for, which depends on a gradient '
                f'with respect to activations or inputs, and by that on {term.tensor.name!r}, '
                'which is reduced over the whole batch and depends on the same variables. That '
                'is a gradient across devices. Take the inner gradient of a mean or a sum over '
                'rows, stop it by tf.stop_gradient(), or train this model with '
                'replicate(devices=1).'
            )


def _add(own: list[Any], once: list[Any]) -> Any:
    """Adds the towers' gradients and what counts once; the sum is sparse if all are."""
    slices = [g for g in own if isinstance(g, tf.IndexedSlices)]
    sparse = [_joined(slices)] if slices else []
    sparse += [g for g in once if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in own + once if not isinstance(g, tf.IndexedSlices)]
    if dense:
        return tf.add_n([*dense, *([_concat(sparse)] if sparse else [])], name='gradient')
    return _concat(sparse)


def _joined(slices: list[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Joins the towers' slices as one device has them: those of each lookup by themselves."""
    parts = [_lookups(g) for g in slices]
    if len(parts[0]) > 1 and len({len(part) for part in parts}) == 1:
        return _concat([_joined(list(part)) for part in zip(*parts)])
    joined = _concat(slices)
    if not all(_is_unique(g.indices) for g in slices):
        return joined
    # An embedding lookup that takes each id of the batch once; the norm of such a gradient,
    # for one, is another if ids stand in it several times.
    indices, places = tf.unique(joined.indices)
    values = tf.math.unsorted_segment_sum(joined.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, joined.dense_shape)


def _concat(slices: list[tf.IndexedSlices]) -> tf.IndexedSlices:
    values = tf.concat([g.values for g in slices], 0, name='gradient')
    indices = tf.concat([tf.cast(g.indices, slices[0].indices.dtype) for g in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def _lookups(slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """Returns the slices of each lookup of a table, as TensorFlow put those of several together."""
    op = slices.indices.op
    if op.type != 'ConcatV2':
        return [slices]
    indices, values = list(op.inputs)[:-1], list(slices.values.op.inputs)[:-1]
    if slices.values.op.type != 'ConcatV2' or len(values) != len(indices):
        values = tf.split(slices.values, [tf.size(part) for part in indices])
    return [tf.IndexedSlices(v, i, slices.dense_shape) for v, i in zip(values, indices)]


_UNIQUE = frozenset(['Unique', 'UniqueV2'])
# Through which ids go that are distributed over the parts of a table, each to a place of its own.
_DISTRIBUTING = frozenset(
    ['Identity', 'Reshape', 'Cast', 'FloorDiv', 'FloorMod', 'Sub', 'Maximum', 'Select', 'SelectV2']
)


def _is_unique(indices: tf.Tensor) -> bool:
    """Whether indices come from a `tf.unique`, or from the gradient of a sum of segments."""
    op = indices.op
    while op.type in ('Identity', 'Reshape', 'Cast'):
        op = op.inputs[0].op
    if op.type == 'DynamicPartition':  # Of a table in parts: both where an id is and in which.
        return all(map(_is_of_unique, op.inputs))
    return op.type in _UNIQUE or op.type.startswith('SparseSegment')


def _is_of_unique(ids: tf.Tensor) -> bool:
    """Whether ids, or the parts of a table that they are in, come from a `tf.unique`."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return inputs(op) if op.type in _DISTRIBUTING else []

    return any(op.type in _UNIQUE for op in walk([ids.op], onward))
