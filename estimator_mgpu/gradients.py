"""The hook that makes every optimizer's gradients those of all towers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.reduction import local_gradients, reduced_gradients
from estimator_mgpu.subjects import are_weights, is_variable
from estimator_mgpu.towers import Towers

_lock = threading.Lock()
_active: dict[tf.Graph, Towers] = {}
_recordings: dict[tf.Graph, Recording] = {}
_originals: dict[tuple[Any, str], Any] = {}
_thread = threading.local()


class Recording:
    """The gradients with respect to variables that were computed in a graph.

    Attributes:
      gradients: a list of (variable, gradient), in the order of the calls.
      towers: the graph's towers, if it has any.
    """

    def __init__(self) -> None:
        self.gradients: list[tuple[Any, Any]] = []
        self.towers: Towers | None = None


@contextlib.contextmanager
def recording(graph: tf.Graph) -> Iterator[Recording]:
    """Records the gradients that are computed in a graph, reduced ones where they are reduced."""
    with _hook(_recordings, graph, Recording()) as found:
        yield found


@contextlib.contextmanager
def reducing(towers: Towers) -> Iterator[None]:
    """Reduces all gradients with respect to variables that are computed in the towers' graph.

    `tf.gradients`, `Optimizer.compute_gradients` and `minimize`, Keras' `get_gradients` and
    `tf.GradientTape` all end in one of two functions of TensorFlow, and `tf.shape` and `tf.size`
    in two others. While there's a graph with towers, these and `GradientTape.jacobian` are hooked;
    in other graphs, built by other threads say, they do as ever.
    """
    if towers.graph in _recordings:
        _recordings[towers.graph].towers = towers
    with _hook(_active, towers.graph, towers):
        yield


@contextlib.contextmanager
def _hook(registry: dict[str, Any], graph: tf.Graph, value: Any) -> Iterator[Any]:
    with _lock:
        if not _active and not _recordings:
            _install()
        registry[graph] = value
    try:
        yield value
    finally:
        with _lock:
            del registry[graph]
            if not _active and not _recordings:
                _uninstall()


def current_towers() -> Towers | None:
    """Returns the towers that the default graph is being built for, if any."""
    return _active.get(private.outermost(tf.get_default_graph()))


def _install() -> None:
    sizes = [(where, _sizes_hooked) for where in private.SIZES]
    for where, make in (
        (private.GRADIENTS, _hooked),
        (private.TAPE_GRADIENTS, _tape_hooked),
        ((tf.GradientTape, 'jacobian'), _jacobian_hooked),
        *sizes,
    ):
        module, name = where
        _originals[where] = getattr(module, name)
        setattr(module, name, make(_originals[where]))


def _uninstall() -> None:
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()


def _hooked(original: Any) -> Any:
    def gradients(
        ys: Any,
        xs: Any,
        grad_ys: Any = None,
        name: str = 'gradients',
        colocate_gradients_with_ops: bool = False,
        gate_gradients: bool = False,
        aggregation_method: Any = None,
        stop_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        src_graph: Any = None,
    ) -> list[Any]:
        options = (name, colocate_gradients_with_ops, gate_gradients, aggregation_method)

        def compute(ys: Any, xs: Any, grad_ys: Any, stop: Sequence[tf.Tensor] = ()) -> list[Any]:
            stopped = [*(_as_list(stop_gradients) or []), *stop] or None
            # What doesn't depend on the batch adds to the towers' gradients, or nothing.
            unconnected = tf.UnconnectedGradients.NONE if stop else unconnected_gradients
            return original(ys, xs, grad_ys, *options, stopped, unconnected, src_graph)

        xs = _as_list(xs)
        towers = _towers_for(xs)
        with _inside():
            if towers is None:
                found = compute(ys, xs, grad_ys)
            else:
                found = _gradients(towers, _tensors(ys), xs, _as_list(grad_ys), compute)
        return _recorded(xs, found)

    return gradients


def _gradients(
    towers: Towers, ys: list[Any], xs: list[Any], grad_ys: Any, compute: Any
) -> list[Any]:
    """Gradients with respect to weights, reduced, and to activations, left alone."""
    of_weights = are_weights(towers, xs)
    found: list[Any] = [None] * len(xs)
    for weights, gradients in ((True, reduced_gradients), (False, local_gradients)):
        places = [i for i, weight in enumerate(of_weights) if weight == weights]
        if places:
            some = gradients(towers, ys, [xs[i] for i in places], grad_ys, compute)
            for i, gradient in zip(places, some):
                found[i] = gradient
            if not weights:
                _tell_of_rows(towers, [xs[i] for i in places], some)
    return found


def _tell_of_rows(towers: Towers, xs: list[Any], gradients: Sequence[Any]) -> None:
    """Makes rows known of gradients that go by static shapes alone, as a linear model's do."""
    dependents = towers.dependents()
    unknown = [
        (x, gradient)
        for x, gradient in zip(xs, gradients)
        if isinstance(gradient, tf.Tensor) and gradient.op.name not in dependents
    ]
    if unknown:
        rows = towers.rows()
        for x, gradient in unknown:
            axis = rows.axis(x)
            if axis is not None:
                towers.add_rows([gradient], axis)


