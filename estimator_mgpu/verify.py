"""`verify()`: a user's own model_fn on one device and on several, from the same checkpoint."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import optimizer
from estimator_mgpu.devices import Devices, resolve, session_config
from estimator_mgpu.replicate import replicate
from estimator_mgpu.steps import is_count, of_graph
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.tf_estimator import EstimatorV2

MODES = tf_estimator.estimator.ModeKeys
_HINT = (
    'Numbers that differ may be rounding that is amplified, as where Adam divides a gradient that '
    'is 0 but for rounding by its size: compare in float64, or with the rows in another order on '
    "one device. What is drawn without a seed differs in any two runs. With batch_norm='device' "
    'statistics are others. Anything else is a bug of estimator_mgpu: please report the model.'
)


class Difference(NamedTuple):
    """How far one thing is from one device's."""

    mode: str  # one of `tf.estimator.ModeKeys`: 'train', 'eval' or 'infer'
    what: str  # such as `gradient of dense/kernel`
    relative: float  # the largest difference, relative to one device's largest entry
    exact: bool  # whether that's no more than float rounding


class Verification(NamedTuple):
    """What `verify()` compared. As a str it's a table, and says where differences come from."""

    differences: list[Difference]

    @property
    def exact(self) -> bool:
        """Whether several devices gave the numbers of one, and anything was compared."""
        return bool(self.differences) and all(d.exact for d in self.differences)

    def __str__(self) -> str:
        width = max([len(d.what) for d in self.differences] + [0])
        lines = [
            f'{d.mode:5} {d.what:{width}} {d.relative:8.1e} {"ok" if d.exact else "DIFFERS"}'
            for d in self.differences
        ]
        wrong = sum(not d.exact for d in self.differences)
        lines.append(f'{wrong} of {len(self.differences)} differ from one device.')
        return '\n'.join([*lines, _HINT] if wrong else lines)


def verify(
    model_fn: Callable[..., Any],
    input_fn: Callable[..., Any],
    params: dict[str, Any] | None = None,
    devices: Devices = 2,
    *,
    steps: int = 3,
    tolerance: float = 1e-4,
) -> Verification:
    """Runs a model_fn on one device and on several, from the same checkpoint, and compares.

    A few batches are trained on, evaluated and predicted. Compared are the loss of each batch, each
    variable and its gradient, metrics and predictions. The result is printed, too.

    Examples:
      >>> def model_fn(features, labels, mode):
      ...     loss = tf.reduce_mean(tf.square(features @ tf.get_variable('w', [3, 1])))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
      >>> input_fn = lambda: tf.data.Dataset.from_tensors(np.eye(8, 3, dtype='float32'))
      >>> result = verify(model_fn, input_fn, devices=4)  # doctest: +ELLIPSIS
      train loss ...
      train gradient of w ...
      0 of 10 differ from one device.
      >>> result.exact
      True

    Args:
      model_fn: as for `tf.estimator.Estimator`. If it's replicated, its options are used.
      input_fn: as for `tf.estimator.Estimator`; it's called once a mode.
      params: as for `tf.estimator.Estimator`.
      devices: the several devices, as for `replicate()`.
      steps: how many batches to take.
      tolerance: the largest relative difference that may be rounding. Some units in the last place
        may always be: 2e-6 of float32, more of float16 and bfloat16.
    """
    towers = resolve(devices)
    if len(towers) < 2:
        raise ValueError(
            f'devices={devices!r} is one device, so there is nothing to compare. Give several; '
            'without GPUs, devices=2 makes two logical CPU devices.'
        )
    if isinstance(params, (int, str)):
        raise TypeError(
            f'params={params!r} is of {type(params).__name__}, which holds no hyperparameters. '
            'Devices are given by name: verify(model_fn, input_fn, devices=4).'
        )
    if not is_count(steps):
        raise ValueError(f'steps={steps!r} is no number of batches: it is 1 or more.')
    if not isinstance(tolerance, (int, float, np.floating)) or not 0 <= tolerance < 1:
        raise ValueError(f'tolerance={tolerance!r} is no relative difference, such as 1e-4.')
    options = dict(getattr(model_fn, 'replicate_options', {}), devices=towers)
    plain = model_fn.__wrapped__ if len(options) > 1 else model_fn  # type: ignore[attr-defined]
    config = tf_estimator.estimator.RunConfig(
        tf_random_seed=1, session_config=session_config(towers)
    )
    result = Verification([])
    with contextlib.ExitStack() as stack:
        stack.enter_context(_errors_only())
        one, several = (
            EstimatorV2(fn, stack.enter_context(tempfile.TemporaryDirectory()), config, params)
            for fn in (plain, replicate(plain, **options))
        )
        for mode in (MODES.TRAIN, MODES.EVAL, MODES.PREDICT):
            replay, count = _replay(one, input_fn, mode, steps)
            try:
                expected = _run(one, replay, mode, count)
            except Exception:  # A model_fn needn't have all modes.
                if mode == MODES.TRAIN:
                    raise
                continue
            checkpoints = tf.train.get_checkpoint_state(one.model_dir).all_model_checkpoint_paths
            start = checkpoints[0 if mode == MODES.TRAIN else -1]
            tf.train.update_checkpoint_state(several.model_dir, start)
            found = _run(several, replay, mode, count)
            if mode == MODES.TRAIN:  # Metrics of a float16 loss are float32 of what was rounded.
                tolerance = max(tolerance, 16 * _epsilon(expected['loss']))
            for what, value in expected.items():
                kind = what.partition(' ')[0]
                largest = max(_largest(v) for w, v in expected.items() if w.startswith(kind))
                compared = _compare(found.get(what), value, largest, tolerance)
                result.differences.append(Difference(mode, what, *compared))
    print(result)
    return result


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Leaves out of TensorFlow's log what is no error, until all threads have left."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    tf.get_logger().addFilter(is_error)  # Unlike a level, it's put back in any order.
    try:
        yield
    finally:
        tf.get_logger().removeFilter(is_error)


