"""`replicate()`, and as contrib had it `replicate_model_fn()`: one model_fn on several devices."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import batch, checkpoints, end_of_data, explain, steps, unknown_ranks
from estimator_mgpu.cluster import task, tf_config
from estimator_mgpu.devices import Devices, checked, host_of, resolve, warn_of_missing
from estimator_mgpu.model_function import ModelFunction
from estimator_mgpu.optimizer import tower_optimizers
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.towers.variables import CHOICES, SPREAD, place_variables
from estimator_mgpu.tf_internals import graphs, op_types, private, tf_estimator, variable_sharing

_LEGAL = {'variables': CHOICES, 'batch_norm': ('batch', 'device'), 'input': ('chief', 'machine')}


def replicate(
    model_fn: Callable[..., Any] | None = None,
    *,
    devices: Devices = None,
    broadcast: Iterable[str] | None = None,
    variables: str = SPREAD,
    batch_norm: str = 'batch',
    input: str = 'chief',
    **gone: Any,
) -> Callable[..., Any]:
    """Makes a model_fn train on several devices, with the numbers of one.

    The model_fn is called once, with the whole batch. Of the graph that it built, what goes row by
    row then runs on each device for its rows, sums over rows are added up, and the rest runs once.

    Examples:
      >>> @replicate(devices=2)
      ... def model_fn(features, labels, mode):
      ...     w = tf.get_variable('w', [3, 1])
      ...     loss = tf.losses.mean_squared_error(labels, tf.matmul(features, w))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    Args:
      model_fn: as for `tf.estimator.Estimator`. Its features and labels are nests of tensors with
        one row an example along dimension 0. Without it, a decorator is returned.
      devices: None for every GPU (one CPU device where there is none); an int for that many GPUs
        (logical CPU devices where there is none); or a list of device strings, one a tower.
      broadcast: names of features that go whole to every tower. Scalars do so by themselves.
      variables: where variables live: 'spread' over the devices by bytes, on the 'first' device, or
        on the 'cpu'. Those that the model_fn itself puts on a device stay there.
      batch_norm: whether batch normalization takes the statistics of the whole 'batch', as on one
        device, or of each 'device', which is faster and gives other numbers.
      input: on several machines, with `Estimator`, whether the 'chief' reads the batches, or each
        'machine' reads a part of each, by the `input_context` that its input_fn is given.
    """
    for name in gone:
        why = 'its options are devices, broadcast, variables, batch_norm and input'
        if name in ('loss_reduction', 'loss_weight'):
            why = "a loss is what the model_fn makes of the whole batch, so it's needed no more"
        raise TypeError(f'replicate() takes no {name}: {why}. Leave it out.')
    devices = checked(devices)
    chosen = dict(variables=variables, batch_norm=batch_norm, input=input)
    for name, value in chosen.items():
        if not isinstance(value, str) or value not in _LEGAL[name]:
            raise ValueError(f'{name}={value!r} is not known. Legal are {", ".join(_LEGAL[name])}.')
    if isinstance(broadcast, str):
        raise TypeError(f'broadcast={broadcast!r} is a str. Give a list of names: [{broadcast!r}].')
    names = [] if broadcast is None else broadcast
    names = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'broadcast={broadcast!r} names no features. Give a list of their names, such as '
            "['vocabulary'], or None."
        )
    if names and input != 'chief':
        raise ValueError("broadcast goes with input='chief': a machine's part of a batch has rows.")
    options = dict(devices=devices, broadcast=names, **chosen)
    decorator = functools.partial(_replicated, options)
    return decorator if model_fn is None else decorator(model_fn)


def _replicated(options: dict[str, Any], model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A model_fn that builds what another one does, and divides it."""
    if not callable(model_fn):
        raise TypeError(
            f'model_fn={model_fn!r} is of {type(model_fn).__name__}, not a function. Devices are '
            "given by name: replicate(devices=2); an estimator's model_fn is estimator.model_fn."
        )
    if hasattr(model_fn, 'replicate_options'):
        raise ValueError('This model_fn is replicated already. Apply replicate() once.')
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # Of dict, say, nobody knows.
        signature = inspect.Signature()
    if 'features' not in signature.parameters:
        raise ValueError(
            f'The model_fn takes {signature}, and no features. An Estimator calls it with '
            'features, and with labels, mode, params and config if it takes them: name them so.'
        )
    # Estimator passes a model_fn just what it asks for.
    kind, own = inspect.Parameter.POSITIONAL_OR_KEYWORD, signature.parameters
    added = [inspect.Parameter(n, kind, default=None) for n in ('mode', 'config') if n not in own]
    wider = signature.replace(parameters=sorted([*own.values(), *added], key=lambda p: p.kind))

    @functools.wraps(model_fn, updated=())
    def replicated(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError(
                'A replicated model_fn builds a graph. Let an Estimator call it, or call it within '
                '`with tf.Graph().as_default():`.'
            )
        arguments = wider.bind(*args, **kwargs).arguments
        names = ('features', 'labels', 'mode', 'config')
        features, labels, mode, config = map(arguments.get, names)
        current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        if strategy := getattr(config, 'train_distribute', None) or current:
            raise ValueError(
                f'The RunConfig has train_distribute={type(strategy).__name__}, which puts the '
                'model_fn on several devices itself. Leave out train_distribute, or replicate().'
            )
        machines = getattr(config, 'machines', None)  # set by `task.Task.training`
        if machines is None and getattr(config, 'master', None):
            tf_config.check_read(config)
            raise ValueError(
                'TF_CONFIG has several machines, and a plain Estimator would train on each by '
                'itself. Use estimator_mgpu.Estimator(model_fn, config=config): it trains on all.'
            )
        towers = resolve(options['devices'], machines)
        warn_of_missing(towers, config)
        bound = inspect.BoundArguments(signature, arguments)  # Leaves out what it doesn't take.
        broadcast = options['broadcast']
        if config is not None and _is_export((features, labels), mode):
            return _build(model_fn, bound)  # A SavedModel goes anywhere: it names no device.
        # What the batch has is looked up before the model_fn, which may take some out of a dict.
        tensors = end_of_data.tensors_of(features, labels)
        if len(towers) == 1:
            leaves = batch.leaves_of(features, labels, broadcast)
            spec = _build(model_fn, bound, '' if options['devices'] is None else towers[0])
            step = steps.Step(batch.examples_of(leaves), spec.loss, towers)
        else:
            found = batch.look_at(features, labels, broadcast)
            before = {op.name for op in tf.get_default_graph().get_operations()}
            ps = [f'{name}/device:CPU:0' for name in machines or () if '/job:ps' in name]
            built = _build(model_fn, bound)
            place_variables(options['variables'], ps or towers, before)
            found = unknown_ranks.shapes_told_by_model(found)
            spec, step = _divided(built, found, towers, before, options['batch_norm'])
        end_of_data.hold_writes(tf.get_default_graph(), tensors, spec)
        scaffold = checkpoints.watch(spec.scaffold or tf.train.Scaffold())
        spec = spec._replace(scaffold=task.hold(scaffold) if machines else scaffold)
        steps.record(step)
        if mode in (None, tf_estimator.estimator.ModeKeys.TRAIN):
            explain.tell()
        return spec

    vars(replicated).update(__signature__=wider, replicate_options=options)
    return ModelFunction(replicated, _replicated, options, model_fn)


_building: set[tf.Graph] = set()  # whose model_fns are being called, in any thread


def _divided(
    spec: Any, found: batch.Batch, devices: list[str], before: set[str], batch_norm: str
) -> tuple[Any, steps.Step]:
    """Divides a graph, and returns its EstimatorSpec and what is known of its steps."""
    graph = tf.get_default_graph()
    with tf.control_dependencies(None), tf.name_scope('batch/'), tf.device(host_of(devices[0])):
        total = found.total() if found.static is None and found.leaves else None
    collects = gc.isenabled()
    gc.disable()  # It would look at each of the graph's ops over and over.
    try:
        towers = divide(graph, found, total, devices, before, batch_norm)
    except Exception as error:
        raise RuntimeError(
            f'Dividing the graph over the devices failed: {error}. Please report the model, or '
            'mend your own rule; meanwhile replicate(devices=1) trains it on one device.'
        ) from error
    finally:
        if collects:
            gc.enable()
    examples = total if found.static is None else found.static
    step = steps.Step(examples, spec.loss, devices, unknown=found.unknown_titles)
    if towers is None:
        return spec, step
    names = ('loss', 'predictions', 'train_op', 'eval_metric_ops')
    results = tf.nest.map_structure(
        lambda leaf: towers.full_value(leaf) if isinstance(leaf, tf.Tensor) else leaf,
        {name: getattr(spec, name) for name in names},
        expand_composites=True,
    )
    return spec._replace(**results), step._replace(loss=results['loss'], plan=towers.plan)


def _build(model_fn: Callable[..., Any], bound: inspect.BoundArguments, device: str = '') -> Any:
    """Calls a model_fn, and returns its EstimatorSpec, also where that is of a TPUEstimator."""
    graph = graphs.outermost_graph(tf.get_default_graph())
    if graph in _building:
        raise ValueError(
            'A replicated model_fn is called by another one, that of replicate_estimator() or '
            'contrib say. Replicate it once.'
        )
    _building.add(graph)
    try:
        # A device string, unlike a function, stays out of the bodies of loops and branches.
        pinned = tf.device(device) if device else contextlib.nullcontext()
        with pinned, variable_sharing.shared_variables(), tower_optimizers():
            spec = model_fn(*bound.args, **bound.kwargs)
    except Exception as error:
        if remedy := tf_estimator.legacy_keras_remedy(error):
            raise RuntimeError(remedy) from error
        raise
    finally:
        _building.remove(graph)
    spec = spec.as_estimator_spec() if hasattr(spec, 'as_estimator_spec') else spec
    if not isinstance(spec, tf_estimator.estimator.EstimatorSpec):
        raise TypeError(
            f'The model_fn returned {spec!r} of {type(spec).__name__}. It has to return a '
            'tf.estimator.EstimatorSpec; is a return statement missing?'
        )
    return spec


def _is_export(batch: tuple[Any, Any], mode: str | None) -> bool:
    """Whether Estimator builds a graph to export: the batch is fed, and no step is trained."""
    if mode == tf_estimator.estimator.ModeKeys.TRAIN and tf.get_collection(
        private.GLOBAL_STEP_READ
    ):
        return False  # Estimator has read the global step before it trains; a batch may be fed.
    given = [t.op for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
    return any(op.type in op_types.PLACEHOLDERS for op in graphs.ancestors(given))
