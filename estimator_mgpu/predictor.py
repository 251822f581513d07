"""`Predictor`: predicts for batch after batch, with one graph and one session.

`Estimator.predict()` builds the graph and restores the checkpoint each time that it's called, and
a `Predictor` does so once. In: an estimator, and batches of arrays. Out: arrays.

Features are fed: see `batches.feeding`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import list_of_hooks
from estimator_mgpu.batches import batch, feeding
from estimator_mgpu.checkpoints import checkpoint_files
from estimator_mgpu.errors import step_errors
from estimator_mgpu.memory.auto_microbatches import Call, Progress
from estimator_mgpu.tf_internals import op_types, tf_estimator

_PREDICT = tf_estimator.estimator.ModeKeys.PREDICT
_IS_FED = '_estimator_mgpu_is_fed'  # An attribute of the graph.


def is_fed(graph: tf.Graph) -> bool:
    """Whether the graph is a predictor's, which feeds the batch and runs the graph itself."""
    return hasattr(graph, _IS_FED)


class _Model(NamedTuple):
    """A graph that is ready to predict."""

    inputs: dict[batch.Path, feeding.Input]
    predictions: Any  # as the model_fn gives them
    session: tf.train.MonitoredSession
    has_hooks: bool  # that keep notes
    progress: Progress  # of the attempts that run in it


