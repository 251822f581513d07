"""`Predictor`: predicts for batch after batch, with one graph and one session.

`Estimator.predict()` builds the graph and restores the checkpoint each time that it's called, and
a `Predictor` does so once. In: an estimator, and batches of arrays. Out: arrays.

The graph has an `_Input` for each feature. Each batch is taken apart into features, which are
checked by their inputs, and fed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.batches import batch
from estimator_mgpu.checkpoints import checkpoint_files
from estimator_mgpu.errors import failures
from estimator_mgpu.memory.auto_microbatches import Call, Progress
from estimator_mgpu.tf_internals import op_types, tf_estimator

_COMPOSITE_TENSORS = (tf.SparseTensor, tf.RaggedTensor)
_COMPOSITE_VALUES = (tf.SparseTensorValue, tf.ragged.RaggedTensorValue)  # as a session gives them
_PREDICT = tf_estimator.estimator.ModeKeys.PREDICT
_IS_FED = '_estimator_mgpu_is_fed'  # An attribute of the graph.


def is_fed(graph: tf.Graph) -> bool:
    """Whether the graph is a predictor's, which feeds the batch and runs the graph itself."""
    return hasattr(graph, _IS_FED)


class _Input(NamedTuple):
    """What a feature is fed to."""

    spec: tf.TypeSpec
    placeholders: list[tf.Tensor]  # several for a sparse or ragged tensor
    has_examples: bool  # along dimension 0, as far as is known


class _Value(NamedTuple):
    """A feature of a batch."""

    spec: tf.TypeSpec
    arrays: list[np.ndarray]  # one for each placeholder of the input


class _Model(NamedTuple):
    """A graph that is ready to predict."""

    inputs: dict[batch.Path, _Input]
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
        broadcast: Sequence[str],
        predict_keys: Sequence[str] | None,
        hooks: Sequence[tf.train.SessionRunHook] | None,
        checkpoint_path: str | None,
    ):
        _check_arguments(features, serving_input_receiver_fn, hooks, checkpoint_path)
        self._estimator = estimator
        self._serving_input_receiver_fn = serving_input_receiver_fn
        self._broadcast = broadcast
        self._predict_keys = predict_keys
        self._hooks = list(hooks or [])
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
        _check_batch(features)
        with failures.op_errors_explained(), self._running_call():
            call = self._estimator._call(_PREDICT)
            while True:
                with self._opened(features, call) as model:
                    feed, examples = _feed(model.inputs, features)
                    try:
                        with call.attempt(model.progress, examples):
                            return self._run(model, feed)
                    except tf.errors.ResourceExhaustedError:
                        if call.is_repeated:  # The next call needs a graph as before this one.
                            self._give_up(model)
                        raise
                    self._give_up(model)
                del model  # The memory of its session is needed for the next one.

    def _run(self, model: _Model, feed: dict[tf.Tensor, np.ndarray]) -> Any:
        """Predicts for a batch, of which each placeholder is fed its array."""
        # Hooks keep notes from before a run until after it.
        one_at_a_time = self._hooked_run if model.has_hooks else contextlib.nullcontext()
        with one_at_a_time:
            return model.session.run(model.predictions, feed)

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
        """The model, for an attempt, until whose end its session isn't closed.

        Args:
          features: as for `_open()`.
          call: as there.
        """
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
            attempt = call.attempt(Progress())
            explained = checkpoint_files.file_errors_explained(
                self._estimator.model_dir, self._checkpoint_path
            )
            with explained, attempt as hooks, tf.Graph().as_default():
                self._model = self._built(features, attempt.progress, hooks)
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
            features, inputs = _received(self._serving_input_receiver_fn)
        else:
            batch_like = features if self._specs is None else self._specs
            features, inputs = _placeholders_for(batch_like, self._broadcast)
            specs = _map_leaves(lambda path, _: inputs[path].spec, batch_like)
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
        has_hooks = any(not isinstance(hook, failures.ExplainErrorsHook) for hook in hooks)
        return _Model(inputs, predictions, session, has_hooks, progress)


def _check_arguments(
    features: Any, serving_input_receiver_fn: Any, hooks: Any, checkpoint_path: Any
) -> None:
    if features is not None and serving_input_receiver_fn is not None:
        raise ValueError(
            'predictor() was given features and a serving_input_receiver_fn. Give one of them, or '
            'none: then the first batch says what features are like.'
        )
    _check_batch(features)
    if serving_input_receiver_fn is not None and not callable(serving_input_receiver_fn):
        raise TypeError(
            f'serving_input_receiver_fn={serving_input_receiver_fn!r} is no function. Give one '
            'that returns a tf.estimator.export.ServingInputReceiver, as for export_saved_model().'
        )
    if isinstance(hooks, tf.train.SessionRunHook):
        raise TypeError(f'hooks={hooks!r} is one hook. Give a list: hooks=[hook].')
    if hooks is not None and not isinstance(hooks, Iterable):
        raise TypeError(f'hooks={hooks!r} is no list of hooks. Give one, as for predict().')
    if checkpoint_path is not None and not isinstance(checkpoint_path, (str, os.PathLike)):
        raise TypeError(
            f'checkpoint_path={checkpoint_path!r} is no path. Give that of a checkpoint, such as '
            "'DIR/model.ckpt-100'; or leave it out, for the last one."
        )


