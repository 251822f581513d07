"""`replicate()`: makes a model_fn that builds a graph for one device build one for several.

In: a model_fn and options. Out: a model_fn with the same arguments and the same kind of
EstimatorSpec, whose graph trains on all devices. The graph itself is divided by `partition`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, overload

import tensorflow.compat.v1 as tf

from estimator_mgpu import (
    batch,
    checkpoints,
    end_of_data,
    explain,
    failures,
    large_checkpoints,
    predictor,
    steps,
    unknown_ranks,
)
from estimator_mgpu.auto_microbatches import AutoMicrobatches
from estimator_mgpu.cluster import sessions, tf_config
from estimator_mgpu.devices import (
    Devices,
    check_microbatches,
    checked,
    host_of,
    resolve,
    warn_of_missing,
)
from estimator_mgpu.model_function import ModelFunction
from estimator_mgpu.optimizer import tower_optimizers
from estimator_mgpu.partition import fetches, later_gradients
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.order import check
from estimator_mgpu.partition.order.open_pairs import OpenPair, decide_open_pairs
from estimator_mgpu.partition.rewrites.recomputation.recompute import (
    Recomputation,
    recompute_activations,
)
from estimator_mgpu.partition.towers.build import Towers
from estimator_mgpu.partition.towers.variables import Variables, place_variables
from estimator_mgpu.tf_internals import (
    graph_defs,
    graphs,
    op_types,
    private,
    tf_estimator,
    variable_sharing,
)
from estimator_mgpu.tf_internals.garbage_collection import (
    collect_earlier_graphs,
    no_garbage_collection,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

BatchNorm = Literal['batch', 'device']
Input = Literal['chief', 'machine']
ModelFn = TypeVar('ModelFn', bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """Options of `replicate()`, which describes them, and of an `Estimator`."""

    broadcast: Iterable[str] | None
    variables: Variables
    batch_norm: BatchNorm
    input: Input
    recompute: bool


class Options(CommonOptions, total=False):
    """The options of `replicate()`, but for the devices."""

    microbatches: int


_OPTIONS = (
    'devices',
    'broadcast',
    'variables',
    'batch_norm',
    'input',
    'microbatches',
    'recompute',
)
_LEGAL = {
    'variables': get_args(Variables),
    'batch_norm': get_args(BatchNorm),
    'input': get_args(Input),
}
_RESULTS = ('loss', 'predictions', 'train_op', 'eval_metric_ops')  # of an EstimatorSpec

_building: set[tf.Graph] = set()  # graphs whose model_fn is being called, in any thread


@overload
def replicate(
    model_fn: ModelFn, *, devices: Devices = None, **options: Unpack[Options]
) -> ModelFn: ...


@overload
def replicate(
    model_fn: None = None, *, devices: Devices = None, **options: Unpack[Options]
) -> Callable[[ModelFn], ModelFn]: ...


def replicate(
    model_fn: Callable[..., Any] | None = None,
    *,
    devices: Devices = None,
    broadcast: Iterable[str] | None = None,
    variables: Variables = 'spread',
    batch_norm: BatchNorm = 'batch',
    input: Input = 'chief',
    microbatches: int = 1,
    recompute: bool = False,
    **gone: Any,
) -> Callable[..., Any]:
    """Makes a model_fn train on several devices, with the results that one device would give.

    The model_fn is called once, with the global batch. In the graph that it builds, ops on examples
    are sharded: each device runs them on its part of the batch. Sums over the batch are reduced
    over the devices, and all other ops run once, unsharded.

    Examples:
      >>> @replicate(devices=2)
      ... def model_fn(features, labels, mode):
      ...     w = tf.get_variable('w', [3, 1])
      ...     loss = tf.losses.mean_squared_error(labels, tf.matmul(features, w))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    Args:
      model_fn: as for `tf.estimator.Estimator`. Features and labels are nests of tensors whose
        dimension 0 is the batch. If model_fn is left out, a decorator is returned.
      devices: None for all GPUs (or one CPU device, if there are none); an int for that many GPUs
        (or logical CPU devices, if there are no GPUs); or a list of device strings, one a tower.
      broadcast: names of features that aren't sharded, but replicated on all devices. Scalars
        always are.
      variables: where variables are placed: 'spread' over the devices by their size in bytes, on
        the 'first' device, or on the 'cpu'. A variable that the model_fn itself places stays there.
      batch_norm: batch normalization uses the statistics of the global 'batch', as on one device,
        or those of each 'device', which is faster, but gives other results.
      input: for `Estimator` on several machines: the 'chief' reads the global batch, or each
        'machine' reads its part, selected by the `input_context` that its input_fn is given.
      microbatches: into how many parts each device's examples are divided. It runs them one after
        another, and so needs memory for the activations of one. The results are the same; but
        with `batch_norm='device'`, statistics are those of a micro-batch. `Estimator` takes 'auto',
        too: as many as the memory needs.
      recompute: True to keep only some of the activations, and to compute the others again for the
        gradients. It takes less memory and more time, and the results are the same.

    Returns:
      The replicated model_fn; or a decorator that returns it.
    """
    check_options(gone)
    devices = checked(devices)
    choices = dict(variables=variables, batch_norm=batch_norm, input=input)
    _check_choices(choices)
    if not isinstance(microbatches, AutoMicrobatches):
        check_microbatches(microbatches)
    _check_recompute(recompute)
    names = _names_of_features(broadcast)
    if names and input != 'chief':
        raise ValueError(
            "broadcast needs input='chief': with input='machine', each machine reads a part of the "
            'batch, which is sharded.'
        )

    options = dict(
        devices=devices,
        broadcast=names,
        microbatches=microbatches,
        recompute=recompute,
        **choices,
    )
    decorator = functools.partial(_replicated, options)
    return decorator if model_fn is None else decorator(model_fn)


def check_options(names: Iterable[str], caller: str = 'replicate') -> None:
    """Raises TypeError if there are options that a function of the package doesn't take.

    Args:
      names: the options'.
      caller: the function's name.
    """
    for name in names:
        if name in _OPTIONS:
            continue
        why = f'its options are {", ".join(_OPTIONS[:-1])} and {_OPTIONS[-1]}'
        if name in ('loss_reduction', 'loss_weight'):
            why = (
                "a loss is what the model_fn computes from the global batch, so it's needed no more"
            )
        close = difflib.get_close_matches(name, _OPTIONS, 1)
        remedy = f'Is {close[0]} meant?' if close else 'Leave it out.'
        raise TypeError(f'{caller}() takes no {name}: {why}. {remedy}')


def _check_choices(choices: dict[str, Any]) -> None:
    for name, value in choices.items():
        if not isinstance(value, str) or value not in _LEGAL[name]:
            raise ValueError(f'{name}={value!r} is not known. Legal are {", ".join(_LEGAL[name])}.')


def _names_of_features(broadcast: Any) -> list[str]:
    """Checks the option `broadcast`, and returns it as a list."""
    if broadcast is None:
        return []
    if isinstance(broadcast, str):
        raise TypeError(f'broadcast={broadcast!r} is a str. Give a list of names: [{broadcast!r}].')

    names = list(broadcast) if isinstance(broadcast, Iterable) else [broadcast]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'broadcast={broadcast!r} names no features. Give a list of their names, such as '
            "['vocabulary'], or None."
        )
    return names


def _replicated(options: dict[str, Any], model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model_fn that builds the graph of another model_fn, for several devices.

    Args:
      options: the checked arguments of `replicate()`, by name.
      model_fn: the model_fn to replicate.
    """
    _check_model_fn(model_fn)
    signature = _signature_of(model_fn)
    extended = _with_mode_and_config(signature)

    @functools.wraps(model_fn, updated=())
    def replicated(*args: Any, **kwargs: Any) -> Any:
        _check_builds_graph()
        arguments = extended.bind(*args, **kwargs).arguments
        config = arguments.get('config')
        machines = getattr(config, 'machines', None)  # set by `Chief.training`
        _check_config(config, machines)

        towers = resolve(options['devices'], machines)
        warn_of_missing(towers, config)

        # Without what the model_fn doesn't take.
        call = functools.partial(_call, model_fn, inspect.BoundArguments(signature, arguments))

        collect_earlier_graphs()
        return _build(call, arguments, options, towers, machines)

    vars(replicated).update(__signature__=extended, replicate_options=options)
    return ModelFunction(replicated, _replicated, options, model_fn)


