"""`verify()`: a user's own model_fn on one device and on several, from the same checkpoint.

In: a model_fn or an Estimator, and an input_fn. Both runs get the same batches. Out: a
`Verification`, which says how far each loss, gradient, variable, metric and prediction is from one
device's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import optimizer
from estimator_mgpu.argument_checks import is_positive_integer
from estimator_mgpu.derived_estimators import remade
from estimator_mgpu.devices import Devices, resolve
from estimator_mgpu.model_fns.spec_results import decide_order
from estimator_mgpu.partition.order.open_pairs import OpenPair
from estimator_mgpu.replicate import check_strategies, replicate
from estimator_mgpu.replicated_estimator import Estimator, with_devices
from estimator_mgpu.reports.notebooks import Table, html_of
from estimator_mgpu.steps import of_graph
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.tf_estimator import EstimatorV2

MODES = tf_estimator.estimator.ModeKeys
_HINT = (
    'Differences may be amplified rounding: for example, Adam divides a gradient that is 0 but for '
    'rounding by its own size. To find out, compare in float64, or on one device with the examples '
    'in another order. Random numbers that are drawn without a seed differ in any two runs. With '
    "batch_norm='device', each device has statistics of its own. Anything else is a bug of "
    'estimator_mgpu: please report the model.'
)


_LEFT_OPEN = (
    'The model leaves open whether %s or %s comes first, and both use %s. TensorFlow leaves it to '
    'chance. Here, and in training, the one that is named first comes first.'
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
    open_pairs: Sequence[OpenPair] = ()  # reads and writes whose order the model leaves open

    @property
    def exact(self) -> bool:
        """Whether several devices gave the numbers of one, and anything was compared."""
        return bool(self.differences) and all(d.exact for d in self.differences)

    def __str__(self) -> str:
        width = max((len(d.what) for d in self.differences), default=0)
        lines = []
        for mode, what, relative, verdict in self._rows():
            lines.append(f'{mode:5} {what:{width}} {relative:>8} {verdict}')
        lines.append(self._summary())
        for pair in self.open_pairs:
            lines.append(_LEFT_OPEN % (pair.first, pair.second, pair.state))
        if not all(d.exact for d in self.differences):
            lines.append(_HINT)
        return '\n'.join(lines)

    def __repr__(self) -> str:
        return f'<Verification: {self._summary()}>'

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        left_open = [[pair.state, pair.first, pair.second] for pair in self.open_pairs]
        return html_of(
            [
                Table(self._summary(), ['mode', 'value', 'difference', ''], self._rows()),
                Table('The model leaves the order open.', ['of', 'first', 'then'], left_open),
            ]
        )

    def _rows(self) -> list[list[str]]:
        """The cells of the table."""
        return [
            [mode, what, f'{relative:.1e}', 'ok' if exact else 'DIFFERS']
            for mode, what, relative, exact in self.differences
        ]

    def _summary(self) -> str:
        wrong = sum(not d.exact for d in self.differences)
        return f'{wrong} of {len(self.differences)} differ from one device.'


def verify(
    model_fn: Callable[..., Any] | Estimator,
    input_fn: Callable[..., Any],
    params: dict[str, Any] | None = None,
    devices: Devices = 2,
    *,
    steps: int = 3,
    tolerance: float = 1e-4,
) -> Verification:
    """Runs a model_fn on one device and on several, from the same checkpoint, and compares.

    The model trains on a few batches, is evaluated on them and predicts. The loss of each batch,
    each variable and its gradient, metrics and predictions are compared. The result is printed,
    too.

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
      model_fn: as for `tf.estimator.Estimator`. If it's replicated, its options are used. It may
        also be an Estimator, canned ones and `TPUEstimator` with `use_tpu=False` among them: then
        it starts from initial values, and nothing is written to its model_dir.
      input_fn: as for `tf.estimator.Estimator`; it's called once a mode.
      params: as for `tf.estimator.Estimator`; an Estimator has its own.
      devices: the several devices, as for `replicate()`.
      steps: how many batches to take.
      tolerance: the largest relative difference that counts as rounding. Some units in the last
        place always do: 2e-6 of float32, more of float16 and bfloat16.

    Returns:
      The differences, and what the model leaves open. One device has the same order there.

    Raises:
      TypeError: if `params` isn't what an Estimator takes, or is given with an Estimator.
      ValueError: if `devices` is one device, with neither micro-batches nor `recompute=True`; if
        another argument is out of range, or if the input_fn gives no batch.
    """
    towers = resolve(devices)
    estimator: Any = model_fn
    options = dict(getattr(getattr(estimator, '_model_fn', estimator), 'replicate_options', {}))
    microbatches = options.get('microbatches', 1)
    has_turns = isinstance(microbatches, int) and microbatches > 1  # for 'auto', it's an object
    is_changed = has_turns or options.get('recompute', False)
    if len(towers) == 1 and not is_changed:
        raise ValueError(
            f'devices={devices!r} is one device, so there is nothing to compare. Give several; '
            'without GPUs, devices=2 makes two logical CPU devices.'
        )
    _check_arguments(estimator, params, steps, tolerance)

    differences: list[Difference] = []
    open_pairs: dict[OpenPair, None] = {}  # used as a set that keeps its order
    with contextlib.ExitStack() as stack:
        stack.enter_context(_errors_only())
        model_dirs = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        if not isinstance(estimator, tf_estimator.estimator.Estimator):
            estimator = EstimatorV2(estimator, model_dirs[0], params=params)
        config = _config(estimator.config, towers)
        ordered = functools.partial(_ordered, open_pairs=open_pairs)
        one = remade(estimator, ordered, model_dirs[0], config)
        options = {**options, 'devices': towers}
        several = remade(estimator, replicate(**options), model_dirs[1], config)

        for mode in (MODES.TRAIN, MODES.EVAL, MODES.PREDICT):
            results = _run_both(one, several, input_fn, mode, steps)
            if results is None:
                continue
            expected, found = results
            if mode == MODES.TRAIN:
                # Metrics of a float16 loss are float32, but are computed of what was rounded.
                tolerance = max(tolerance, 16 * _epsilon(expected['loss']))
            differences += _differences(mode, expected, found, tolerance)

    result = Verification(differences, list(open_pairs))
    print(result)
    return result


def _config(config: Any, towers: list[str]) -> Any:
    """An Estimator's RunConfig, with devices, the seed of both runs, and the checkpoints needed."""
    check_strategies(config)
    seed = config.tf_random_seed
    config = with_devices(config, towers, microbatches=1)
    return config.replace(
        tf_random_seed=1 if seed is None else seed,
        save_checkpoints_secs=600,
        keep_checkpoint_max=5,  # Others start from the first one.
    )


