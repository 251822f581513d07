"""`verify()`: a user's own model_fn on one device and on several, from the same checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow_estimator.python.estimator.estimator import EstimatorV2

from estimator_mgpu import compat, optimizer
from estimator_mgpu import devices as devices_lib
from estimator_mgpu.replicate import replicate
from estimator_mgpu.steps import of_graph

MODES = compat.estimator.ModeKeys


class Difference(NamedTuple):
    """How far one thing is from one device's.

    Attributes:
      mode: 'train', 'eval' or 'infer', as in `tf.estimator.ModeKeys`.
      what: such as `gradient of dense/kernel`.
      relative: the largest difference of its entries, relative to one device's largest entry; inf
        where shapes differ, or nan where one has no value.
      exact: whether that's no more than float rounding.
    """

    mode: str
    what: str
    relative: float
    exact: bool


class Verification(NamedTuple):
    """What `verify()` found. As a str it's a table.

    Attributes:
      differences: one for everything that was compared.
      causes: sentences that say why what differs does, most likely.
    """

    differences: list[Difference]
    causes: list[str]

    @property
    def exact(self) -> bool:
        """Whether several devices gave the numbers of one, and anything was compared."""
        return bool(self.differences) and all(d.exact for d in self.differences)

    @property
    def exit_status(self) -> int:
        """0 if `exact`, else 1: `sys.exit(verify(model_fn, input_fn).exit_status)`."""
        return int(not self.exact)

    def __str__(self) -> str:
        width = max([len(d.what) for d in self.differences] + [0])
        lines = [
            f'{d.mode:5} {d.what:{width}} {d.relative:8.1e} {"ok" if d.exact else "DIFFERS"}'
            for d in self.differences
        ]
        wrong = sum(not d.exact for d in self.differences)
        lines.append(f'{wrong} of {len(self.differences)} differ from one device.')
        return '\n'.join([*lines, *self.causes])


def verify(
    model_fn: Callable[..., Any],
    input_fn: Callable[..., Any],
    params: dict[str, Any] | None = None,
    devices: devices_lib.Devices = 2,
    *,
    steps: int = 3,
    tolerance: float = 1e-4,
) -> Verification:
    """Runs a model_fn on one device and on several, from the same checkpoint, and compares.

    A few batches are trained on, evaluated and predicted. What is compared is the loss of each
    batch, each variable's gradient and how far training moved it, each metric and the predictions.

    Examples:
      >>> def model_fn(features, labels, mode):
      ...     w = tf.get_variable('w', [3, 1])
      ...     loss = tf.losses.mean_squared_error(labels, tf.matmul(features, w))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
      >>> def input_fn():
      ...     rows = np.eye(3, dtype='float32')
      ...     return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).repeat().batch(8)
      >>> result = verify(model_fn, input_fn, devices=4)  # doctest: +ELLIPSIS
      train loss ...
      train gradient of w ...
      train update of ...
      eval  loss ...
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

    Returns:
      A `Verification`, which is printed, too.

    Raises:
      TypeError: if `input_fn` is no function.
      ValueError: if `devices` is one device only, `steps` or `tolerance` is none, or there's no
        batch to train on.
    """
    towers = devices_lib.resolve(devices)
    if len(towers) < 2:
        raise ValueError(
            f'devices={devices!r} is one device, so there is nothing to compare. Give several; '
            'without GPUs, devices=2 makes two logical CPU devices.'
        )
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f'steps={steps!r} is no number of batches: it is 1 or more.')
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise ValueError(f'tolerance={tolerance!r} is no relative difference, such as 1e-4.')
    options = dict(getattr(model_fn, 'replicate_options', {}), devices=towers)
    plain = getattr(model_fn, '__wrapped__', model_fn) if len(options) > 1 else model_fn
    session_config = devices_lib.session_config(towers)
    config = compat.estimator.RunConfig(tf_random_seed=1, session_config=session_config)
    differences: list[Difference] = []
    causes: list[str] = []
    with contextlib.ExitStack() as stack:
        logger = tf.get_logger()
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel('ERROR')
        one, several = (
            EstimatorV2(fn, stack.enter_context(tempfile.TemporaryDirectory()), config, params)
            for fn in (plain, replicate(plain, **options))
        )
        for mode in (MODES.TRAIN, MODES.EVAL, MODES.PREDICT):
            replay = _replay(one, input_fn, mode, steps)
            try:
                expected = _run(one, replay, mode)
            except Exception:  # A model_fn needn't have all modes.
                if mode == MODES.TRAIN:
                    raise
                continue
            checkpoints = tf.train.get_checkpoint_state(one.model_dir).all_model_checkpoint_paths
            start = checkpoints[0 if mode == MODES.TRAIN else -1]
            tf.train.update_checkpoint_state(several.model_dir, start)
            try:
                found = _run(several, replay, mode)
            except Exception as error:
                differences.append(Difference(mode, 'whether it runs', np.inf, False))
                causes.append(f'On {len(towers)} devices there is an error: {error}')
                continue
            if mode == MODES.TRAIN:  # Metrics of a float16 loss are float32 of what was rounded.
                tolerance = max(tolerance, 16 * _epsilon(expected['loss'].array))
            for what, value in expected.items():
                compared = _compare(found.get(what), value, tolerance)
                differences.append(Difference(mode, what, *compared))
    if not all(d.exact for d in differences):
        if options.get('batch_norm') == 'device':
            causes.append("With batch_norm='device', batch normalization takes other statistics.")
        causes.append(
            'Numbers that differ may be rounding that is amplified, as where Adam divides a '
            'gradient that is 0 but for rounding by its size: compare in float64, or with the rows '
            'in another order on one device. What is drawn without a seed differs in any two runs. '
            'Anything else is a bug of estimator_mgpu: please report the model.'
        )
    result = Verification(differences, causes)
    print(result)
    return result


def _replay(estimator: Any, input_fn: Any, mode: str, steps: int) -> Callable[[], Any]:
    """Returns an input_fn that gives another one's first batches, each time the same."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        *batch, hooks = compat.features_and_labels(estimator, input_fn, mode)
        batch = tf.nest.map_structure(
            lambda leaf: tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
        )
        leaves = tf.nest.flatten(batch, expand_composites=True)
        tensors = [t for t in leaves if isinstance(t, tf.Tensor)]
        batches = []
        with tf.train.SingularMonitoredSession(hooks) as session:
            with contextlib.suppress(tf.errors.OutOfRangeError):
                for _ in range(steps):
                    batches.append(tuple(session.run(tensors)))
    if not batches and mode == MODES.TRAIN:
        raise ValueError('The input_fn gives no batch to train on, so nothing can be compared.')

    def replay() -> Any:
        signature = tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors)
        dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
        parts = iter(tf.data.make_one_shot_iterator(dataset).get_next())
        own = [next(parts) if isinstance(t, tf.Tensor) else t for t in leaves]
        return tuple(tf.nest.pack_sequence_as(batch, own, expand_composites=True))

    return replay