def _build(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    options: dict[str, Any],
    towers: list[str],
    machines: dict[str, list[str]] | None,
) -> Any:
    """Builds the default graph for all towers, and returns its EstimatorSpec.

    Args:
      call: calls the model_fn; on a device, if it's given one.
      arguments: the arguments of the model_fn, by name.
      options: the checked arguments of `replicate()`, by name.
      towers: a device for each tower.
      machines: the devices of each machine; None on one machine.
    """
    features = arguments.get('features')
    labels = arguments.get('labels')
    mode: Any = arguments.get('mode')
    if arguments.get('config') is not None and _is_export((features, labels), mode):
        return call()  # A SavedModel is loaded on any machine, so it names no device.

    auto = options['microbatches']
    if isinstance(auto, AutoMicrobatches):
        noted = functools.partial(auto.noted, mode)
        options = {**options, 'microbatches': auto.count(mode), 'noted': noted}

    # The tensors are listed before the model_fn is called: it may take some out of a dict.
    tensors = end_of_data.tensors_of(features, labels)
    if len(towers) == 1 and options['microbatches'] == 1:
        spec, step = _build_on_one(call, features, labels, options, towers[0])
    else:
        spec, step = _build_on_several(call, features, labels, options, towers, machines)

    end_of_data.hold_writes(tf.get_default_graph(), tensors, spec)
    if step.facts is not None:
        graph = tf.get_default_graph()
        check.check(
            step.facts,
            graph,
            end_of_data.result_ops(spec),
            step.names,
            step.tower_devices,
            not_held=end_of_data.writes_to_hold(graph, tensors, spec)[0],
        )
    spec = _with_scaffold(spec, waits_for_tasks=bool(machines))
    spec = failures.explain_errors(spec)
    steps.record(step)
    graph_defs.serialize_once(tf.get_default_graph())
    graph_defs.write_text_by_c()
    if mode in (None, tf_estimator.estimator.ModeKeys.TRAIN):
        explain.log_sharding(options['devices'], arguments.get('config'))
    return spec


