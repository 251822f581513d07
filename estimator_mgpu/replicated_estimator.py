"""`Estimator`: a tf.estimator.Estimator that replicates its model_fn and has the devices for it.

On several machines, `train()` joins the cluster of TF_CONFIG: see `cluster`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import check_input_fn, check_steps, list_of_hooks
from estimator_mgpu.checkpoints import checkpoint_files
from estimator_mgpu.cluster import evaluator, join, machine_input, tf_config
from estimator_mgpu.cluster.chief import Chief
from estimator_mgpu.cluster.restarts import LastStep
from estimator_mgpu.cluster.serve import serve
from estimator_mgpu.devices import Devices, device_spec, resolve, session_config
from estimator_mgpu.errors import step_errors
from estimator_mgpu.memory.auto_microbatches import AUTO, AutoMicrobatches, Call
from estimator_mgpu.predictor import Predictor
from estimator_mgpu.replicate import CommonOptions, check_options, check_strategies, replicate
from estimator_mgpu.reports import explain
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.tf_estimator import EstimatorV2, get_default_session_config

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MODES = tf_estimator.estimator.ModeKeys


class EstimatorOptions(CommonOptions, total=False):
    """The further options of `Estimator` and `replicate_estimator()`."""

    microbatches: int | Literal['auto']


def _explains_checkpoint_errors(method: Any) -> Any:
    """A method of Estimator's whose errors with checkpoints are explained."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
        path = arguments.get('checkpoint_path')
        with checkpoint_files.checked_files(arguments['self'].model_dir, path):
            return method(*args, **kwargs)

    return call