class _Recorder(tf.train.SessionRunHook):
    """Keeps what each step of training gives, and the variables before and after."""

    def begin(self) -> None:
        graph = tf.get_default_graph()
        self._variables = {v.op.name: v for v in tf.global_variables()}
        self._fetches: dict[str, list[tf.Tensor]] = {'loss': [of_graph(graph).loss]}
        for _, gradient, variable in optimizer.applied(graph):
            gradient = tf.convert_to_tensor(gradient)  # Sums up the entries of IndexedSlices.
            if graph.is_fetchable(gradient):
                self._fetches.setdefault(f'gradient of {variable.op.name}', []).append(gradient)
        self.steps: list[dict[str, Any]] = []

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        self.initial = session.run(self._variables)

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(run_values.results)

    def end(self, session: tf.Session) -> None:
        self.final = session.run(self._variables)


class _Value(NamedTuple):
    """What is compared, and the size of the numbers that it's a sum of, if that's known."""

    array: np.ndarray
    rounded: float = 0.0


def _run(estimator: Any, input_fn: Any, mode: str) -> dict[str, _Value]:
    """Returns what a run gives, by what it is."""
    recorder = _Recorder()
    if mode == MODES.TRAIN:
        with optimizer.tower_optimizers():
            estimator.train(input_fn, [recorder])
        steps = recorder.steps
    elif mode == MODES.EVAL:
        steps = [estimator.evaluate(input_fn)]
    else:
        found = estimator.predict(input_fn, yield_single_examples=False)
        steps = [step if isinstance(step, dict) else {'predictions': step} for step in found]
    values = {what: _joined(step[what] for step in steps) for what in steps[0]}
    if mode != MODES.TRAIN:
        return {what: _Value(value) for what, value in values.items()}
    slopes = {what: _largest(value) for what, value in values.items() if what != 'loss'}
    steepest = max(slopes.values(), default=0.0)
    run = {what: _Value(v, steepest if what in slopes else 0.0) for what, v in values.items()}
    moves = {}
    for name, final in recorder.final.items():
        with np.errstate(invalid='ignore'):  # inf - inf
            moves[name] = final - recorder.initial[name] if _is_float(final) else final
    trained = [name for name in moves if f'gradient of {name}' in slopes]
    farthest = max((_largest(moves[name]) for name in trained), default=0.0)
    for name, move in moves.items():
        rounded = max(_largest(recorder.final[name]), farthest if name in trained else 0.0)
        run[f'update of {name}'] = _Value(np.ravel(move), rounded)
    return run


def _joined(values: Iterable[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(part) for value in values for part in tf.nest.flatten(value)])


def _is_float(values: np.ndarray) -> bool:
    return values.dtype.kind in 'fc' or values.dtype.name == 'bfloat16'


def _epsilon(values: np.ndarray) -> float:
    return 2.0**-8 if values.dtype.name == 'bfloat16' else float(np.finfo(values.dtype).eps)


def _largest(values: np.ndarray) -> float:
    """The largest absolute value of all that are finite."""
    sizes = np.abs(values.astype(np.complex128)) if _is_float(values) else np.zeros([0])
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def _compare(found: _Value | None, expected: _Value, tolerance: float) -> tuple[float, bool]:
    """Returns the relative difference, and whether it's rounding."""
    if found is None or found.array.shape != expected.array.shape:
        return np.inf, False
    if not _is_float(expected.array):
        same = bool((found.array == expected.array).all())
        return 0.0 if same else np.inf, same
    scale, epsilon = _largest(expected.array), _epsilon(expected.array)
    slack = max(tolerance, 16 * epsilon) * scale + 8 * epsilon * expected.rounded
    ours, theirs = (value.array.astype(np.complex128) for value in (found, expected))
    other = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid='ignore'):
        gap = float(np.max(np.abs(ours - theirs), where=other, initial=0.0))
    return gap / (scale or expected.rounded or 1.0), bool(gap <= slack)