def _build_on_one(
    call: Callable[..., Any], features: Any, labels: Any, options: dict[str, Any], tower: str
) -> tuple[Any, steps.Step]:
    """Builds a graph for one device; returns its EstimatorSpec and a `Step`."""
    leaves = batch.leaves_of(features, labels, options['broadcast'])
    tensors = end_of_data.tensors_of(features, labels)
    ops_before = {op.name for op in tf.get_default_graph().get_operations()}
    spec = call('' if options['devices'] is None else tower)
    with no_garbage_collection():
        open_pairs = decide_order(spec)
        facts = _facts(spec)

        examples = batch.examples_of(leaves)
        recomputation = _recompute(spec, tensors, ops_before, options)
    return spec, steps.Step(
        examples,
        spec.loss,
        [tower],
        recomputation=recomputation,
        open_pairs=open_pairs,
        facts=facts,
    )


def _facts(spec: Any) -> check.Facts | None:
    """What has to stay true of the default graph, if that's to be checked."""
    if not check.is_on():
        return None
    return check.Facts(tf.get_default_graph(), end_of_data.result_ops(spec))


def _recompute(
    spec: Any, tensors: Sequence[tf.Tensor], ops_before: set[str], options: dict[str, Any]
) -> Recomputation | None:
    """Lets gradients of a graph that isn't divided use copies of forward ops, if asked for."""
    if not _recomputes(spec, options):
        return None
    graph = tf.get_default_graph()
    results = _results_of_step(spec)
    model = later_gradients.note_model(graph)
    recomputation = recompute_activations(graph, tensors, spec.loss, results, ops_before)
    model.end_changes({})  # Copies give gradients the same values: the model's own have them, too.
    return recomputation


def _recomputes(spec: Any, options: dict[str, Any]) -> bool:
    """Whether activations are computed again, as it was asked for and there are gradients."""
    trains = spec.mode == tf_estimator.estimator.ModeKeys.TRAIN
    return options['recompute'] and trains and spec.train_op is not None


def _build_on_several(
    call: Callable[..., Any],
    features: Any,
    labels: Any,
    options: dict[str, Any],
    towers: list[str],
    machines: dict[str, list[str]] | None,
) -> tuple[Any, steps.Step]:
    """Builds a graph for several devices; returns its EstimatorSpec and a `Step`."""
    global_batch = batch.look_at(features, labels, options['broadcast'])
    tensors = end_of_data.tensors_of(features, labels)
    ops_before = {op.name for op in tf.get_default_graph().get_operations()}

    spec = call()
    with no_garbage_collection():
        open_pairs = decide_order(spec)
        servers = [f'{name}/device:CPU:0' for name in machines or () if '/job:ps' in name]
        place_variables(options['variables'], servers or towers, ops_before)

        global_batch = unknown_ranks.shapes_told_by_model(global_batch)
        spec, step = _divided(spec, global_batch, towers, ops_before, options)
        if step.plan is None:
            facts = _facts(spec)
            step = step._replace(recomputation=_recompute(spec, tensors, ops_before, options))
            step = step._replace(facts=facts)
    return spec, step._replace(open_pairs=open_pairs)


