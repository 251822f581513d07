"""`replicate()`: one model_fn on several devices."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import (
    compat,
    explanation,
    gradients,
    losses,
    placement,
    private,
    reads,
    sharding,
    specs,
    steps,
    walks,
    weights,
)
from estimator_mgpu import devices as devices_lib
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.towers import Towers

LossWeight = Callable[[Any, Any], Any]


def replicate(
    model_fn: Callable[..., Any] | None = None,
    *,
    devices: devices_lib.Devices = None,
    loss_reduction: str = losses.AUTO,
    loss_weight: LossWeight | None = None,
    broadcast: Sequence[str] = (),
    variables: str = placement.SPREAD,
) -> Callable[..., Any]:
    """Makes a model_fn train on several devices, with the numbers of one.

    The model_fn is called once, with the first of as many shards of the batch as there are
    devices; what it built is copied to the other devices, and the gradients are summed.

    Examples:
      >>> @replicate(devices=2)
      ... def model_fn(features, labels, mode):
      ...     w = tf.get_variable('w', [3, 1])
      ...     loss = tf.losses.mean_squared_error(labels, tf.matmul(features, w))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    Args:
      model_fn: as for `tf.estimator.Estimator`. Its features and labels are nests of tensors with
        one row an example along dimension 0.
      devices: None for every GPU (one CPU device where there is none); an int for that many GPUs
        (logical CPU devices where there is none); or a list of device strings, one a tower.
      loss_reduction: whether a loss is a 'mean' or a 'sum' over the rows of a batch, or one of
        `tf.losses.Reduction`'s constants. 'auto' finds out from the loss.
      loss_weight: a function (features, labels) -> scalar that says how many units the mean loss
        of these rows averages over, say their mask's sum. By default it's the number of rows.
      broadcast: names of features that go whole to every tower. Scalars do so by themselves.
      variables: where variables live: 'spread' over the devices by bytes, on the 'first' device, or
        on the 'cpu'. Those that the model_fn itself puts on another device stay there.

    Returns:
      The replicated model_fn; without `model_fn`, a decorator.

    Raises:
      TypeError: if the model_fn isn't callable or `devices` is of a wrong type.
      ValueError: if `devices`, `loss_reduction` or `variables` is none of the legal ones, or the
        model_fn takes no features; when it is called, if there are no such devices.
    """
    devices_lib.check(devices)
    options: dict[str, Any] = {
        'devices': devices,
        'loss_reduction': loss_reduction,
        'loss_weight': loss_weight,
        'broadcast': broadcast,
        'variables': placement.check(variables),
    }
    if model_fn is None:
        return functools.partial(replicate, **options)
    if not callable(model_fn):
        raise TypeError(
            f'model_fn={model_fn!r} is of {type(model_fn).__name__}, not a function. Devices are '
            "given by name: replicate(devices=2); an estimator's model_fn is estimator.model_fn."
        )
    if hasattr(model_fn, 'replicate_options'):
        raise ValueError('This model_fn is replicated already. Apply replicate() once.')
    if isinstance(broadcast, str):
        raise TypeError(f'broadcast={broadcast!r} is a str. Give a list of names: [{broadcast!r}].')
    reduction = losses.check_reduction(loss_reduction)
    if loss_weight is not None and reduction == losses.SUM:
        raise ValueError(
            "loss_weight says what a mean averages over, but loss_reduction is 'sum'. Leave one "
            'of them out.'
        )
    if loss_weight is not None:
        reduction = losses.UNITS
    if loss_weight is not None and not callable(loss_weight):
        raise TypeError(
            f'loss_weight={loss_weight!r} is no function. It says of features and labels how many '
            'units they have: loss_weight=lambda features, labels: tf.reduce_sum(labels["mask"]).'
        )
    signature = inspect.signature(model_fn)
    if 'features' not in signature.parameters:
        raise ValueError(
            f'The model_fn takes {signature}, and no features. An Estimator calls it with '
            'features, and with labels, mode, params and config if it takes them: name them so.'
        )
    wider_signature = with_parameters(signature, 'mode', 'config')

    @functools.wraps(model_fn, updated=())
    def replicated(*args: Any, **kwargs: Any) -> Any:
        arguments = wider_signature.bind(*args, **kwargs).arguments
        mode, config = arguments.get('mode'), arguments.get('config')
        if gradients.current_towers() is not None:
            raise ValueError(
                'A replicated model_fn is called by another one, that of replicate_estimator() or '
                'contrib say. Replicate it once.'
            )
        _check_not_distributed(config)
        towers = devices_lib.resolve(devices)
        if config is not None:
            devices_lib.warn_of_missing(towers, config.session_config)
        batch = arguments['features'], arguments.get('labels')
        own = {name: value for name, value in arguments.items() if name in signature.parameters}

        def build(features: Any, labels: Any) -> Any:
            own['features'] = features
            if 'labels' in own:
                own['labels'] = labels
            bound = inspect.BoundArguments(signature, own)
            return specs.check(model_fn(*bound.args, **bound.kwargs))

        if config is not None and _is_export(batch, mode):
            with _model_scope(None):  # A SavedModel goes anywhere, so it names no device.
                return build(*batch)
        if len(towers) == 1:
            with _model_scope(None if devices is None else towers[0]):
                spec = build(*batch)
            # Afterwards, for the model's ops to have the names and seeds of an undecorated one's.
            examples = steps.examples_of(*batch, broadcast)
        else:
            placed = placement.Placement(variables, towers)
            spec, examples = _on_towers(
                build, batch, towers, placed, reduction, loss_weight, broadcast
            )
        explanation.tell(steps.record(examples, spec.loss, towers))
        return spec

    replicated.__signature__ = wider_signature  # type: ignore[attr-defined]
    replicated.replicate_options = options  # type: ignore[attr-defined]
    return replicated


def current_tower() -> tuple[tf.Tensor, int]:
    """Returns which tower a model_fn is building, and how many there are.

    Examples:
      >>> index, count = current_tower()  # outside of a replicated model_fn: 0 of 1
      >>> count
      1

    Returns:
      An int32 scalar tensor, which is another number in each tower, from 0; and the number of
      towers.
    """
    towers = gradients.current_towers()
    return (tf.constant(0), 1) if towers is None else (towers.index, len(towers.devices))


def _on_towers(
    build: Callable[[Any, Any], Any],
    batch: tuple[Any, Any],
    devices: Sequence[str],
    placed: placement.Placement,
    reduction: str,
    loss_weight: LossWeight | None,
    broadcast: Sequence[str],
) -> tuple[Any, tf.Tensor]:
    """Returns the EstimatorSpec of all towers, and how many rows the whole batch has."""
    graph = tf.get_default_graph()
    graph.unique_name('replicate')  # From here on, nobody else's scope has this name.
    with absolute_scope(graph, 'replicate'), tf.device('/device:CPU:0'):
        shards = sharding.split(*batch, len(devices), broadcast)
        counts = weights.of_shards(shards, loss_weight)
    towers = Towers(
        graph,
        devices,
        placed,
        counts,
        reduction=reduction,
        static_rows=shards.static_rows,
    )
    towers.give(list(zip(shards.features, shards.labels)))
    with gradients.reducing(towers), _model_scope(devices[0]), placed.scope():
        spec = build(shards.features[0], shards.labels[0])
        spec = specs.merge(spec, towers, shards)
        reads.keep(towers)
        return spec, shards.total


@contextlib.contextmanager
def _model_scope(device: str | None) -> Iterator[None]:
    """The scope that a model_fn is called in."""
    scope = tf.get_variable_scope()
    # A device string, unlike a function, stays out of the bodies of loops and branches.
    place = tf.device(device) if device else contextlib.nullcontext()
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
        with place:
            try:
                yield
            except Exception as error:
                remedy = compat.legacy_keras_remedy(error)
                if remedy is None:
                    raise
                raise RuntimeError(remedy) from error


def _is_export(batch: tuple[Any, Any], mode: str | None) -> bool:
    """Whether Estimator builds a graph to export, rather than one to run.

    Its batch is fed. One that is to train may be, too, but has read the global step before.
    """
    graph = tf.get_default_graph()
    if mode == compat.estimator.ModeKeys.TRAIN and graph.get_collection(private.GLOBAL_STEP_READ):
        return False
    made_by = [t.op for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
    fed = ('Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault')
    return any(op.type in fed for op in walks.walk(made_by, walks.inputs))


def with_parameters(signature: inspect.Signature, *names: str) -> inspect.Signature:
    """Adds parameters, for Estimator passes a model_fn just what it asks for."""
    parameters = list(signature.parameters.values())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    end = next(
        (
            i
            for i, p in enumerate(parameters)
            if p.kind in variadic or p.kind == inspect.Parameter.VAR_KEYWORD
        ),
        len(parameters),
    )
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in names
        if name not in signature.parameters
    ]
    return signature.replace(parameters=parameters[:end] + added + parameters[end:])


def _check_not_distributed(config: Any) -> None:
    strategy = getattr(config, 'train_distribute', None)
    if strategy is not None or tf.distribute.has_strategy():
        strategy = strategy or tf.distribute.get_strategy()
        raise ValueError(
            f'The RunConfig has train_distribute={type(strategy).__name__}, which puts the '
            'model_fn on several devices itself. Leave out train_distribute, or replicate().'
        )
