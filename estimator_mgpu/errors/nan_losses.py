"""Says which examples' loss isn't finite, if training ends with "NaN loss during training.".

TensorFlow's `NanTensorHook` raises that error once the step has been applied, and then the batch is
gone. So what the towers have of the loss is fetched with each step: a number for each example, if
the graph has them, or else one for each tower.

In: a divided graph. Out: a hook, which logs this before TensorFlow's error comes:

    The loss is NaN: losses isn't finite for 1 of 10 examples, first in tower 1, on /device:CPU:1,
    with example 7 of 0 to 9. It was made by File "model.py", line 5, in model_fn
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.errors import failures, user_lines
from estimator_mgpu.partition.placements import Partial, Shard
from estimator_mgpu.partition.sizes import Size, product
from estimator_mgpu.partition.towers.shards import static_extents
from estimator_mgpu.tf_internals import tf_estimator
from estimator_mgpu.tf_internals.liveness import Liveness


def explain_nan_losses(spec: Any, step: steps.Step, liveness: Liveness) -> Any:
    """An EstimatorSpec with a hook that says which examples' loss isn't finite, in training.

    Args:
      spec: the EstimatorSpec.
      step: that of its graph, which was divided.
      liveness: of the graph before that.
    """
    if spec.mode != tf_estimator.estimator.ModeKeys.TRAIN:
        return spec
    source = _source(step.loss, step, liveness)
    if source is None:
        return spec
    # The hooks of the chief are called before the one of TensorFlow's that ends training.
    hooks = [*(spec.training_chief_hooks or []), _NanLossHook(step, source)]
    return spec._replace(training_chief_hooks=hooks)


def _source(loss: tf.Tensor, step: steps.Step, liveness: Liveness) -> tf.Tensor | None:
    """What the loss is reduced from: a number for each example, or else one for each tower.

    From the loss, this goes from scalars to their operands. The first sum or mean of towers is the
    answer, unless what it's made of has one number for each example. What is in a branch of
    TensorFlow 1 can't be fetched in a step that doesn't take it.

    Returns:
      The tensor of the user's that towers have copies of; None if there is none.
    """
    partial = None
    seen = set()
    pending = [loss]
    while pending:
        tensor = pending.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)

        original = _original(tensor, step)
        if original is not None and not liveness.always_runs(original.op):
            continue
        placement = None if original is None else step.plan.placements.get(original.name)
        if partial is not None and isinstance(placement, Shard):
            return original if _has_one_entry_an_example(original, step) else partial
        if tensor.shape.rank != 0:
            continue
        if isinstance(placement, Partial):
            # A tower may have no rows of a selection, whose mean is NaN then, and isn't used.
            if placement.rows != step.plan.rows or placement.reduce not in ('sum', 'mean'):
                return partial
            partial = original
            pending = list(reversed(tensor.op.inputs))
        elif partial is None:
            pending += reversed(tensor.op.inputs)
    return partial


def _original(tensor: tf.Tensor, step: steps.Step) -> tf.Tensor | None:
    """The tensor of the user's that another one is a tower's copy of; None if it isn't a copy."""
    copy = step.names.copy_of(tensor.op.name)
    if copy is None:
        return None
    return tensor.graph.get_tensor_by_name(f'{copy.op_name}:{tensor.value_index}')


def _has_one_entry_an_example(tensor: tf.Tensor, step: steps.Step) -> bool:
    """Whether a tensor is of the shape [batch], or of one such as [batch, 1]."""
    dims = step.plan.sizes.dims(tensor)
    return dims is not None and product(dims) == Size(1, (step.plan.rows,))


class _NanLossHook(tf.train.SessionRunHook):
    """Logs which examples' loss isn't finite, in a step whose loss is NaN.

    Args:
      step: that of the graph.
      source: what the loss is reduced from, as `_source` finds it.
    """

    def __init__(self, step: steps.Step, source: tf.Tensor):
        self._step = step
        self._source = source
        towers = range(len(step.tower_devices))
        copies = [step.names.copy(source.op.name, tower) for tower in towers]
        of_towers = [f'{copy}:{source.value_index}' for copy in copies]
        self._fetches = {'loss': step.loss, 'of_towers': of_towers}
        if tf.is_tensor(step.examples):
            self._fetches['examples'] = step.examples

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        results = {'examples': self._step.examples, **run_values.results}
        if np.isnan(results['loss']).any():
            sentences = [
                self._explanation(results['of_towers'], int(results['examples'])),
                user_lines.made_by(self._source.op),
            ]
            tf.logging.error('The loss is NaN: %s', ' '.join(filter(None, sentences)))

    def _explanation(self, of_towers: Sequence[Any], examples: int) -> str:
        """Says for which examples the loss isn't finite.

        Args:
          of_towers: what each tower has of it.
          examples: how many examples the batch has.
        """
        step = self._step
        extents = static_extents(examples, len(step.devices), step.microbatches)
        is_of_examples = isinstance(step.plan.placements[self._source.name], Shard)
        total = 0
        wrong = []
        for tower, (values, (start, count)) in enumerate(zip(of_towers, extents)):
            if count == 0:  # The tower has computed on the first example instead.
                continue
            is_finite = np.isfinite(np.ravel(values))
            total += len(is_finite)
            for index in np.flatnonzero(~is_finite):
                extent = (start + index, 1) if is_of_examples else (start, count)
                wrong.append((tower, extent))

        name = self._source.op.name
        unit = 'examples' if is_of_examples else 'towers'
        if not wrong:
            return f'{name} is finite for all {total} {unit}, so look for other parts of the loss.'
        if len(wrong) == total:
            return f"{name} isn't finite for any of {total} {unit}, so perhaps a variable isn't."
        tower, (start, count) = wrong[0]
        return (
            f"{name} isn't finite for {len(wrong)} of {total} {unit}, first in tower {tower}, on "
            f'{step.tower_devices[tower]}, with {failures.which_examples(start, count, examples)}.'
        )