def _tape_hooked(original: Any) -> Any:
    def imperative_grad(
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        sources_raw: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> list[Any]:
        towers = _towers_for(sources)
        if towers is None:
            with _inside():
                found = original(
                    tape, target, sources, output_gradients, sources_raw, unconnected_gradients
                )
            return _recorded(sources, found)
        if len(set(are_weights(towers, sources))) > 1:
            raise ValueError(
                'A GradientTape was asked for gradients with respect to variables and to tensors '
                'of rows in one call, but only those of variables are reduced over the towers. '
                'Ask for them in two calls, of a GradientTape(persistent=True).'
            )

        def compute(ys: Any, xs: Any, grad_ys: Any, stop: Sequence[tf.Tensor] = ()) -> list[Any]:
            # What the reduction adds to the graph isn't on the tape, nor are rounds of loops.
            if stop:
                return tf.gradients(ys, xs, grad_ys, stop_gradients=stop)
            if towers.is_off_tape(ys):
                towers.notices.off_tape()
                return tf.gradients(ys, xs, grad_ys, unconnected_gradients=unconnected_gradients)
            if grad_ys is not None:
                pairs = [_on_tape(towers, *pair) for pair in zip(ys, grad_ys)]
                ys, grad_ys = map(list, zip(*pairs))
            return original(tape, ys, xs, grad_ys, sources_raw, unconnected_gradients)

        with _inside():
            seeds = _as_list(output_gradients)
            found = _gradients(towers, _tensors(target), list(sources), seeds, compute)
        return _recorded(sources, found)

    return imperative_grad


def _jacobian_hooked(original: Any) -> Any:
    def jacobian(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        towers = _towers_for(tf.nest.flatten(sources))
        if towers is None:
            return original(tape, target, sources, *args, **kwargs)
        if not any(are_weights(towers, tf.nest.flatten(sources))):
            with _inside():
                return original(tape, target, sources, *args, **kwargs)
        of_rows = target.op.name in towers.dependents()
        if of_rows and towers.rows().axis(target) != 0:
            raise ValueError(
                f'GradientTape.jacobian() of {target.name!r} with respect to variables was asked '
                'for. On several devices, that has to have one row an example, along dimension 0. '
                'Ask for the gradient() of each of its entries, by a GradientTape(persistent=True) '
                'if there are several, or train this model with replicate(devices=1).'
            )
        with _inside():
            found = original(tape, target, sources, *args, **kwargs)
        if of_rows:  # What these gradients of rows come to is the whole batch's where it's used.
            towers.add_rows([t for t in tf.nest.flatten(found) if t is not None])
            towers.reductions += 1
        return found

    return jacobian


def _recorded(xs: Any, found: list[Any]) -> list[Any]:
    """Returns gradients, after they were recorded where somebody wants that."""
    recorded = _recordings.get(tf.get_default_graph())
    if recorded is not None and not getattr(_thread, 'inside', False):
        pairs = zip(_as_list(xs), found)
        recorded.gradients += [(x, g) for x, g in pairs if g is not None and is_variable(x)]
    return found


def _sizes_hooked(original: Any) -> Any:
    """Keeps static shapes and sizes of a model's tensors from being mere constants.

    A constant doesn't tell the rows of a shard from any other number.
    """

    def internal(input: Any, name: Any = None, optimize: bool = True, **options: Any) -> tf.Tensor:
        building = current_towers() is not None and not getattr(_thread, 'inside', False)
        if building and not is_variable(input):
            optimize = False
        return original(input, name, optimize=optimize, **options)

    return internal


def _on_tape(towers: Towers, y: tf.Tensor, grad_y: Any) -> tuple[tf.Tensor, Any]:
    """Goes back from what was made to take a gradient of to what the user's tape has seen."""
    while y.name in towers.made_from:
        source = towers.made_from[y.name]
        [grad_y] = tf.gradients(y, source, grad_y)
        y = source
    return y, grad_y


def _towers_for(xs: Sequence[Any]) -> Towers | None:
    """Returns the towers that gradients with respect to `xs` are of, if any."""
    if getattr(_thread, 'inside', False) or tf.executing_eagerly():
        return None
    towers = current_towers()
    if towers is None or tf.get_default_graph() is towers.graph:
        return towers
    if any(are_weights(towers, xs)):
        raise ValueError(
            'Gradients with respect to variables are computed inside a tf.function, tf.cond or '
            'tf.while_loop (tf.hessians makes one), where they cannot be reduced over several '
            'devices. Compute them outside, and only apply them inside; or train this model with '
            'replicate(devices=1).'
        )
    return None


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    before = getattr(_thread, 'inside', False)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = before


def _as_list(values: Any) -> Any:
    if values is None:
        return None
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _tensors(ys: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(y) for y in tf.nest.flatten(ys, expand_composites=True)]
