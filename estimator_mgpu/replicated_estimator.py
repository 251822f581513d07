"""`Estimator`: a tf.estimator.Estimator that replicates its model_fn and has the devices for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf  # noqa: F401, for the examples
from tensorflow_estimator.python.estimator.estimator import EstimatorV2

from estimator_mgpu import compat, explanation
from estimator_mgpu import devices as devices_lib
from estimator_mgpu.replicate import replicate


class Estimator(EstimatorV2):  # tf.estimator.Estimator, whatever else may be in that place
    """A drop-in `tf.estimator.Estimator` for several devices.

    Examples:
      >>> estimator = Estimator(lambda features, labels, mode: None, devices=2)
      >>> estimator.config.session_config.device_count['CPU']
      2

    Args:
      model_fn: as for `tf.estimator.Estimator`; one that is replicated already stays as it is.
      model_dir: as for `tf.estimator.Estimator`.
      config: as for `tf.estimator.Estimator`. Its session config gets the devices.
      params: as for `tf.estimator.Estimator`.
      warm_start_from: as for `tf.estimator.Estimator`.
      devices: as for `replicate()`.
      **options: the further options of `replicate()`.

    Raises:
      TypeError, ValueError: as `replicate()`; and if `devices` or options are given for a model_fn
        that is replicated already.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        warm_start_from: Any = None,
        *,
        devices: devices_lib.Devices = None,
        **options: Any,
    ):
        given = getattr(model_fn, 'replicate_options', None)
        if given is None:
            model_fn = replicate(model_fn, devices=devices, **options)
        elif devices is not None or options:
            raise ValueError(
                f'This model_fn is replicated already, on devices={given["devices"]!r}. Give '
                'devices and options to replicate() or to Estimator(), but not to both.'
            )
        else:
            devices = given['devices']
        config = config or compat.estimator.RunConfig()
        base = config.session_config
        config = config.replace(session_config=devices_lib.session_config(devices, base))
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def explain(self, input_fn: Callable[..., Any]) -> explanation.Explanation:
        """Says how training would be divided, before it: nothing is run, and nothing is written.

        Examples:
          >>> def model_fn(features, labels, mode):
          ...     w = tf.compat.v1.get_variable('w', [3, 1])
          ...     loss = tf.reduce_mean(tf.square(features @ w - labels))
          ...     step = tf.compat.v1.train.get_global_step()
          ...     train_op = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)
          ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
          >>> estimator = Estimator(model_fn, devices=2)
          >>> found = estimator.explain(lambda: (tf.ones([10, 3]), tf.ones([10, 1])))
          towers
            /device:CPU:0: 5 rows
            /device:CPU:1: 5 rows
          variables
            (no device): 8.00B
            /device:CPU:0: 24.0B
          gradients between devices, each step: 12.0B
            in and out of /device:CPU:0: 12.0B
            in and out of /device:CPU:1: 12.0B
          >>> found.reduced_bytes
          12

        Args:
          input_fn: as for `train()`.

        Returns:
          An `Explanation`, which is printed, too. A variable that the model_fn puts on no device,
          as Estimator does the global step, has none in it.

        Raises:
          Exception: what the input_fn and the model_fn raise.
        """
        found = explanation.explain(self.model_fn, input_fn, self)
        print(found)
        return found


def replicate_estimator(
    estimator: Any, *, devices: devices_lib.Devices = None, **options: Any
) -> Estimator:
    """Returns an estimator that does on several devices what another does on one.

    It's for estimators that come without a model_fn to decorate, canned ones say. Its model_dir,
    config and warm start are the other's.

    Examples:
      >>> columns = [tf.feature_column.numeric_column('x')]
      >>> canned = tf.compat.v1.estimator.LinearRegressor(columns)
      >>> replicate_estimator(canned, devices=4).model_dir == canned.model_dir
      True

    Args:
      estimator: a `tf.estimator.Estimator`, of TensorFlow 1 or 2.
      devices: as for `replicate()`.
      **options: the further options of `replicate()`.

    Returns:
      An `Estimator`.

    Raises:
      TypeError: if `estimator` is none.
      TypeError, ValueError: as `replicate()`; as it trains, if the other was replicated already.
    """
    if not isinstance(estimator, compat.estimator.Estimator):
        raise TypeError(
            f'replicate_estimator({estimator!r}) was given a {type(estimator).__name__}. It takes '
            'a tf.estimator.Estimator; a model_fn goes to replicate().'
        )
    # The settings as the estimator has understood them; the argument isn't kept.
    warm_start = estimator._warm_start_settings
    return Estimator(
        estimator.model_fn,
        estimator.model_dir,
        estimator.config,
        warm_start_from=warm_start,
        devices=devices,
        **options,
    )
