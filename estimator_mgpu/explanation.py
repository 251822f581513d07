"""What a model costs on several devices: where its variables live, and what each step moves."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from estimator_mgpu import compat, optimizer, placement, private, steps
from estimator_mgpu.devices import spec_of

_NOWHERE = '(no device)'  # TensorFlow will choose one.
_size = functools.partial(tqdm.format_sizeof, suffix='B')  # of 1536: '1.54kB'


class Explanation(NamedTuple):
    """How a model trains on several devices. As a str it's a table."""

    towers: list[str]  # one device string a tower
    rows_per_tower: list[int] | None  # None if the batch size isn't static
    variables: dict[str, int]  # bytes of variables, slots and the like included, by device
    gradients: dict[str, int]  # bytes of gradients in and out of each device in a step
    # Names of variables that rows are gathered from. Only these rows' gradients go between devices,
    # as many as a batch has; they aren't counted.
    gathered: list[str]

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients that go from one device to another in a step."""
        return sum(self.gradients.values()) // 2

    def __str__(self) -> str:
        rows: Sequence[Any] = self.rows_per_tower or ['its share of the'] * len(self.towers)
        lines = ['towers', *(f'  {where}: {n} rows' for where, n in zip(self.towers, rows))]
        lines += ['variables', *(f'  {where}: {_size(n)}' for where, n in self.variables.items())]
        lines += [f'gradients between devices, each step: {_size(self.reduced_bytes)}']
        lines += [f'  in and out of {where}: {_size(n)}' for where, n in self.gradients.items()]
        if self.gathered:
            lines.append(f'  and of rows that are gathered from {", ".join(self.gathered)}')
        return '\n'.join(lines)


def explain(estimator: Any, input_fn: Callable[..., Any]) -> Explanation:
    """Builds an estimator's graph for training, in a graph of its own, and looks at it."""
    mode = compat.estimator.ModeKeys.TRAIN
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(estimator.config.tf_random_seed)
        step = tf.train.get_or_create_global_step()
        # As Estimator does to train.
        graph.add_to_collection(private.GLOBAL_STEP_READ, tf.identity(step))
        features, labels, _ = compat.features_and_labels(estimator, input_fn, mode)
        estimator.model_fn(features, labels, mode, estimator.config)
        known = steps.of_graph(graph)
        variables: Counter[str] = Counter()
        for variable in tf.global_variables():
            variables[variable.device or _NOWHERE] += placement.bytes_of(variable)
        traffic = Counter(dict.fromkeys(known.devices, 0))
        gathered = {}  # In their order.
        for gradient, variable in optimizer.applied(graph):
            if isinstance(gradient, tf.IndexedSlices):
                gathered[variable.op.name] = True
                continue
            size = placement.bytes_of(variable)
            for device in known.devices:
                if spec_of(device) != spec_of(variable.device):
                    traffic.update({device: size, variable.device or _NOWHERE: size})
        return Explanation(
            known.devices,
            known.rows_per_tower,
            dict(sorted(variables.items())),
            {device: size for device, size in traffic.items() if size},
            list(gathered),
        )


def tell() -> None:
    """Tells in the log how the default graph's batch is divided, and what isn't."""
    step = steps.of_graph(tf.get_default_graph())
    rows: Sequence[Any] = step.rows_per_tower or ['its share'] * len(step.devices)
    whole = [f'{name} ({reason})' for name, reason in step.whole.items()]
    more = [f'{len(whole) - 5} more'] if len(whole) > 5 else []
    tf.logging.info(
        'The input_fn gives the global batch; its rows go to %s. Run once, with all rows: %s.',
        ', '.join(f'{device} ({n})' for device, n in zip(step.devices, rows)),
        ', '.join(whole[:5] + more) or 'nothing',
    )
