"""`verify()`: a user's own model_fn on one device and on several, from the same values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import devices as devices_lib
from estimator_mgpu.replicate import replicate
from estimator_mgpu.trial import MODES, Run, Trial


class Difference(NamedTuple):
    """How far one thing is from one device's.

    Attributes:
      mode: 'train', 'eval' or 'infer', as in `tf.estimator.ModeKeys`.
      what: such as `gradient of dense/kernel`.
      relative: the largest difference of its entries, relative to one device's largest entry; inf
        where shapes differ or one has no value.
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
    """Runs a model_fn on one device and on several, from the same values, and compares.

    A few batches are trained on, evaluated and predicted. What is compared is the loss of each
    batch, each variable's gradient and how far training moved it, each metric and the predictions.

    Examples:
      >>> def model_fn(features, labels, mode):
      ...     w = tf.get_variable('w', [3, 1])
      ...     loss = tf.losses.mean_squared_error(labels, tf.matmul(features, w))
      ...     train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(
      ...         mode, loss=loss, train_op=train_op, predictions=tf.matmul(features, w))
      >>> def input_fn():
      ...     rows = np.eye(3, dtype='float32')
      ...     return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).repeat().batch(8)
      >>> result = verify(model_fn, input_fn, devices=4)  # doctest: +ELLIPSIS
      train loss ...
      train gradient of w ...
      train update of ...
      0 of 11 differ from one device.
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
    several = replicate(plain, **options)
    differences: list[Difference] = []
    causes: list[str] = []
    trained: dict[str, np.ndarray] = {}
    for mode in (MODES.TRAIN, MODES.EVAL, MODES.PREDICT):
        trial = Trial(plain, input_fn, params, mode, steps, towers)
        try:
            one = trial.run(plain, trained)
        except Exception as error:  # A model_fn needn't have all modes.
            if mode == MODES.TRAIN:
                raise
            tf.logging.info('verify(): %s does not run on one device: %s', mode, error)
            continue
        try:
            ours = trial.run(several, {**trained, **one.initial})
        except Exception as error:
            differences.append(Difference(mode, 'whether it runs', np.inf, False))
            causes.append(f'On {len(towers)} devices there is an error: {_message(error)}')
            continue
        found = list(_compare(mode, one, ours, tolerance))
        if not all(d.exact for d in found):
            causes += [cause for cause in _of_rounding(one, found) if cause not in causes]
        differences += found
        trained = trained or one.final
    wrong = not all(d.exact for d in differences)
    if wrong and options.get('batch_norm') == 'device':
        causes.append("With batch_norm='device', batch normalization takes other statistics.")
    if wrong and not causes:
        causes.append(
            'Numbers that differ may be rounding that is amplified: compare in float64, or with '
            'the rows in another order on one device. What is drawn without a seed differs in any '
            'two runs. Anything else is a bug of estimator_mgpu: please report the model.'
        )
    result = Verification(differences, causes)
    print(result)
    return result


def _message(error: Exception) -> str:
    """Returns what an error says, without the trace of TensorFlow's that leads there."""
    message = str(getattr(error, 'message', '') or error)
    asserted = re.search(r'assertion failed: \[(.*?)\]', message, re.DOTALL)
    return asserted[1] if asserted else message


def _of_rounding(one: Run, found: list[Difference]) -> list[str]:
    """Returns a sentence if updates differ of variables that have no gradient but rounding."""
    slopes = _slopes(one)
    least = 1e-5 * max(slopes.values(), default=0.0)
    flat = [name for name, slope in slopes.items() if 0 < slope < least]
    other = [d.what for d in found if not d.exact]
    moved = [name for name in flat if any(w.startswith(f'update of {name}') for w in other)]
    if not moved:
        return []
    return [
        f'The gradients of {", ".join(moved[:3])} are 0 but for rounding, as those of a bias '
        'before a softmax or a normalization are. Adam and its like divide them by their size, '
        'so that what these variables come to is chance, on one device, too.'
    ]


def _compare(mode: str, one: Run, ours: Run, tolerance: float) -> Iterator[Difference]:
    """Compares all that a run came to."""
    slopes = _slopes(one)
    steepest = max(slopes.values(), default=0.0)
    found = dict(_arrays(ours))
    for what, expected in _arrays(one):
        # What is 0 but for rounding is compared with what it's rounded at.
        rounded = steepest if what.startswith('gradient') else 0.0
        yield _difference(mode, what, found.get(what), expected, rounded, tolerance)
    if mode != MODES.TRAIN:
        return
    moves = {name: _moved(start, one.final[name]) for name, start in one.initial.items()}
    farthest = max((moves[name] for name in slopes if name in moves), default=0.0)
    for name, moved in moves.items():
        own, final = ours.final.get(name), one.final[name]
        largest = _largest(final)
        scale = min(moved, largest) if moved else largest
        # So is what moves by a gradient that is 0 but for rounding.
        rounded = max(largest, farthest) if name in slopes else largest
        yield _difference(mode, f'update of {name}', own, final, rounded, tolerance, scale)


def _slopes(run: Run) -> dict[str, float]:
    """The largest entry of each variable's gradients."""
    prefix = 'gradient of '
    found = _arrays(run)
    return {what[len(prefix) :]: _largest(v) for what, v in found if what.startswith(prefix)}


def _moved(start: np.ndarray, final: np.ndarray) -> float:
    with np.errstate(invalid='ignore'):
        return _largest(final - start) if final.dtype.kind in 'fcV' else 0.0


def _largest(values: np.ndarray) -> float:
    """The largest absolute value of all that are finite."""
    if values.dtype.kind not in 'biufcV' or not values.size:
        return 0.0
    values = np.abs(values.astype(np.complex128))
    return float(np.max(values, where=np.isfinite(values), initial=0.0))


def _arrays(run: Run) -> Iterator[tuple[str, np.ndarray]]:
    """All that was fetched, the steps' rows one after another."""
    for what, values in run.values.items():
        yield what, np.concatenate([np.reshape(value, -1) for value in values])


def _difference(
    mode: str,
    what: str,
    found: np.ndarray | None,
    expected: np.ndarray,
    rounded: float,
    tolerance: float,
    scale: float | None = None,
) -> Difference:
    if found is None or found.shape != expected.shape:
        return Difference(mode, what, np.inf, False)
    if expected.dtype.kind not in 'fc' and expected.dtype.name != 'bfloat16':
        same = bool((found == expected).all())
        return Difference(mode, what, 0.0 if same else np.inf, same)
    epsilon = float(2.0**-8 if expected.dtype.name == 'bfloat16' else np.finfo(expected.dtype).eps)
    found, expected = found.astype(np.complex128), expected.astype(np.complex128)
    other = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    if not other.any():
        return Difference(mode, what, 0.0, True)
    with np.errstate(invalid='ignore'):
        gap = np.abs(found - expected)[other].max()
    scale = _largest(expected) if scale is None else scale
    relative = float(gap / scale) if scale and np.isfinite(gap) else np.inf
    slack = max(tolerance, 16 * epsilon) * scale + 8 * epsilon * rounded
    return Difference(mode, what, relative, bool(gap <= slack))
