"""`Estimator`: a tf.estimator.Estimator that replicates its model_fn and has the devices for it."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import checkpoints, explain
from estimator_mgpu.cluster import input as machine_input
from estimator_mgpu.cluster import task, tf_config
from estimator_mgpu.devices import CHIEF, Devices, device_spec, resolve, session_config
from estimator_mgpu.replicate import replicate
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.tf_estimator import EstimatorV2, get_default_session_config


def _checkpoint_errors(method: Any, *args: Any, **kwargs: Any) -> Any:
    """A context that explains errors with the checkpoint that a call of a method reads."""
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    return checkpoints.explained(arguments['self'].model_dir, arguments.get('checkpoint_path'))


def _explains_checkpoint_errors(method: Any) -> Any:
    """A method of Estimator's whose errors with checkpoints are explained."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _checkpoint_errors(method, *args, **kwargs):
            return method(*args, **kwargs)

    return call


class _OnMachines(EstimatorV2):  # tf.estimator.Estimator, whatever else may be in that place
    """Trains on several machines, if TF_CONFIG has them, and explains errors of checkpoints."""

    _joins: Any  # the RunConfig of a task of a cluster; None on one machine
    _follower: Any  # an evaluator's, by which it follows the chief; None on other tasks

    # An Estimator's own class must override no method of it; this one isn't looked at.
    def train(
        self,
        input_fn: Any,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> Any:
        """As Estimator's; on a task other than the chief it serves that, and never returns."""
        if self.config.task_type == 'evaluator':
            raise ValueError(
                "TF_CONFIG's task is the evaluator, which doesn't train. Let each machine's script "
                'call tf.estimator.train_and_evaluate().'
            )
        tf_estimator.check_input_fn(input_fn)
        if isinstance(hooks, tf.train.SessionRunHook):
            raise TypeError(f'hooks={hooks!r} is one hook. Give a list: hooks=[hook].')
        options = self._model_fn.replicate_options
        by_machine = options['input'] == 'machine'
        explained = checkpoints.explained(self.model_dir, None, self._warm_start_settings)
        if self._joins is None:
            input_fn = machine_input.in_context(input_fn) if by_machine else input_fn
            with explained:
                return super().train(input_fn, hooks, steps, max_steps, saving_listeners)
        own_task = task.join(self._joins)
        if own_task.name != CHIEF:
            own_task.serve()
        with explained, own_task.training(self._config) as (hook, listener):
            if by_machine:
                call = functools.partial(
                    self._call_input_fn, mode=tf_estimator.estimator.ModeKeys.TRAIN
                )
                towers = resolve(options['devices'], self._config.machines)
                input_fn = machine_input.read(call, input_fn, towers)
            hooks = [*(hooks or []), hook]
            if self.config.save_checkpoints_secs or self.config.save_checkpoints_steps:
                saving_listeners = [*(saving_listeners or []), listener]
            return super().train(input_fn, hooks, steps, max_steps, saving_listeners)

    def latest_checkpoint(self) -> Any:
        """As Estimator's; an evaluator ends as the chief has, after the last one."""
        if self._follower is None:
            return super().latest_checkpoint()
        return self._follower.follow(super().latest_checkpoint)

    def _call_input_fn(self, input_fn: Any, mode: str, input_context: Any = None) -> Any:
        tf_estimator.check_input_fn(input_fn)
        return super()._call_input_fn(input_fn, mode, input_context)

    evaluate = _explains_checkpoint_errors(EstimatorV2.evaluate)
    export_saved_model = _explains_checkpoint_errors(EstimatorV2.export_saved_model)
    experimental_export_all_saved_models = _explains_checkpoint_errors(
        EstimatorV2.experimental_export_all_saved_models
    )

    @functools.wraps(EstimatorV2.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _checkpoint_errors(EstimatorV2.predict, self, *args, **kwargs):
            yield from super().predict(*args, **kwargs)


class Estimator(_OnMachines):
    """A drop-in `tf.estimator.Estimator`, with its arguments, for several devices.

    Examples:
      >>> estimator = Estimator(lambda features, labels, mode: None, devices=2)
      >>> estimator.config.session_config.device_count['CPU']
      2

    Args:
      model_fn: as for `tf.estimator.Estimator`; one that is replicated already stays as it is.
      config: as for `tf.estimator.Estimator`. Its session config gets the devices.
      devices: as for `replicate()`; not for a model_fn that is replicated already.
      **options: the further options of `replicate()`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        warm_start_from: Any = None,
        *,
        devices: Devices = None,
        **options: Any,
    ):
        if not hasattr(model_fn, 'replicate_options'):
            model_fn = replicate(devices=devices, **options)(model_fn)
        elif devices is not None or options:
            raise ValueError(
                'This model_fn is replicated already, on '
                f'devices={model_fn.replicate_options["devices"]!r}. Give devices and options to '
                'replicate() or to Estimator(), but not to both.'
            )
        devices = model_fn.replicate_options['devices']  # type: ignore[attr-defined]
        listed = devices if isinstance(devices, list) else []
        if jobs := [device for device in listed if device_spec(device).job]:
            raise ValueError(
                f"devices={devices!r} has {jobs[0]!r}. An Estimator's devices are those of each "
                "machine, without its job: ['/device:GPU:0', '/device:GPU:1']."
            )
        if config is None:
            tf_config.check(os.environ.get('TF_CONFIG', '{}'))
            config = tf_estimator.estimator.RunConfig()
        if not isinstance(config, tf_estimator.estimator.RunConfig):
            raise TypeError(
                f'config={config!r} is of {type(config).__name__}. Give a tf.estimator.RunConfig, '
                'or leave it out; hyperparameters go to params.'
            )
        tf_config.check_read(config)
        session = copy.deepcopy(config.session_config)
        if config.master and session:
            del session.device_filters[:]  # They hide machines from each other.
        base = None if session == get_default_session_config() else session
        config = config.replace(session_config=session_config(devices, base))
        self._joins = config if config.master else None
        if config.session_config.operation_timeout_in_ms:
            # Else the session's own process would wait for a task that doesn't answer, to close.
            config.session_config.rpc_options.use_rpc_for_inprocess_master = True
        if config.master:  # What isn't training, a task does by itself.
            config = copy.deepcopy(config)
            own = config.cluster_spec.task_address(config.task_type, config.task_id)
            alone = {'cluster': {'chief': [own]}, 'task': {'type': 'chief', 'index': 0}}
            config._init_distributed_setting_from_environment_var(alone)
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        checkpoints.check_name(self.model_dir)
        self._follower = task.follower(self.config)

    def explain(self, input_fn: Callable[..., Any]) -> explain.Explanation:
        """Shows how training would be sharded. Runs no step, and writes nothing.

        Examples:
          >>> columns = [tf.feature_column.numeric_column('x')]
          >>> estimator = replicate_estimator(tf.estimator.LinearRegressor(columns), devices=2)
          >>> input_fn = lambda: ({'x': tf.ones([10])}, tf.ones([10]))
          >>> found = estimator.explain(input_fn)  # doctest: +ELLIPSIS
          towers
            /device:CPU:0: 5 examples
            ...
          ops
            ... are sharded over the devices
            0 run once, unsharded, on the global batch

        The `Explanation` is printed, too. A variable that the model_fn puts on no device, as
        Estimator does the global step, has none in it.
        """
        found = explain.explain(self, input_fn)
        print(found)
        return found


def replicate_estimator(estimator: Any, *, devices: Devices = None, **options: Any) -> Estimator:
    """Returns an estimator that does on several devices what another does on one.

    It's for estimators that come without a model_fn to decorate, canned ones say. Its model_dir,
    config and warm start are the other's, and so are its attributes and the methods that its class
    adds; `devices` and `options` are those of `replicate()`.

    Examples:
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
    several, model_fn = _blank(type(estimator)), estimator._model_fn
    several.__dict__.update(vars(estimator))
    if getattr(model_fn, '__self__', None) is estimator:
        model_fn = types.MethodType(model_fn.__func__, several)
    model_fn = replicate(devices=devices, **options)(model_fn)
    # Estimator keeps no warm_start_from, only the settings made of it; and a model_fn that takes no
    # params may be given none.
    settings = estimator._params or None, estimator._warm_start_settings
    Estimator.__init__(several, model_fn, estimator.model_dir, estimator.config, *settings)
    return several


def _blank(kind: type) -> Estimator:
    """An estimator of a class and of `Estimator`, without attributes: what pickle begins with."""
    return object.__new__(_class_of(kind))


@functools.cache
def _class_of(kind: type) -> type[Estimator]:
    """A class of estimators whose methods are those of another class, and then `Estimator`'s."""
    if issubclass(Estimator, kind):
        return Estimator

    def reduce(self: Any) -> Any:
        return _blank, (kind,), vars(self)

    own = {'__module__': kind.__module__, '__doc__': kind.__doc__, '__reduce__': reduce}
    try:
        return types.new_class(kind.__name__, (kind, Estimator), {}, lambda body: body.update(own))
    except TypeError as error:
        raise TypeError(
            f"replicate_estimator() can't make a class that is both {kind.__name__} and an "
            f'Estimator for several devices: {error}. Build a plain tf.estimator.Estimator of its '
            'model_fn, and replicate that.'
        ) from error