def _replay(estimator: Any, input_fn: Any, mode: str, steps: int) -> tuple[Any, int]:
    """Returns an input_fn that gives another one's first batches, and how many these are."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        *batch, hooks = tf_estimator.features_and_labels(estimator, input_fn, mode)
        leaves = tf.nest.flatten(batch, expand_composites=True)
        leaves = [tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        tensors = [t for t in leaves if isinstance(t, tf.Tensor)]
        batches = []
        with tf.train.SingularMonitoredSession(hooks) as session:  # It ends where the data does.
            for _ in range(steps):
                batches.append(tuple(session.run(tensors)))
    if not (batches and tensors) and mode == MODES.TRAIN:
        raise ValueError('The input_fn gives no batch to train on, so nothing can be compared.')

    def replay() -> Any:
        signature = tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors)
        dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
        parts = iter(tf.data.make_one_shot_iterator(dataset).get_next())
        own = [next(parts) if isinstance(t, tf.Tensor) else t for t in leaves]
        return tuple(tf.nest.pack_sequence_as(batch, own, expand_composites=True))

    return replay, len(batches)


class _Recorder(tf.train.SessionRunHook):
    """Keeps what each step of training gives, and last the variables."""

    def begin(self) -> None:
        graph = tf.get_default_graph()
        self.steps: list[dict[str, Any]] = []
        self._variables = {f'variable {v.op.name}': v for v in tf.global_variables()}
        self._fetches: dict[str, list[tf.Tensor]] = {'loss': [of_graph(graph).loss]}
        for gradient, variable in optimizer.applied(graph):
            gradient = tf.convert_to_tensor(gradient)  # Sums up the entries of IndexedSlices.
            if graph.is_fetchable(gradient):
                self._fetches.setdefault(f'gradient of {variable.op.name}', []).append(gradient)

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(run_values.results)

    def end(self, session: tf.Session) -> None:
        self.steps.append(session.run(self._variables))


def _run(estimator: Any, input_fn: Any, mode: str, count: int) -> dict[str, np.ndarray]:
    """Returns what a run gives, by what it is: that of all steps one after another, flat."""
    if mode == MODES.EVAL:
        steps = [estimator.evaluate(input_fn)]
    elif mode == MODES.PREDICT:
        found = estimator.predict(input_fn, yield_single_examples=False)
        steps = [s if isinstance(s, dict) else {'predictions': s} for s in found]
    else:
        recorder = _Recorder()
        with optimizer.tower_optimizers():
            # Where the data ends, TensorFlow may have run a part of another step.
            estimator.train(input_fn, [recorder], count)
        steps = recorder.steps
    parts: dict[str, list[np.ndarray]] = {}
    for what, value in (item for step in steps for item in step.items()):
        parts.setdefault(what, []).extend(map(np.ravel, tf.nest.flatten(value)))
    return {what: np.concatenate(own) for what, own in parts.items()}


def _epsilon(values: np.ndarray) -> float:
    """How far floats are rounded, relative to 1; 0 for what isn't a float."""
    if values.dtype.name == 'bfloat16':
        return 2.0**-8
    return float(np.finfo(values.dtype).eps) if values.dtype.kind in 'fc' else 0.0


def _largest(values: np.ndarray) -> float:
    """The largest absolute value of all floats that are finite."""
    sizes = np.abs(values.astype(np.complex128)) if _epsilon(values) else np.zeros([0])
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def _compare(found: Any, expected: np.ndarray, largest: float, rtol: float) -> tuple[float, bool]:
    """Returns the relative difference, and whether it's rounding, be it of the `largest` too."""
    epsilon, scale = _epsilon(expected), _largest(expected)
    if not epsilon or found is None or found.shape != expected.shape:
        same = np.array_equal(found, expected)
        return 0.0 if same else np.inf, same
    found, expected = found.astype(np.complex128), expected.astype(np.complex128)
    other = (found != expected) & ~(np.isnan(found) & np.isnan(expected))
    gap = float(np.max(np.abs(found[other] - expected[other]), initial=0.0))
    slack = max(rtol, 16 * epsilon) * scale + 8 * epsilon * largest
    return gap / (scale or largest or 1.0), bool(gap <= slack)