def _check_batch(features: Any) -> None:
    """Raises TypeError if what is given for a batch makes batches."""
    if callable(features) or isinstance(features, tf.compat.v2.data.Dataset):
        raise TypeError(
            f'The predictor was given {features!r} as features. Give a batch of arrays, rather '
            'than a dataset or an input_fn; a function that makes inputs is named: '
            'serving_input_receiver_fn=function.'
        )


def _computed(tensor: tf.Tensor) -> tf.Tensor:
    """A prediction that isn't fed: of that, a session gives back what it was fed, such as a str."""
    return tf.identity(tensor) if tensor.op.type in op_types.PLACEHOLDERS else tensor


# What is fed.


def _placeholders_for(
    features: Any, broadcast: Sequence[str]
) -> tuple[Any, dict[batch.Path, _Input]]:
    """Makes placeholders for batches like the given one, and of any size.

    Args:
      features: a batch of arrays, or `tf.TypeSpec`s in place of arrays, which are taken as they
        are.
      broadcast: names of features that have no examples.

    Returns:
      The features for the model_fn, and their inputs by path.
    """
    exact_specs = _map_leaves(_spec_of, features)
    with_examples = batch.leaves_of(exact_specs, None, broadcast)
    inputs = {}

    def tensor_for(path: batch.Path, leaf: Any) -> Any:
        spec = _spec_of(path, leaf)
        has_examples = path in with_examples and spec.shape.rank != 0
        if has_examples and not isinstance(leaf, tf.TypeSpec):
            spec = _of_any_size(spec)

        parts = tf.nest.flatten(spec, expand_composites=True)
        placeholders = [tf.placeholder(part.dtype, part.shape) for part in parts]
        inputs[path] = _Input(spec, placeholders, has_examples)
        return tf.nest.pack_sequence_as(spec, placeholders, expand_composites=True)

    return _map_leaves(tensor_for, features), inputs


def _received(serving_input_receiver_fn: Callable[[], Any]) -> tuple[Any, dict[batch.Path, _Input]]:
    """Calls a user's function for what is fed.

    Returns:
      The features for the model_fn, and the inputs by path, which needn't be the features.
    """
    receiver = serving_input_receiver_fn()
    if not hasattr(receiver, 'receiver_tensors'):
        raise TypeError(
            f'The serving_input_receiver_fn returned {receiver!r}. It has to return a '
            'tf.estimator.export.ServingInputReceiver, as for export_saved_model().'
        )
    inputs = {}
    for name, tensor in receiver.receiver_tensors.items():
        placeholders = tf.nest.flatten(tensor, expand_composites=True)
        spec = tf.type_spec_from_value(tensor)
        inputs['features', name] = _Input(spec, placeholders, has_examples=False)
    return receiver.features, inputs


def _spec_of(path: batch.Path, leaf: Any) -> tf.TypeSpec:
    """What is known of an array, or of what is like one."""
    return leaf if isinstance(leaf, tf.TypeSpec) else _value_of(path, leaf).spec