class Predictor:
    """Predicts for batches of arrays. `Estimator.predictor()` makes it and describes it."""

    def __init__(
        self,
        estimator: Any,
        features: Any,
        serving_input_receiver_fn: Callable[[], Any] | None,
        predict_keys: Sequence[str] | None,
        hooks: Sequence[tf.train.SessionRunHook] | None,
        checkpoint_path: str | None,
    ):
        _check_arguments(features, serving_input_receiver_fn, checkpoint_path)
        self._estimator = estimator
        self._serving_input_receiver_fn = serving_input_receiver_fn
        self._predict_keys = predict_keys
        self._hooks = list_of_hooks(hooks)
        self._checkpoint_path = checkpoint_path

        self._specs: Any = None  # what batches are like, once a model was built for one
        self._model: _Model | None = None
        self._is_closed = False
        self._calls = 0  # that are running
        self._runs = 0  # that these calls have begun in the model: each call may need several
        self._state = threading.Condition()  # held to change what is above
        self._hooked_run = threading.Lock()
        if features is not None or serving_input_receiver_fn:
            with self._state:
                self._open(features, estimator._call(_PREDICT))

    def __call__(self, features: Any) -> Any:
        """Returns the predictions for a batch, which are arrays.

        Args:
          features: the batch, in the structure that the model_fn takes, or with the receiver
            tensors of `serving_input_receiver_fn`. Dicts and tuples are structure; all else is
            an array: NumPy's, an eager tensor, a list.
        """
        feeding.check_arrays(features)
        with step_errors.op_errors_explained(), self._running_call():
            call = self._estimator._call(_PREDICT)
            while True:
                with self._opened(features, call) as model:
                    feed, examples = feeding.feed_of(model.inputs, features)
                    # Hooks keep notes from before a run until after it.
                    run_by_run = self._hooked_run if model.has_hooks else contextlib.nullcontext()
                    try:
                        with call.attempt(model.progress, examples), run_by_run:
                            return model.session.run(model.predictions, feed)
                    except tf.errors.ResourceExhaustedError:
                        if call.is_repeated:  # The next call needs a graph as before this one.
                            self._give_up(model)
                        raise
                    self._give_up(model)
                del model  # The memory of its session is needed for the next one.

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for calls that are running, and closes the session."""
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: not self._calls)
            model = self._model
            self._model = None
        if model is not None:
            model.session.close()

    @contextlib.contextmanager
    def _running_call(self) -> Iterator[None]:
        """A call, with all its attempts: `close()` waits for its end."""
        with self._state:
            if self._is_closed:
                raise RuntimeError(
                    'This predictor is closed. Open another one: estimator.predictor().'
                )
            self._calls += 1
        try:
            yield
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def _opened(self, features: Any, call: Call) -> Iterator[_Model]:
        """The model that `_open()` returns, until whose end its session isn't closed."""
        with self._state:
            model = self._open(features, call)
            self._runs += 1
        try:
            yield model
        finally:
            with self._state:
                self._runs -= 1
                self._state.notify_all()
                was_given_up = model is not self._model
                if was_given_up and not self._runs:
                    # As after any error, the end() of hooks isn't called.
                    model.session.__exit__(tf.errors.ResourceExhaustedError, None, None)

    def _give_up(self, model: _Model) -> None:
        """Lets the next attempt open another model, once none runs in this one."""
        with self._state:
            if self._model is model:  # Other calls may have found, too, that memory is too small.
                self._model = None

    def _open(self, features: Any, call: Call) -> _Model:
        """Returns the model, which is built if it isn't there yet.

        Args:
          features: the first batch, or what it will be like; None if it's received.
          call: for which it's needed.
        """
        self._state.wait_for(lambda: self._model is not None or not self._runs)
        while self._model is None:
            progress = Progress()
            explained = checkpoint_files.checked_files(
                self._estimator.model_dir, self._checkpoint_path
            )
            with explained, call.attempt(progress) as hooks, tf.Graph().as_default():
                self._model = self._built(features, progress, hooks)
        return self._model

    def _built(
        self,
        features: Any,
        progress: Progress,
        hooks_of_attempt: Sequence[tf.train.SessionRunHook],
    ) -> _Model:
        """Builds the default graph, and starts its session, as `Estimator.predict()` does.

        Args:
          features: as for `_open()`.
          progress: of the attempts that are going to run in the session.
          hooks_of_attempt: those that the session needs for that.
        """
        graph = tf.get_default_graph()
        setattr(graph, _IS_FED, True)
        config = self._estimator.config
        tf.set_random_seed(config.tf_random_seed)
        tf_estimator.global_step_of(self._estimator, graph)

        specs = None
        if self._serving_input_receiver_fn:
            features, inputs = feeding.received(self._serving_input_receiver_fn)
        else:
            batch_like = features if self._specs is None else self._specs
            broadcast = self._estimator._model_fn.replicate_options['broadcast']
            features, inputs = feeding.placeholders_for(batch_like, broadcast)
            specs = feeding.map_leaves(lambda path, _: inputs[path].spec, batch_like)
        # As for predict(): a TPUEstimator then tells the model_fn the batch size.
        features, _, _ = tf_estimator.features_and_labels(
            self._estimator, lambda params: (features, None), _PREDICT
        )
        spec = tf_estimator.spec_of(self._estimator, features, None, _PREDICT)

        path = self._checkpoint_path or tf.train.latest_checkpoint(self._estimator.model_dir)
        if path is None:
            tf.logging.warning(
                f'There is no checkpoint in {self._estimator.model_dir}, so predictions are those '
                'of initial values.'
            )
        predictions = tf_estimator.predictions_of(self._estimator, spec, path, self._predict_keys)
        predictions = tf.nest.map_structure(_computed, predictions, expand_composites=True)
        creator = tf.train.ChiefSessionCreator(
            spec.scaffold,
            master=config.master,
            config=config.session_config,
            checkpoint_filename_with_path=path,
        )
        hooks = [*self._hooks, *(spec.prediction_hooks or [])]
        session = tf.train.MonitoredSession(creator, [*hooks_of_attempt, *hooks])
        # If memory turns out to be too small, the next model is one like this.
        self._checkpoint_path = path
        self._specs = specs
        has_hooks = any(not isinstance(hook, step_errors.ExplainErrorsHook) for hook in hooks)
        return _Model(inputs, predictions, session, has_hooks, progress)


def _check_arguments(features: Any, serving_input_receiver_fn: Any, checkpoint_path: Any) -> None:
    """Raises ValueError or TypeError for arguments of `Estimator.predictor()` that cannot be."""
    if features is not None and serving_input_receiver_fn is not None:
        raise ValueError(
            'predictor() was given features and a serving_input_receiver_fn. Give one of them, or '
            'none: then the first batch says what features are like.'
        )
    feeding.check_arrays(features)
    if serving_input_receiver_fn is not None and not callable(serving_input_receiver_fn):
        raise TypeError(
            f'serving_input_receiver_fn={serving_input_receiver_fn!r} is no function. Give one '
            'that returns a tf.estimator.export.ServingInputReceiver, as for export_saved_model().'
        )
    if checkpoint_path is not None and not isinstance(checkpoint_path, (str, os.PathLike)):
        raise TypeError(
            f'checkpoint_path={checkpoint_path!r} is no path. Give that of a checkpoint, such as '
            "'DIR/model.ckpt-100'; or leave it out, for the last one."
        )


def _computed(tensor: tf.Tensor) -> tf.Tensor:
    """A prediction that isn't fed: of that, a session gives back what it was fed, such as a str."""
    return tf.identity(tensor) if tensor.op.type in op_types.PLACEHOLDERS else tensor