class _Overrides(EstimatorV2):  # tf.estimator.Estimator, whatever else may be in that place
    """Methods of `tf.estimator.Estimator` that train on several machines, if TF_CONFIG has them.

    They also explain errors of checkpoints, and with `microbatches='auto'`, they try again if
    memory is too small.

    Estimator forbids its own classes to override its methods, but doesn't look at this one.
    """

    _cluster_config: Any  # the RunConfig of a task of a cluster; None on one machine
    _follower: evaluator.Follower | None  # on an evaluator

    def train(
        self,
        input_fn: Any,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> Any:
        """As Estimator's. On a task other than the chief it serves the chief, and never returns."""
        if self.config.task_type == 'evaluator':
            raise ValueError(
                "TF_CONFIG's task is the evaluator, which doesn't train. Let each machine's script "
                'call tf.estimator.train_and_evaluate().'
            )
        check_input_fn(input_fn)
        check_steps('steps', steps)
        check_steps('max_steps', max_steps)
        hooks = list_of_hooks(hooks)
        chief: Chief | None = None
        if self._cluster_config is not None:
            process = join.join(self._cluster_config)
            if not isinstance(process, Chief):
                serve(process, self.model_dir)
            chief = process

        given = [count for count in (steps, max_steps) if count is not None]
        # Without any, training ends with its input. Estimator itself refuses two, and 0 or less.
        has_last_step = len(given) == 1 and int(given[0]) > 0
        if has_last_step and (self._auto is not None or chief is not None):
            # Training may begin again: from a later checkpoint, or after its last step.
            hooks.append(LastStep(steps, max_steps))
            steps = None

        with self._errors_explained(warm_start=self._warm_start_settings):
            for attempt in self._call(_MODES.TRAIN).attempts():
                with attempt as attempt_hooks:
                    # `_train_once` adds the chief's hook, and the EstimatorSpec has one that
                    # explains errors: see `model_fns.build`. If memory was too small, the attempt
                    # ends without the error, and the next one follows.
                    all_hooks = [*attempt_hooks, *hooks]
                    return self._train_once(
                        chief, input_fn, all_hooks, steps, max_steps, saving_listeners
                    )

    def _train_once(
        self,
        chief: Chief | None,
        input_fn: Any,
        hooks: list[Any],
        steps: int | None,
        max_steps: int | None,
        saving_listeners: Any,
    ) -> Any:
        """An attempt at `train()`, whose arguments it takes, and the chief of several machines."""
        options = _options_of(self)
        by_machine = options['input'] == 'machine'
        if chief is None:
            if by_machine:
                input_fn = machine_input.in_context(input_fn)
            return super().train(input_fn, hooks, steps, max_steps, saving_listeners)

        with chief.training(self._config) as (hook, listener):
            if by_machine:
                call = functools.partial(self._call_input_fn, mode=_MODES.TRAIN)
                towers = resolve(options['devices'], self._config.machines)
                input_fn = machine_input.read(call, input_fn, towers)
            hooks = [*hooks, hook]
            # TensorFlow refuses a listener if no checkpoints are saved.
            if self.config.save_checkpoints_secs or self.config.save_checkpoints_steps:
                saving_listeners = [*(saving_listeners or []), listener]
            train = functools.partial(
                super().train, input_fn, hooks, steps, max_steps, saving_listeners
            )
            return chief.until_saved(train)

    @contextlib.contextmanager
    def _errors_explained(
        self, checkpoint_path: str | None = None, warm_start: Any = None
    ) -> Iterator[None]:
        """Explains what a call raises, of ops and of the files of checkpoints.

        Args:
          checkpoint_path: the checkpoint that is read; None for the last one.
          warm_start: the settings of what variables start from.
        """
        files = checkpoint_files.checked_files(self.model_dir, checkpoint_path, warm_start)
        with step_errors.op_errors_explained(), files:
            yield

    def _call(self, mode: str) -> Call:
        """A call, in attempts that give hooks: there are several with `microbatches='auto'`."""
        return Call(self._auto, mode, self.model_dir)

    @property
    def _auto(self) -> AutoMicrobatches | None:
        """What finds the number of micro-batches; None if the user has given it."""
        microbatches = _options_of(self)['microbatches']
        return microbatches if isinstance(microbatches, AutoMicrobatches) else None

    def _call_input_fn(self, input_fn: Any, mode: str, input_context: Any = None) -> Any:
        check_input_fn(input_fn)
        return super()._call_input_fn(input_fn, mode, input_context)

    export_saved_model = _explains_checkpoint_errors(EstimatorV2.export_saved_model)
    experimental_export_all_saved_models = _explains_checkpoint_errors(
        EstimatorV2.experimental_export_all_saved_models
    )

    def evaluate(
        self,
        input_fn: Any,
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> Any:
        """As Estimator's."""
        check_steps('steps', steps)
        hooks = list_of_hooks(hooks)
        with self._errors_explained(checkpoint_path):
            for attempt in self._call(_MODES.EVAL).attempts():
                with attempt as attempt_hooks:
                    all_hooks = [*attempt_hooks, *hooks]
                    return super().evaluate(input_fn, steps, all_hooks, checkpoint_path, name)

    def predict(
        self,
        input_fn: Any,
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """As Estimator's."""
        hooks = list_of_hooks(hooks)
        with self._errors_explained(checkpoint_path):
            # All attempts read one checkpoint, also if another process goes on training.
            checkpoint_path = checkpoint_path or tf.train.latest_checkpoint(self.model_dir)
            given = 0
            for attempt in self._call(_MODES.PREDICT).attempts():
                with attempt as attempt_hooks:
                    all_hooks = [*attempt_hooks, *hooks]
                    predictions = super().predict(
                        input_fn, predict_keys, all_hooks, checkpoint_path, yield_single_examples
                    )
                    for number, prediction in enumerate(predictions):
                        if number >= given:
                            given += 1
                            yield prediction
                    return


class Estimator(_Overrides):
    """A drop-in `tf.estimator.Estimator`, with its arguments, for several devices.

    Examples:
      >>> estimator = Estimator(lambda features, labels, mode: None, devices=2)
      >>> estimator.config.session_config.device_count['CPU']
      2

    Args:
      model_fn: as for `tf.estimator.Estimator`; one that is replicated already stays as it is.
      config: as for `tf.estimator.Estimator`. Its session config gets the devices.
      devices: as for `replicate()`; not for a model_fn that is replicated already.
      **options: the further options of `replicate()`. `microbatches='auto'` takes twice as many
        micro-batches whenever memory is too small for a step, and goes on from the last checkpoint.
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
        **options: Unpack[EstimatorOptions],
    ):
        check_options(options, 'Estimator')
        if isinstance(model_dir, (int, list, tuple)):
            raise TypeError(
                f'model_dir={model_dir!r} is of {type(model_dir).__name__}, which is no path. '
                'Devices are given by name: Estimator(model_fn, devices=2).'
            )
        if not hasattr(model_fn, 'replicate_options'):
            model_fn = replicate(devices=devices, **options_of_replicate(options))(model_fn)
        elif devices is not None or options:
            raise ValueError(
                'This model_fn is replicated already, on '
                f'devices={model_fn.replicate_options["devices"]!r}. Give devices and options to '
                'replicate() or to Estimator(), but not to both.'
            )
        devices = model_fn.replicate_options['devices']  # type: ignore[attr-defined]
        _check_without_job(devices)

        microbatches = model_fn.replicate_options['microbatches']  # type: ignore[attr-defined]
        may_have_several = isinstance(microbatches, AutoMicrobatches) or microbatches > 1
        config = with_devices(_checked_config(config), devices, 2 if may_have_several else 1)
        self._cluster_config = None
        if config.master:
            self._cluster_config = config
            config = _of_single_task(config)

        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        checkpoint_files.check_name(self.model_dir)
        self._follower = evaluator.follower(self.config)

    def explain(self, input_fn: Callable[..., Any]) -> explain.Explanation:
        """Shows how training would be sharded. Runs no step, and writes nothing.

        Examples:
          >>> from estimator_mgpu import replicate_estimator
          >>> columns = [tf.feature_column.numeric_column('x')]
          >>> estimator = replicate_estimator(tf.estimator.LinearRegressor(columns), devices=2)
          >>> input_fn = lambda: ({'x': tf.ones([10])}, tf.ones([10]))
          >>> explanation = estimator.explain(input_fn)  # doctest: +ELLIPSIS
          towers
            /device:CPU:0: 5 examples
            ...
          ops
            ... are sharded over the devices
            0 run once, unsharded, on the global batch

        The `Explanation` is printed, too. A variable that the model_fn puts on no device, as
        Estimator does the global step, has none in it.
        """
        explanation = explain.explain(self, input_fn)
        print(explanation)
        return explanation

    def predictor(
        self,
        features: Any = None,
        *,
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[tf.train.SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
    ) -> Predictor:
        """Returns a function of a batch that predicts without building the graph in each call.

        It takes features as the model_fn does, but of arrays: NumPy's, eager tensors or lists, in
        any nest of dicts and tuples. It returns what `predict(yield_single_examples=False)` gives:
        a dict with an array for each key; or one array, if the model_fn's predictions are one
        tensor. A batch may have any number of examples. It may be called from several threads at
        once. With `microbatches='auto'`, a call for which memory is too small builds the graph
        anew, with twice as many micro-batches.

        The graph is built and the checkpoint restored once: in the first call, or at once if
        `features` or `serving_input_receiver_fn` are given. Close the predictor, or use it in a
        `with` statement.

        Examples:
          >>> from estimator_mgpu import replicate_estimator
          >>> columns = [tf.feature_column.numeric_column('x')]
          >>> canned = tf.estimator.LinearRegressor(columns)
          >>> estimator = replicate_estimator(canned, devices=2)
          >>> with estimator.predictor() as predict:
          ...     print(predict({'x': [3.0, 4.0, 5.0]})['predictions'].shape)
          ...     print(predict({'x': [6.0]})['predictions'].shape)
          (3, 1)
          (1, 1)

        Args:
          features: a batch like those to come, or a `tf.TensorSpec` in place of each array. All
            batches have its types and its shapes, but for the number of examples; in a spec, None
            is any size. By default, that's the first batch.
          serving_input_receiver_fn: as for `export_saved_model()`. Then the function takes a dict
            of its receiver tensors instead of features.
          predict_keys: as for `predict()`.
          hooks: as for `predict()`; each call is a step. With hooks, calls run one at a time.
          checkpoint_path: as for `predict()`.
        """
        return Predictor(
            self, features, serving_input_receiver_fn, predict_keys, hooks, checkpoint_path
        )


def _options_of(estimator: Any) -> dict[str, Any]:
    """An estimator's options of `replicate()`: the defaults, if it has a plain model_fn."""
    plain = {'microbatches': 1, 'input': 'chief'}
    return getattr(estimator._model_fn, 'replicate_options', plain)


def options_of_replicate(options: EstimatorOptions) -> Any:
    """The options for `replicate()`: an `AutoMicrobatches` in place of 'auto'."""
    microbatches = options.get('microbatches')
    if isinstance(microbatches, str) and microbatches == AUTO:
        return {**options, 'microbatches': AutoMicrobatches()}
    return options


def _check_without_job(devices: Any) -> None:
    """Raises ValueError if devices are those of a task, such as '/job:worker/task:0/gpu:0'."""
    listed = devices if isinstance(devices, list) else []
    of_tasks = [device for device in listed if device_spec(device).job]
    if of_tasks:
        raise ValueError(
            f"devices={devices!r} has {of_tasks[0]!r}. An Estimator's devices are those of each "
            "machine, without its job: ['/device:GPU:0', '/device:GPU:1']."
        )


def _checked_config(config: Any) -> Any:
    """Returns a RunConfig, which reads TF_CONFIG if it's made here, and checks what it has read."""
    if config is None:
        config = tf_estimator.estimator.RunConfig()
    if not isinstance(config, tf_estimator.estimator.RunConfig):
        raise TypeError(
            f'config={config!r} is of {type(config).__name__}. Give a tf.estimator.RunConfig, or '
            'leave it out; hyperparameters go to params.'
        )
    check_strategies(config)
    tf_config.check_read(config)
    return config


def with_devices(config: Any, devices: Any, microbatches: int) -> Any:
    """A RunConfig whose session has the devices, and on several machines sees all of them."""
    session = copy.deepcopy(config.session_config)
    if config.master and session:
        del session.device_filters[:]  # Estimator's own hide machines from each other.
    base = None if session == get_default_session_config() else session
    config = config.replace(session_config=session_config(devices, base, microbatches))
    if config.session_config.operation_timeout_in_ms:
        # Otherwise this process itself would wait, to close a session, for a task that doesn't
        # answer.
        config.session_config.rpc_options.use_rpc_for_inprocess_master = True
    return config


def _of_single_task(config: Any) -> Any:
    """A RunConfig as on one machine: what isn't training, a task does by itself."""
    config = copy.deepcopy(config)
    address = config.cluster_spec.task_address(config.task_type, config.task_id)
    alone = {'cluster': {'chief': [address]}, 'task': {'type': 'chief', 'index': 0}}
    config._init_distributed_setting_from_environment_var(alone)
    return config