def _ordered(model_fn: Callable[..., Any], open_pairs: dict[OpenPair, None]) -> Callable[..., Any]:
    """The model_fn itself, but what it leaves to chance is decided as for several devices.

    Args:
      model_fn: one that isn't replicated. It may return a TPUEstimatorSpec.
      open_pairs: gets what it leaves open.
    """

    @functools.wraps(model_fn, updated=())
    def ordered(*args: Any, **kwargs: Any) -> Any:
        spec = tf_estimator.as_estimator_spec(model_fn(*args, **kwargs))
        if isinstance(spec, tf_estimator.estimator.EstimatorSpec):
            open_pairs.update(dict.fromkeys(decide_order(spec)))
        return spec

    vars(ordered)['__signature__'] = inspect.signature(model_fn)  # Estimator looks at no other.
    return ordered


def _check_arguments(estimator: Any, params: Any, steps: Any, tolerance: Any) -> None:
    if isinstance(estimator, tf_estimator.estimator.Estimator) and params is not None:
        raise TypeError(
            f'params={params!r} was given with an Estimator, which has its own. Leave out params; '
            'devices are given by name: verify(estimator, input_fn, devices=4).'
        )
    if not (callable(estimator) or isinstance(estimator, tf_estimator.estimator.Estimator)):
        raise TypeError(
            f'{estimator!r} is of {type(estimator).__name__}. Give a model_fn or an Estimator: '
            'verify(model_fn, input_fn, devices=4).'
        )
    if isinstance(params, (int, str)):
        raise TypeError(
            f'params={params!r} is of {type(params).__name__}, which holds no hyperparameters. '
            'Devices are given by name: verify(model_fn, input_fn, devices=4).'
        )
    if not is_positive_integer(steps):
        raise ValueError(f'steps={steps!r} is no number of batches: it is 1 or more.')
    if not isinstance(tolerance, (int, float, np.floating)) or not 0 <= tolerance < 1:
        raise ValueError(f'tolerance={tolerance!r} is no relative difference, such as 1e-4.')


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Leaves out of TensorFlow's log what is no error, until all threads have left."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Unlike a level, a filter can be taken away in any order.
    tf.get_logger().addFilter(is_error)
    try:
        yield
    finally:
        tf.get_logger().removeFilter(is_error)


# Running both.


_Results = dict[str, np.ndarray]
"""What a run gave, by what it is, such as 'loss' or 'gradient of w'."""


def _run_both(
    one: EstimatorV2,
    several: EstimatorV2,
    input_fn: Callable[..., Any],
    mode: str,
    steps: int,
) -> tuple[_Results, _Results] | None:
    """Runs a mode on one device, and on several from the same checkpoint.

    Args:
      one: the estimator for one device.
      several: the one for several.
      steps: how many batches to take.

    Returns:
      What one device has computed, and what several have; None if the model_fn doesn't have the
      mode.
    """
    replay, count = _replay(one, input_fn, mode, steps)
    try:
        expected = _run(one, replay, mode, count)
    except Exception:
        if mode == MODES.TRAIN:
            raise
        return None  # A model_fn needn't have all modes.

    checkpoints = tf.train.get_checkpoint_state(one.model_dir).all_model_checkpoint_paths
    start = checkpoints[0 if mode == MODES.TRAIN else -1]
    tf.train.update_checkpoint_state(several.model_dir, start)
    return expected, _run(several, replay, mode, count)


