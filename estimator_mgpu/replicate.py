"""`replicate()`: makes a model_fn that builds a graph for one device build one for several.

In: a model_fn and options. Out: a model_fn with the same arguments and the same kind of
EstimatorSpec, whose graph trains on all devices. The graph itself is divided by `partition`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    overload,
)

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import check_named
from estimator_mgpu.cluster import tf_config
from estimator_mgpu.devices import Devices, checked, checked_microbatches, resolve, warn_of_missing
from estimator_mgpu.memory.auto_microbatches import AutoMicrobatches
from estimator_mgpu.model_fns.build import build
from estimator_mgpu.model_fns.calls import (
    call_model_fn,
    check_builds_graph,
    check_model_fn,
    model_fn_signature,
    with_mode_and_config,
)
from estimator_mgpu.model_fns.model_function import ModelFunction
from estimator_mgpu.partition.variable_devices import Variables
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.garbage_collection import collect_earlier_graphs

if TYPE_CHECKING:
    from typing_extensions import Unpack

BatchNorm = Literal['batch', 'device']
Input = Literal['chief', 'machine']
# Not Iterable[str]: one str is that, too.
Names = Union[list[str], tuple[str, ...], AbstractSet[str], Iterator[str]]
ModelFn = TypeVar('ModelFn', bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """Options of `replicate()`, which describes them, and of an `Estimator`."""

    broadcast: Names | None
    variables: Variables
    batch_norm: BatchNorm
    input: Input
    recompute: bool


class Options(CommonOptions, total=False):
    """The options of `replicate()`, but for the devices."""

    microbatches: int


_OPTIONS = ('devices', *Options.__annotations__)
_LEGAL = {
    'variables': get_args(Variables),
    'batch_norm': get_args(BatchNorm),
    'input': get_args(Input),
}


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
    *unnamed: Any,
    devices: Devices = None,
    broadcast: Names | None = None,
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
    check_named(unnamed, 'replicate(model_fn, devices=2)')
    check_options(gone)
    devices = checked(devices)
    choices = dict(variables=variables, batch_norm=batch_norm, input=input)
    _check_choices(choices)
    if not isinstance(microbatches, AutoMicrobatches):
        microbatches = checked_microbatches(microbatches)
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
        recompute=_checked_recompute(recompute),
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

    The options are the checked arguments of `replicate()`, by name.
    """
    check_model_fn(model_fn)
    signature = model_fn_signature(model_fn)
    extended = with_mode_and_config(signature)

    @functools.wraps(model_fn, updated=())
    def replicated(*args: Any, **kwargs: Any) -> Any:
        check_builds_graph()
        arguments = extended.bind(*args, **kwargs).arguments
        config = arguments.get('config')
        machines = getattr(config, 'machines', None)  # set by `Chief.training`
        _check_config(config, machines)

        towers = resolve(options['devices'], machines)
        warn_of_missing(towers, config)

        # Without what the model_fn doesn't take.
        call = functools.partial(
            call_model_fn, model_fn, inspect.BoundArguments(signature, arguments)
        )

        collect_earlier_graphs()
        return build(call, arguments, options, towers, machines)

    vars(replicated).update(__signature__=extended, replicate_options=options)
    return ModelFunction(replicated, _replicated, options, model_fn)


def _checked_recompute(recompute: Any) -> bool:
    """Returns the argument `recompute`; raises ValueError unless it's True or False."""
    if not isinstance(recompute, (bool, np.bool_)):
        raise ValueError(
            f'recompute={recompute!r} is neither True nor False. Give True to compute activations '
            'again for the gradients, rather than keep them.'
        )
    return bool(recompute)


def check_strategies(config: Any) -> None:
    """Raises ValueError if a RunConfig puts the model_fn on several devices itself.

    Args:
      config: the RunConfig, whose strategies may be for training or for evaluation; or None.
    """
    strategies = tf_estimator.strategies_of(config)
    if strategies:
        name = next(iter(strategies))
        strategy = _name_of_strategy(strategies[name])
        raise ValueError(
            f'The RunConfig has {name}={strategy}, which puts the model_fn on '
            f'several devices itself. Leave out {name}: the devices of replicate() or '
            'estimator_mgpu.Estimator are for training, evaluation and prediction.'
        )


def _check_config(config: Any, machines: Any) -> None:
    """Fails if something else would use several devices or machines."""
    check_strategies(config)
    if tf.distribute.has_strategy():
        name = _name_of_strategy(tf.distribute.get_strategy())
        raise ValueError(
            f'A replicated model_fn is called in the scope of {name}, which puts it on several '
            'devices itself. Leave out that scope, or replicate().'
        )
    if machines is None and getattr(config, 'master', None):
        tf_config.check_read(config)
        raise ValueError(
            'TF_CONFIG has several machines, and a plain Estimator would train on each by '
            'itself. Use estimator_mgpu.Estimator(model_fn, config=config): it trains on all.'
        )


def _name_of_strategy(strategy: Any) -> str:
    """What a user calls a strategy: in graphs, each one has a class of its own."""
    return type(strategy).__name__.removesuffix('V1')
