"""Hooks that show how training gets on.

In: what `steps` knows of the graph's steps. Out: a progress bar, and lines in the log and in
TensorBoard.

A user's own hooks need nothing from here: the ops that they fetch stay in the graph, and have the
values of the global batch (`partition.towers.build_towers`).
"""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import is_positive_integer
from estimator_mgpu.steps import of_graph

Count = Optional[int]


class _StepHook(tf.train.SessionRunHook):
    """What both hooks have: the facts of each step, such as its loss.

    Some are known when the graph is built, such as a static batch size. The others are tensors,
    which are fetched with each step.

    Args:
      **counts: the counts that the user has given, by the names of arguments; with `batch_size`.
    """

    def __init__(self, **counts: Count):
        for name, value in counts.items():
            if value is not None and not is_positive_integer(value):
                raise ValueError(
                    f'{name}={value!r} is no number of steps, or of examples. Give a positive int.'
                )
        self._batch_size = counts['batch_size']

    def begin(self) -> None:
        self._global_step = tf.train.get_global_step()
        if self._global_step is None:
            raise ValueError(
                f'{type(self).__name__} needs a global step, and the graph has none. Call '
                'tf.train.get_or_create_global_step() before the session is made.'
            )
        self._facts = {
            'global_step': self._global_step,
            **of_graph(tf.get_default_graph())._asdict(),
        }
        if self._batch_size is not None:
            self._facts['examples'] = self._batch_size

    def before_run(self, run_context: Any) -> Any:
        tensors = {name: fact for name, fact in self._facts.items() if tf.is_tensor(fact)}
        return tf.train.SessionRunArgs(tensors)

    def _facts_of_step(self, run_values: Any) -> dict[str, Any]:
        """The facts of a step that has run, with values in the place of tensors."""
        return {**self._facts, **run_values.results}


class ProgressHook(_StepHook):
    """Shows a progress bar: the global step, the loss, examples/s and the time that is left.

    It goes to stderr. If that isn't a terminal (but a log file, say), nothing is shown or fetched.
    In a notebook it's a widget, if ipywidgets is installed. The loss is that of the global batch.
    Without `steps` and `max_steps`, the time that is left isn't shown.

    Examples:
      >>> bar = ProgressHook(max_steps=900)  # then: estimator.train(input_fn, [bar], max_steps=900)

    Args:
      steps: the same as for each call of `train`, instead of `max_steps`.
      max_steps: the same as for each call of `train`.
      batch_size: how many examples a step has. By default it's what a replicated model_fn gets,
        also by `replicate(devices=1)`; for others only steps/s are shown.
    """

    def __init__(self, *, steps: Count = None, max_steps: Count = None, batch_size: Count = None):
        if steps is not None and max_steps is not None:
            raise ValueError(f'steps={steps} and max_steps={max_steps} are two ends. Give one.')
        super().__init__(steps=steps, max_steps=max_steps, batch_size=batch_size)
        self._steps = steps
        self._max_steps = max_steps
        self._bar = _new_bar(disable=True)

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        self._bar.close()  # That of a training that failed, or of a session that was lost.
        self._last_facts: dict[str, Any] = {}
        start = int(session.run(self._global_step))
        total = self._max_steps if self._steps is None else start + self._steps
        # With disable=None, it's shown on terminals and in notebooks only.
        self._bar = _new_bar(total=total, initial=start, unit='step', disable=None)

    def before_run(self, run_context: Any) -> Any:
        return None if self._bar.disable else super().before_run(run_context)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results is None:
            return
        self._last_facts = self._facts_of_step(run_values)
        # The session may have read the global step before or after it was increased.
        step = int(self._last_facts['global_step'])
        self._show(step, self._bar.format_dict['rate'])

    def end(self, session: tf.Session) -> None:
        if self._last_facts:
            # tqdm closes a bar with the mean rate of all steps.
            step = int(session.run(self._global_step))
            bar = self._bar.format_dict
            self._show(step, (step - bar['initial']) / bar['elapsed'])
        self._bar.close()

    def _show(self, step: int, steps_per_second: float | None) -> None:
        """Moves the bar to a step. The rate is None if it isn't known yet."""
        texts = []
        loss = self._last_facts['loss']
        if loss is not None:
            texts.append(f'loss={float(loss):.4g}')
        examples = self._last_facts['examples']
        if steps_per_second and examples is not None:
            texts.append(f'{steps_per_second * int(examples):.1f} examples/s')
        self._bar.set_postfix_str(', '.join(texts), refresh=False)
        self._bar.update(step - self._bar.n)


def _new_bar(**options: Any) -> Any:
    """A progress bar of tqdm: of text, or in a notebook a widget."""
    from tqdm.auto import tqdm  # Not at the top: in a notebook, it warns if ipywidgets is missing.

    return tqdm(**options)


class ThroughputHook(_StepHook):
    """Tells in the log, and in TensorBoard, how many examples are trained on in a second.

    In the log, it's `step 200: 5120.3 examples/s, 2560.1 on each of 2 devices`; in summaries,
    `examples/sec` and `examples/sec/device`. Rates are those since the last time. The first step
    isn't counted, as TensorFlow prepares the graph in it. Each call of the session counts as a
    batch.

    Examples:
      >>> hook = ThroughputHook(every_n_steps=50)  # then: estimator.train(input_fn, [hook])

    Args:
      every_n_steps: after how many steps to tell.
      output_dir: where summaries go, `estimator.model_dir` say; by default there's only the log.
      batch_size: as for `ProgressHook`; for a model_fn that isn't replicated, it has to be given.
    """

    def __init__(
        self, every_n_steps: int = 100, output_dir: str | None = None, *, batch_size: Count = None
    ):
        super().__init__(every_n_steps=every_n_steps, batch_size=batch_size)
        self._timer = tf.train.SecondOrStepTimer(every_steps=every_n_steps)
        self._output_dir = output_dir

    def begin(self) -> None:
        super().begin()
        del self._facts['loss']  # It needn't be fetched.
        if self._facts['examples'] is None:
            raise ValueError(
                'ThroughputHook() does not know how many examples a step has, as no replicated '
                'model_fn that gets examples was called. Decorate the model_fn by '
                'estimator_mgpu.replicate(devices=1), or give ThroughputHook(batch_size=32), say.'
            )

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        self._timer.reset()
        self._examples = 0  # those since the timer was last triggered

    def after_run(self, run_context: Any, run_values: Any) -> None:
        facts = self._facts_of_step(run_values)
        self._examples += int(facts['examples'])

        # The global step may have been read before it was increased. Only if this may be a step to
        # tell of, it's read again.
        if not self._timer.should_trigger_for_step(facts['global_step'] + 1):
            return
        step = int(run_context.session.run(self._global_step))
        if not self._timer.should_trigger_for_step(step):
            return

        seconds, _ = self._timer.update_last_triggered_step(step)
        if seconds is not None:  # It's None for the first step, which starts the clock.
            self._tell(step, self._examples / seconds)
        self._examples = 0

    def _tell(self, step: int, rate: float) -> None:
        """Tells the examples a second, on all devices together, in the log and in summaries."""
        devices = len(set(self._facts['devices'])) or 1
        on = f'on each of {devices} devices' if devices > 1 else 'on one device'
        tf.logging.info('step %d: %.1f examples/s, %.1f %s', step, rate, rate / devices, on)
        if self._output_dir:
            summary = tf.Summary()
            summary.value.add(tag='examples/sec', simple_value=rate)
            summary.value.add(tag='examples/sec/device', simple_value=rate / devices)
            tf.summary.FileWriterCache.get(self._output_dir).add_summary(summary, step)
