"""Short runs of a model_fn, always on the same batches."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow_estimator.python.estimator.estimator import EstimatorV2

from estimator_mgpu import compat, optimizer
from estimator_mgpu import devices as devices_lib
from estimator_mgpu.nests import flat_tensors, pack_tensors

MODES = compat.estimator.ModeKeys


class Run(NamedTuple):
    """What a run came to.

    Attributes:
      values: what was fetched, by what it is: one array a step, or one of the end.
      initial: the variables at the start, by name.
      final: the variables at the end.
    """

    values: dict[str, list[Any]]
    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]


class Trial:
    """Runs model_fns in one mode, always on the same batches."""

    def __init__(
        self,
        model_fn: Callable[..., Any],
        input_fn: Callable[..., Any],
        params: Any,
        mode: str,
        steps: int,
        towers: Sequence[str],
    ):
        self._mode = mode
        self._params = params
        self._config = compat.estimator.RunConfig(
            tf_random_seed=1, session_config=devices_lib.session_config(towers)
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(tf.Graph().as_default())
            stack.enter_context(_quiet())
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            tf.set_random_seed(1)
            estimator = self._estimator(model_fn, directory)
            *batch, hooks = compat.features_and_labels(estimator, input_fn, mode)
            self._batch = tf.nest.map_structure(_as_tensor, batch)
            flat = flat_tensors(self._batch)
            self._signature = tuple(tf.TensorSpec(t.shape, t.dtype) for t in flat)
            self._batches: list[tuple[Any, ...]] = []
            with tf.train.SingularMonitoredSession(hooks) as session:
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    for _ in range(steps):
                        self._batches.append(tuple(session.run(flat)))
        if not self._batches and mode == MODES.TRAIN:
            raise ValueError('The input_fn gives no batch to train on, so nothing can be compared.')

    def run(self, model_fn: Callable[..., Any], start: dict[str, np.ndarray]) -> Run:
        """Runs a model_fn on all batches, its variables starting from `start` where it has them."""
        with contextlib.ExitStack() as stack:
            graph = stack.enter_context(tf.Graph().as_default())
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(_quiet())
            tf.set_random_seed(1)
            tf.train.create_global_step()
            iterator, (features, labels) = self._input()
            estimator = self._estimator(model_fn, directory)
            with optimizer.tower_optimizers():
                spec = estimator.model_fn(features, labels, self._mode, estimator.config)
            fetches, update, results = self._fetches(spec, graph)
            begin = _Begin(iterator.initializer, start)
            kinds = {MODES.TRAIN: 'training', MODES.EVAL: 'evaluation', MODES.PREDICT: 'prediction'}
            hooks = [begin, *getattr(spec, f'{kinds[self._mode]}_hooks')]
            creator = tf.train.ChiefSessionCreator(
                spec.scaffold, config=self._config.session_config
            )
            values: dict[str, list[Any]] = {}
            with tf.train.MonitoredSession(creator, hooks) as session:
                for _ in self._batches:
                    if not session.should_stop():
                        for what, value in session.run([fetches, update])[0].items():
                            values.setdefault(what, []).append(value)
                final, last = begin.session.run([begin.variables, results])
            values.update((what, [value]) for what, value in last.items())
            return Run(values, begin.initial, final)

    def _estimator(self, model_fn: Any, directory: str) -> Any:
        return EstimatorV2(model_fn, directory, self._config, self._params)

    def _input(self) -> tuple[Any, Any]:
        dataset = tf.data.Dataset.from_generator(
            lambda: iter(self._batches), output_signature=self._signature
        )
        iterator = tf.data.make_initializable_iterator(dataset)
        return iterator, pack_tensors(self._batch, iterator.get_next())

    def _fetches(self, spec: Any, graph: tf.Graph) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Returns what each step gives, what it does, and what there is in the end, by name."""
        if self._mode == MODES.TRAIN:
            return {'loss': spec.loss, **_gradients(graph)}, spec.train_op, {}
        predictions = spec.predictions
        if not isinstance(predictions, dict):
            predictions = {'': predictions} if predictions is not None else {}
        named = {f'predictions[{k!r}]' if k else 'predictions': t for k, t in predictions.items()}
        if self._mode == MODES.PREDICT:
            return named, [], {}
        metrics = spec.eval_metric_ops
        updates = [update for _, update in metrics.values()]
        results = {f'metric {name}': value for name, (value, _) in metrics.items()}
        return {'loss': spec.loss, **named}, updates, results


def _as_tensor(leaf: Any) -> Any:
    return tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf


class _Begin(tf.train.SessionRunHook):
    """Lets a session begin with given values of variables."""

    def __init__(self, initializer: tf.Operation, start: dict[str, np.ndarray]):
        self._initializer = initializer
        self._start = start

    def begin(self) -> None:
        self.variables = {v.op.name: v for v in tf.global_variables()}

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        session.run(self._initializer)
        own = {name: v.initializer for name, v in self.variables.items() if name in self._start}
        session.run(own, {op.inputs[1]: self._start[name] for name, op in own.items()})
        self.session = session
        self.initial = session.run(self.variables)


def _gradients(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """The gradients that optimizers applied, by what they're called."""
    found: dict[str, tf.Tensor] = {}
    for _, gradient, variable in optimizer.applied(graph):
        gradient = tf.convert_to_tensor(gradient)  # Sums up the entries of IndexedSlices.
        if gradient.graph.is_fetchable(gradient):
            what = f'gradient of {variable.op.name}'
            calls = sum(name.partition(' (call')[0] == what for name in found)
            found[f'{what} (call {calls + 1})' if calls else what] = gradient
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lets the log show warnings, and nothing below."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel('WARNING')
    try:
        yield
    finally:
        logger.setLevel(level)