def _divided(
    spec: Any,
    global_batch: batch.Batch,
    devices: list[str],
    ops_before: set[str],
    options: dict[str, Any],
) -> tuple[Any, steps.Step]:
    """Divides the default graph; returns its EstimatorSpec and a `Step`.

    Args:
      spec: the EstimatorSpec that the model_fn has returned.
      global_batch: the features and labels.
      devices: one a tower.
      ops_before: the names of ops that were there before the model_fn was called.
      options: the checked arguments of `replicate()`, by name; and `noted`, which the number of
        examples goes through, if there is one.
    """
    graph = tf.get_default_graph()
    static = global_batch.static
    with tf.control_dependencies(None), tf.name_scope('batch/'), tf.device(host_of(devices[0])):
        total = global_batch.total() if static is None and global_batch.leaves else None
        if total is not None and 'noted' in options:
            total = options['noted'](total)

    try:
        towers = divide(
            graph,
            global_batch,
            total,
            devices,
            existing_ops=ops_before,
            batch_norm=options['batch_norm'],
            turns=options['microbatches'],
            results=end_of_data.result_ops(spec),
            step_results=_results_of_step(spec),
            recomputed_loss=spec.loss if _recomputes(spec, options) else None,
        )
    except Exception as error:
        reason = str(error).rstrip('.')
        raise RuntimeError(
            f'Dividing the graph over the devices failed: {reason}. Please report the model, or '
            'mend your own rule; meanwhile replicate(devices=1) trains it on one device.'
        ) from error

    examples = total if static is None else static
    step = steps.Step(examples, spec.loss, devices, unknown=global_batch.unknown_titles)
    if towers is None:
        return spec, step._replace(nothing_is_sharded=True)
    spec = _with_full_values(spec, towers)
    fetches.give_values(graph, towers.make_values_of_stateful_ops())
    return spec, step._replace(
        loss=spec.loss,
        plan=towers.plan,
        schedule=towers.schedule,
        recomputation=towers.recomputation,
        names=towers.names,
        facts=towers.facts,
        tower_devices=[tower.device for tower in towers.towers],
    )


def _results_of_step(spec: Any) -> list[tf.Tensor | tf.Operation]:
    """What a step of training, evaluation or prediction is run for."""
    modes = tf_estimator.estimator.ModeKeys
    results: Any = spec.train_op
    if spec.mode == modes.EVAL:
        results = [spec.loss, spec.eval_metric_ops]
    elif spec.mode == modes.PREDICT:
        results = spec.predictions
    leaves = tf.nest.flatten(results, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, (tf.Tensor, tf.Operation))]


def decide_order(spec: Any) -> list[OpenPair]:
    """Decides the order of what a step of the default graph reads and writes, where it's left open.

    Args:
      spec: the EstimatorSpec of the model_fn that has built the graph.

    Returns:
      The pairs whose order was open.
    """
    modes = tf_estimator.estimator.ModeKeys
    results: Any = [spec.loss, spec.train_op]
    if spec.mode == modes.EVAL:
        updates = [update for _, update in (spec.eval_metric_ops or {}).values()]
        results = [spec.loss, updates]
    elif spec.mode == modes.PREDICT:
        results = spec.predictions
    leaves = tf.nest.flatten(results, expand_composites=True)
    ops = [leaf.op for leaf in leaves if isinstance(leaf, tf.Tensor)]
    ops += [leaf for leaf in leaves if isinstance(leaf, tf.Operation)]
    return decide_open_pairs(tf.get_default_graph(), ops)