def _replay(
    estimator: EstimatorV2, input_fn: Callable[..., Any], mode: str, steps: int
) -> tuple[Callable[[], Any], int]:
    """Takes the first batches of an input_fn.

    Args:
      estimator: one that calls the input_fn with its params.
      steps: how many batches to take, if there are as many.

    Returns:
      An input_fn that gives these batches, and how many they are.
    """
    batches: list[tuple[Any, ...]] = []
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        *batch, hooks = tf_estimator.features_and_labels(estimator, input_fn, mode)
        leaves = [
            tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf
            for leaf in tf.nest.flatten(batch, expand_composites=True)
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]

        # The session swallows the error where the data ends.
        with tf.train.SingularMonitoredSession(hooks) as session:
            for _ in range(steps):
                batches.append(tuple(session.run(tensors)))

    if not (batches and tensors) and mode == MODES.TRAIN:
        raise ValueError('The input_fn gives no batch to train on, so nothing can be compared.')

    def replay(params: Any = None) -> Any:  # which a TPUEstimator insists on
        signature = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
        dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
        replayed = iter(tf.data.make_one_shot_iterator(dataset).get_next())
        flat = [next(replayed) if isinstance(leaf, tf.Tensor) else leaf for leaf in leaves]
        return tuple(tf.nest.pack_sequence_as(batch, flat, expand_composites=True))

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


def _run(estimator: EstimatorV2, input_fn: Callable[..., Any], mode: str, count: int) -> _Results:
    """Runs a mode; returns, by what it is, what all its steps gave one after another, flat."""
    parts: dict[str, list[np.ndarray]] = {}
    for results in _steps_of(estimator, input_fn, mode, count):
        for what, nest in results.items():
            arrays = [np.ravel(value) for value in tf.nest.flatten(nest)]
            parts.setdefault(what, []).extend(arrays)
    return {what: np.concatenate(arrays) for what, arrays in parts.items()}


def _steps_of(
    estimator: EstimatorV2, input_fn: Callable[..., Any], mode: str, count: int
) -> list[dict[str, Any]]:
    """Runs a mode; returns what each of its steps gave."""
    if mode == MODES.EVAL:
        return [estimator.evaluate(input_fn)]
    if mode == MODES.PREDICT:
        predictions = estimator.predict(input_fn, yield_single_examples=False)
        return [one if isinstance(one, dict) else {'predictions': one} for one in predictions]

    recorder = _Recorder()
    with optimizer.tower_optimizers():
        # Without a count, TensorFlow may run a part of one more step where the data ends.
        estimator.train(input_fn, [recorder], count)
    return recorder.steps


# Comparing.


def _differences(
    mode: str, expected: _Results, found: _Results, tolerance: float
) -> list[Difference]:
    """Compares all that both runs computed."""
    differences = []
    for what, values in expected.items():
        kind = what.partition(' ')[0]  # 'gradient' for 'gradient of dense/kernel'
        largest = max(_largest(expected[other]) for other in expected if other.startswith(kind))
        relative, exact = _compare(found.get(what), values, largest, tolerance)
        differences.append(Difference(mode, what, relative, exact))
    return differences


def _compare(
    found: np.ndarray | None, expected: np.ndarray, largest: float, tolerance: float
) -> tuple[float, bool]:
    """Compares what several devices computed with what one did.

    Args:
      found: of several devices; None if they have nothing of that name.
      expected: of one device.
      largest: the largest absolute value of all that is of the same kind. Rounding of that may be
        large for values that are small.
      tolerance: the largest relative difference that counts as rounding.

    Returns:
      The difference, relative to one device's largest value, and whether it's rounding.
    """
    epsilon = _epsilon(expected)
    if not epsilon or found is None or found.shape != expected.shape:
        same = np.array_equal(found, expected)
        return (0.0 if same else np.inf), same

    found = found.astype(np.complex128)
    expected = expected.astype(np.complex128)
    both_nan = np.isnan(found) & np.isnan(expected)
    differs = (found != expected) & ~both_nan
    gap = float(np.max(np.abs(found[differs] - expected[differs]), initial=0.0))

    scale = _largest(expected)
    slack = max(tolerance, 16 * epsilon) * scale + 8 * epsilon * largest
    return gap / (scale or largest or 1.0), bool(gap <= slack)


def _epsilon(values: np.ndarray) -> float:
    """How far floats are rounded, relative to 1; 0 for what isn't a float."""
    if values.dtype.name == 'bfloat16':
        return 2.0**-8
    if values.dtype.kind in 'fc':
        return float(np.finfo(values.dtype).eps)
    return 0.0


def _largest(values: np.ndarray) -> float:
    """The largest absolute value of all floats that are finite; 0 if there is none."""
    if not _epsilon(values):
        return 0.0
    sizes = np.abs(values.astype(np.complex128))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))
