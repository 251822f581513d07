"""`Estimator`: a tf.estimator.Estimator that replicates its model_fn and has the devices for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf  # noqa: F401, for the examples
from tensorflow_estimator.python.estimator.estimator import EstimatorV2
from tensorflow_estimator.python.estimator.run_config import get_default_session_config

from estimator_mgpu import cluster, compat, explanation, machine_input
from estimator_mgpu.devices import CHIEF, Devices, check, resolve, session_config, spec_of
from estimator_mgpu.replicate import replicate


class _OnMachines(EstimatorV2):  # tf.estimator.Estimator, whatever else may be in that place
    """Trains on several machines, if TF_CONFIG has them."""

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
        options = self._model_fn.replicate_options
        by_machine = options['input'] == 'machine'
        if self._joins is None:
            input_fn = machine_input.in_context(input_fn) if by_machine else input_fn
            return super().train(input_fn, hooks, steps, max_steps, saving_listeners)
        task = cluster.join(self._joins)
        if task.name != CHIEF:
            task.serve()
        with task.training(self._config) as (hook, listener):
            if by_machine:
                call = functools.partial(self._call_input_fn, mode=compat.estimator.ModeKeys.TRAIN)
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
        if jobs := [device for device in check(devices) if spec_of(device).job]:
            raise ValueError(
                f"devices={devices!r} has {jobs[0]!r}. An Estimator's devices are those of each "
                "machine, without its job: ['/device:GPU:0', '/device:GPU:1']."
            )
        config = config or compat.estimator.RunConfig()
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
        self._follower = cluster.follower(self.config)

    def explain(self, input_fn: Callable[..., Any]) -> explanation.Explanation:
        """Says how training would be divided, before it: nothing is run, and nothing is written.

        Examples:
          >>> columns = [tf.feature_column.numeric_column('x')]
          >>> estimator = replicate_estimator(tf.estimator.LinearRegressor(columns), devices=2)
          >>> input_fn = lambda: ({'x': tf.ones([10])}, tf.ones([10]))
          >>> found = estimator.explain(input_fn)  # doctest: +ELLIPSIS
          towers
            /device:CPU:0: 5 rows
            ...
          ops
            ... run in towers
            0 run once, on all rows

        The `Explanation` is printed, too. A variable that the model_fn puts on no device, as
        Estimator does the global step, has none in it.
        """
        found = explanation.explain(self, input_fn)
        print(found)
        return found


def replicate_estimator(estimator: Any, *, devices: Devices = None, **options: Any) -> Estimator:
    """Returns an estimator that does on several devices what another does on one.

    It's for estimators that come without a model_fn to decorate, canned ones say. Its model_dir,
    config and warm start are the other's; `devices` and `options` are those of `replicate()`.

    Examples:
      >>> columns = [tf.feature_column.numeric_column('x')]
      >>> canned = tf.estimator.LinearRegressor(columns)
      >>> replicate_estimator(canned, devices=4).model_dir == canned.model_dir
      True
    """
    if not isinstance(estimator, compat.estimator.Estimator):
        raise TypeError(
            f'replicate_estimator({estimator!r}) was given a {type(estimator).__name__}. It takes '
            'a tf.estimator.Estimator; a model_fn goes to replicate().'
        )
    # The settings as the estimator has understood them; the argument isn't kept.
    options = {'warm_start_from': estimator._warm_start_settings, 'devices': devices, **options}
    return Estimator(estimator.model_fn, estimator.model_dir, estimator.config, **options)