def _with_full_values(spec: Any, towers: Towers) -> Any:
    """An EstimatorSpec whose results are full values: of the global batch, not of one tower."""

    def full_value(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        return towers.model.note_result(leaf, towers.full_value(leaf))

    results = {name: getattr(spec, name) for name in _RESULTS}
    full = tf.nest.map_structure(full_value, results, expand_composites=True)
    return spec._replace(**full)


def _with_scaffold(spec: Any, waits_for_tasks: bool) -> Any:
    """An EstimatorSpec with a scaffold that knows of checkpoints, devices and other tasks.

    Errors of checkpoints are explained, and no device has more of a checkpoint than its own part.
    """
    scaffold = checkpoints.explain_restore_errors(spec.scaffold or tf.train.Scaffold())
    scaffold = large_checkpoints.save_and_restore_in_place(scaffold)
    if waits_for_tasks:
        scaffold = sessions.wait_for_tasks(scaffold)
    return spec._replace(scaffold=scaffold)


def _call(model_fn: Callable[..., Any], bound: inspect.BoundArguments, device: str = '') -> Any:
    """Calls a model_fn, and returns its EstimatorSpec, also if it returns a TPUEstimatorSpec."""
    with _not_nested():
        try:
            # A device string, unlike a function, stays out of the bodies of loops and branches.
            pinned = tf.device(device) if device else contextlib.nullcontext()
            with pinned, variable_sharing.shared_variables(), tower_optimizers():
                spec = model_fn(*bound.args, **bound.kwargs)
        except Exception as error:
            remedy = tf_estimator.legacy_keras_remedy(error)
            if remedy:
                raise RuntimeError(remedy) from error
            raise

    spec = tf_estimator.as_estimator_spec(spec)
    if not isinstance(spec, tf_estimator.estimator.EstimatorSpec):
        raise TypeError(
            f'The model_fn returned {spec!r} of {type(spec).__name__}. It has to return a '
            'tf.estimator.EstimatorSpec; is a return statement missing?'
        )
    return spec


@contextlib.contextmanager
def _not_nested() -> Iterator[None]:
    """Fails if a replicated model_fn is called by another one, in the same graph."""
    graph = graphs.outermost_graph(tf.get_default_graph())
    if graph in _building:
        raise ValueError(
            'A replicated model_fn is called by another one, that of replicate_estimator() or '
            'contrib say. Replicate it once.'
        )
    _building.add(graph)
    try:
        yield
    finally:
        _building.remove(graph)


def _check_model_fn(model_fn: Any) -> None:
    if not callable(model_fn):
        raise TypeError(
            f'model_fn={model_fn!r} is of {type(model_fn).__name__}, not a function. Devices are '
            "given by name: replicate(devices=2); an estimator's model_fn is estimator.model_fn."
        )
    if hasattr(model_fn, 'replicate_options'):
        raise ValueError('This model_fn is replicated already. Apply replicate() once.')


def _signature_of(model_fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a model_fn; fails if it takes no features."""
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # Some built-in types, such as dict, have none.
        signature = inspect.Signature()
    if 'features' not in signature.parameters:
        raise ValueError(
            f'The model_fn takes {signature}, and no features. An Estimator calls it with '
            'features, and with labels, mode, params and config if it takes them: name them so.'
        )
    return signature


def _with_mode_and_config(signature: inspect.Signature) -> inspect.Signature:
    """Adds the parameters mode and config, if they are missing.

    An Estimator passes only what a signature names, and a replicated model_fn needs both.
    """
    parameters = list(signature.parameters.values())
    for name in ('mode', 'config'):
        if name not in signature.parameters:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(name, kind, default=None))
    # By kind, as Python wants it: **kwargs comes last.
    parameters.sort(key=lambda parameter: parameter.kind)
    return signature.replace(parameters=parameters)


def _check_builds_graph() -> None:
    graph = tf.get_default_graph()
    is_nested = graphs.outermost_graph(graph) in _building  # `_not_nested` has an error for that.
    if tf.executing_eagerly() or (graph.building_function and not is_nested):
        raise RuntimeError(
            'A replicated model_fn builds a graph. Let an Estimator call it, or call it within '
            '`with tf.Graph().as_default():`, rather than eagerly or in a function of TensorFlow.'
        )


def _check_recompute(recompute: Any) -> None:
    """Raises ValueError unless the argument `recompute` is True or False."""
    if not isinstance(recompute, bool):
        raise ValueError(
            f'recompute={recompute!r} is neither True nor False. Give True to compute activations '
            'again for the gradients, rather than keep them.'
        )


def _check_config(config: Any, machines: Any) -> None:
    """Fails if something else would use several devices or machines."""
    strategy = getattr(config, 'train_distribute', None)
    if not strategy and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy:
        raise ValueError(
            f'The RunConfig has train_distribute={type(strategy).__name__}, which puts the '
            'model_fn on several devices itself. Leave out train_distribute, or replicate().'
        )
    if machines is None and getattr(config, 'master', None):
        tf_config.check_read(config)
        raise ValueError(
            'TF_CONFIG has several machines, and a plain Estimator would train on each by '
            'itself. Use estimator_mgpu.Estimator(model_fn, config=config): it trains on all.'
        )


def _is_export(features_and_labels: Sequence[Any], mode: str | None) -> bool:
    """Whether Estimator builds a graph to export: the batch is fed, and no step is trained."""
    if predictor.is_fed(tf.get_default_graph()):
        return False
    trains = mode == tf_estimator.estimator.ModeKeys.TRAIN
    if trains and tf.get_collection(private.GLOBAL_STEP_READ):
        return False  # Estimator has read the global step before it trains; a batch may be fed.
    leaves = tf.nest.flatten(features_and_labels, expand_composites=True)
    ops = [leaf.op for leaf in leaves if tf.is_tensor(leaf)]
    return any(op.type in op_types.PLACEHOLDERS for op in graphs.ancestors(ops))