def _of_any_size(spec: Any) -> tf.TypeSpec:
    """What is known of all batches, by that of one: it may have any number of examples.

    The other dimensions of a sparse tensor often follow from the largest example of a batch, so
    these are any, too.
    """
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None] * spec.shape.rank, spec.dtype)
    shape = [None, *spec.shape.as_list()[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def _feed(
    inputs: Mapping[batch.Path, _Input], features: Any
) -> tuple[dict[tf.Tensor, np.ndarray], int | None]:
    """Takes a batch apart; fails if it isn't what inputs take.

    Returns:
      Its arrays, by placeholder, and how many examples it has; None if it isn't known.
    """
    leaves: dict[batch.Path, Any] = {}
    _map_leaves(leaves.__setitem__, features)
    _check_names(inputs, leaves)

    feed: dict[tf.Tensor, np.ndarray] = {}
    examples = {}
    for path, leaf in leaves.items():
        expected = inputs[path]
        value = _value_of(path, leaf, expected.spec)
        _check_value(path, value.spec, expected.spec)
        feed.update(zip(expected.placeholders, value.arrays))
        if expected.has_examples:
            examples[path] = value.spec

    differing = batch.differing_sizes(examples)
    if differing:
        raise ValueError(
            f'Each feature needs an entry for each example, but their numbers differ: {differing}. '
            "What isn't per example, such as a vocabulary, is named in replicate(broadcast=[...])."
        )
    sizes = [spec.shape[0] for spec in examples.values() if spec.shape.rank]
    return feed, sizes[0] if sizes else None


def _check_names(inputs: Mapping[batch.Path, _Input], leaves: Mapping[batch.Path, Any]) -> None:
    """Raises ValueError if a feature is missing, or if there is one that has no input."""
    missing = []
    for path, expected in inputs.items():
        has_default = expected.placeholders[0].op.type == op_types.PLACEHOLDER_WITH_DEFAULT
        if path not in leaves and not has_default:
            missing.append(_name(path))
    unknown = [_name(path) for path in leaves if path not in inputs]

    wrong = []
    if missing:
        wrong.append(f'lacks {", ".join(missing)}')
    if unknown:
        wrong.append(f'has {", ".join(unknown)}')
    if wrong:
        legal = [f'{_name(path)} ({_described(known.spec)})' for path, known in inputs.items()]
        raise ValueError(
            f'The batch {" and ".join(wrong)}. This predictor takes {", ".join(legal)}.'
        )


def _name(path: batch.Path) -> str:
    """What messages call a feature: "feature 'user/age'", or 'an array without a name'."""
    return batch.title(path) if path[1:] else 'an array without a name'


def _check_value(path: batch.Path, given: Any, expected: Any) -> None:
    """Raises ValueError if a feature has another type or shape than its input."""
    if expected.is_compatible_with(given):
        return
    raise ValueError(
        f'{batch.title(path)} is {_described(given)}. This predictor takes {_described(expected)}. '
        'Convert it; or tell estimator.predictor(features) what may vary, by a tf.TensorSpec in '
        'place of each array: tf.TensorSpec([None, None], tf.float32), say.'
    )


def _described(spec: Any) -> str:
    """What messages call a spec: `float32 of shape [None, 3]`."""
    kinds = {tf.SparseTensorSpec: 'sparse ', tf.RaggedTensorSpec: 'ragged '}
    shape = 'any shape' if spec.shape.rank is None else f'shape {spec.shape.as_list()}'
    return f'{kinds.get(type(spec), "")}{spec.dtype.name} of {shape}'


# Batches.


def _map_leaves(function: Callable[[batch.Path, Any], Any], features: Any) -> Any:
    """Replaces each leaf of a batch by what a function of its path and of it returns.

    As in `tf.data`, dicts and tuples are structure, and a list is an array.
    """

    def replaced(nest: Any, path: batch.Path) -> Any:
        if isinstance(nest, Mapping):
            return {key: replaced(value, (*path, key)) for key, value in nest.items()}
        if isinstance(nest, tuple) and not isinstance(nest, _COMPOSITE_VALUES):
            names = getattr(nest, '_fields', range(len(nest)))
            values = [replaced(value, (*path, name)) for name, value in zip(names, nest)]
            return type(nest)(*values) if hasattr(nest, '_fields') else tuple(values)
        return function(path, nest)

    return replaced(features, ('features',))


def _value_of(path: batch.Path, leaf: Any, expected: Any = None) -> _Value:
    """Takes a feature of a batch apart into arrays.

    Args:
      path: the keys that lead to the feature.
      leaf: an array, or what can be made one.
      expected: the spec of its input, if there is one: what has no type of its own, such as a list
        of floats, gets that one.
    """
    if tf.is_tensor(leaf) and tf.is_symbolic_tensor(leaf):
        raise TypeError(
            f'{batch.title(path)} is {leaf!r}, which is of a graph. Give arrays, or eager tensors.'
        )
    if isinstance(leaf, _COMPOSITE_TENSORS):
        parts = tf.nest.flatten(leaf, expand_composites=True)
        return _Value(tf.type_spec_from_value(leaf), list(map(np.asarray, parts)))
    try:
        if isinstance(leaf, _COMPOSITE_VALUES):
            return _composite_value(leaf)
        array = _array_of(leaf, None if expected is None else expected.dtype)
        return _Value(tf.TensorSpec(array.shape, tf.as_dtype(array.dtype)), [array])
    except (TypeError, ValueError) as error:
        takes = '' if expected is None else f' of {_described(expected)}'
        raise TypeError(
            f'{batch.title(path)} is a {type(leaf).__name__} that makes no array{takes}: '
            f'{str(error).rstrip(".")}. '
            'Give arrays, eager tensors or lists, in dicts and tuples as the model_fn takes them.'
        ) from error


def _array_of(leaf: Any, dtype: tf.DType | None = None) -> np.ndarray:
    """Makes an array as TensorFlow would: of Python's floats, one of float32, unless told so."""
    if hasattr(leaf, '__array__'):
        return np.asarray(leaf)
    return tf.make_ndarray(tf.make_tensor_proto(leaf, dtype))


def _composite_value(value: Any) -> _Value:
    """Takes a `SparseTensorValue` or a `RaggedTensorValue` apart, in the order of `tf.nest`."""
    if isinstance(value, tf.SparseTensorValue):
        arrays = list(map(_array_of, value))
        dtype = tf.as_dtype(arrays[1].dtype)
        return _Value(tf.SparseTensorSpec(value.dense_shape, dtype), arrays)
    splits = value.nested_row_splits
    spec = tf.RaggedTensorSpec(value.shape, value.dtype, len(splits), splits[0].dtype)
    return _Value(spec, [value.flat_values, *splits])
