"""Estimators that are made of others, of any class.

`replicate_estimator()` makes one for several devices of a canned one, say, or of a `TPUEstimator`.
`remade()`, for `verify()`, makes one with another model_fn. Both have the attributes of the one
they are made of, and its class's methods.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from estimator_mgpu.argument_checks import check_named
from estimator_mgpu.devices import Devices
from estimator_mgpu.replicate import check_options, replicate
from estimator_mgpu.replicated_estimator import Estimator, EstimatorOptions, options_of_replicate
from estimator_mgpu.tf_internals import tf_estimator

if TYPE_CHECKING:
    from typing_extensions import Unpack


def replicate_estimator(
    estimator: Any, *unnamed: NoReturn, devices: Devices = None, **options: Unpack[EstimatorOptions]
) -> Estimator:
    """Returns an estimator that does on several devices what another does on one.

    It's for estimators that come without a model_fn to decorate, canned ones say. Its model_dir,
    config and warm start are the other's, and so are its attributes and the methods that its class
    adds; `devices` and `options` are those of `replicate()`.

    Examples:
      >>> import tensorflow.compat.v1 as tf
      >>> columns = [tf.feature_column.numeric_column('x')]
      >>> canned = tf.estimator.LinearRegressor(columns)
      >>> several = replicate_estimator(canned, devices=4)
      >>> several.model_dir == canned.model_dir
      True
      >>> isinstance(several, Estimator) and isinstance(several, tf.estimator.LinearRegressor)
      True
    """
    if not isinstance(estimator, tf_estimator.estimator.Estimator):
        raise TypeError(
            f'replicate_estimator({estimator!r}) was given a {type(estimator).__name__}. It takes '
            'a tf.estimator.Estimator; a model_fn goes to replicate().'
        )
    check_named(unnamed, 'replicate_estimator(estimator, devices=2)')
    check_options(options, 'replicate_estimator')
    several = _blank(type(estimator))
    several.__dict__.update(vars(estimator))

    model_fn = _with_estimator(several, estimator._model_fn, estimator)
    model_fn = replicate(devices=devices, **options_of_replicate(options))(model_fn)

    Estimator.__init__(
        several, model_fn, estimator.model_dir, estimator.config, *_params_and_warm_start(estimator)
    )
    return several


def remade(estimator: Any, change: Callable[[Any], Any], model_dir: str, config: Any) -> Any:
    """Returns an estimator of the same class and attributes, but with another model_fn.

    Args:
      estimator: the estimator.
      change: (model_fn) -> the other model_fn. What is replicated is first taken apart.
      model_dir: the other one's.
      config: the other one's RunConfig.
    """
    other: Any = object.__new__(type(estimator))
    other.__dict__.update(vars(estimator))
    other.__dict__.update(_cluster_config=None, _follower=None)  # It's a process by itself.
    model_fn = estimator._model_fn
    if hasattr(model_fn, 'replicate_options'):
        model_fn = model_fn.__wrapped__
    model_fn = change(_with_estimator(other, model_fn, estimator))
    config = config.replace(model_dir=model_dir)
    tf_estimator.estimator.Estimator.__init__(
        other, model_fn, None, config, *_params_and_warm_start(estimator)
    )
    return other


def _params_and_warm_start(estimator: Any) -> tuple[Any, Any]:
    """What to give to a constructor for the params and the warm start of an estimator.

    A model_fn that takes no params may be given none. Estimator keeps no warm_start_from, only the
    settings made of it, which it takes as well.
    """
    return estimator._params or None, estimator._warm_start_settings


def _with_estimator(several: Any, model_fn: Any, estimator: Any) -> Any:
    """A model_fn that uses `several` where it uses the estimator that it comes from.

    A canned estimator's model_fn may be a method of the estimator. That of a `TPUEstimator` is a
    function that was defined in a method, and asks `self` for the batch size.

    Args:
      several: the estimator for several devices.
      model_fn: that of the estimator which `several` was made of.
      estimator: that estimator.
    """
    if getattr(model_fn, '__self__', None) is estimator:
        return types.MethodType(model_fn.__func__, several)

    cells = getattr(model_fn, '__closure__', None) or ()
    if not any(_holds(cell, estimator) for cell in cells):
        return model_fn
    closure = tuple(types.CellType(several) if _holds(cell, estimator) else cell for cell in cells)
    rebound = types.FunctionType(
        model_fn.__code__, model_fn.__globals__, argdefs=model_fn.__defaults__, closure=closure
    )
    rebound.__kwdefaults__ = model_fn.__kwdefaults__
    return functools.update_wrapper(rebound, model_fn)


def _holds(cell: types.CellType, value: Any) -> bool:
    """Whether a variable of a function around a model_fn has a value."""
    try:
        return cell.cell_contents is value
    except ValueError:  # It has none yet.
        return False


def _blank(kind: type) -> Estimator:
    """An estimator without attributes, of a class of estimators, and of `Estimator`, too.

    Pickle begins with it as well.
    """
    return object.__new__(_class_of(kind))


@functools.cache
def _class_of(kind: type) -> type[Estimator]:
    """A class of estimators whose methods are those of another one, `kind`, and `Estimator`'s."""
    if issubclass(Estimator, kind):
        return Estimator

    def reduce(self: Any) -> Any:
        return _blank, (kind,), vars(self)

    attributes = {'__module__': kind.__module__, '__doc__': kind.__doc__, '__reduce__': reduce}
    try:
        return types.new_class(
            kind.__name__, (kind, Estimator), {}, lambda namespace: namespace.update(attributes)
        )
    except TypeError as error:
        reason = str(error).rstrip('.')
        raise TypeError(
            f"replicate_estimator() can't make a class that is both {kind.__name__} and an "
            f'Estimator for several devices: {reason}. Build a plain tf.estimator.Estimator of its '
            'model_fn, and replicate that.'
        ) from error
