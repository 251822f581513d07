"""What a model costs on several devices: what is sharded, what isn't, and what each step moves.

In: a graph that `replicate()` has built, with its plan. Out: the `Explanation` that
`Estimator.explain()` returns and prints. What is counted for it: `work` and `traffic`.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from estimator_mgpu import optimizer, steps
from estimator_mgpu.batches.batch import RANK_REMEDY
from estimator_mgpu.errors import user_lines
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.micro_batches.schedule import Join
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.rewrites.recomputation.recompute import Recomputation
from estimator_mgpu.reports import pictures
from estimator_mgpu.reports.notebooks import Table, html_of
from estimator_mgpu.reports.traffic import Traffic, by_device, bytes_between, messages
from estimator_mgpu.reports.work import Once, by_scope, ops_run_once, works_of
from estimator_mgpu.tf_internals import op_types, private, tf_estimator

_NOWHERE = '(no device)'  # TensorFlow will choose one.
_SHOWN = 10  # entries of a section of the table
_MUCH_MORE = 1.5  # times as much as the mean of all devices
_MUCH = 1 << 20  # bytes: who sends and receives less has little to do in any case
_size = functools.partial(tqdm.format_sizeof, suffix='B')  # of 1536: '1.54kB'


class Gradient(NamedTuple):
    """A gradient that a `TowerOptimizer` applies."""

    variable: str
    bytes: int | None  # that each tower sends: 0 if it's made once; None: of the rows it gathers
    device: str  # the variable's, where the towers' gradients are summed


class Explanation(NamedTuple):
    """How a model trains on several devices. As a str it's a table.

    If the batch size is known only when a step runs, bytes are those of 64 examples. Other unknown
    dimensions count as 1.
    """

    towers: list[str]  # one device string a tower; micro-batches of a device count as one
    examples_per_tower: list[int] | None  # None if the batch size isn't static
    variables: dict[str, int]  # bytes of variables, slots and the like included, by device
    gradients: list[Gradient]
    traffic: dict[str, Traffic]  # by device, of a step: the batch, variables, gradients and all
    sharded: int  # how many ops are sharded over the devices
    once: list[Once]  # the costliest first; empty if nothing is sharded, as then all ops run once
    scopes: dict[str, dict[str, int]]  # bytes of the ops' output: 'shard', 'partial' and 'once'
    unknown: list[str]  # features and labels of unknown rank: ops on them run once
    microbatches: int = 1  # that each device runs one after another; 1 if more save too little
    chained: float = 0.0  # the part of the activations that can be kept for one of them at a time
    before: Sequence[Join] = ()  # ops that keep others from it, the costliest first
    sent: dict[str, dict[str, int]] = {}  # bytes a step: from one device, to each other one
    recomputation: Recomputation | None = None  # what is computed twice; None if not asked for

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        values = self._asdict()
        values['gradients'] = [gradient._asdict() for gradient in self.gradients]
        values['once'] = [op._asdict() for op in self.once]
        values['before'] = [join._asdict() for join in self.before]
        if self.recomputation:
            values['recomputation'] = self.recomputation._asdict()
        values['traffic'] = {device: moved._asdict() for device, moved in self.traffic.items()}
        return values

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws what each scope puts out, and the devices beside it, with Matplotlib.

        Args:
          path: of the picture; its ending says in which format: 'plan.svg' or 'plan.png'.
        """
        if not isinstance(path, (str, os.PathLike)) or not os.path.splitext(path)[1]:
            raise ValueError(
                f'path={path!r} names no file of a picture. Its ending says in which format: '
                "draw('plan.svg') or draw('plan.png')."
            )
        pictures.draw(os.fspath(path), self.scopes, self._devices(), self.sent)

    def __repr__(self) -> str:
        counts = f'{self.sharded} ops are sharded, {len(self.once)} run once'
        return f'<Explanation: {len(self.towers)} towers; {counts}>'

    def _repr_html_(self) -> str:
        """The same as tables, for notebooks."""
        devices = []
        for device in self._devices():
            moved = self.traffic.get(device.name, Traffic(0, 0, 0))
            sizes = [_size(size) for size in (device.bytes, moved.sent, moved.received)]
            devices.append([device.name, device.examples, *sizes, moved.messages])
        gradients = [[one.variable, _bytes_sent(one), one.device] for one in self.gradients]
        once = [
            [f'{op.share:.1%}', op.name, _size(op.gathered), op.line, op.why] for op in self.once
        ]
        notes = [*self._counts_of_ops(), *self._hot_spots()]
        notes += [f'micro-batches: {entry}' for entry in self._micro_batches()]
        notes += [f'computed twice: {entry}' for entry in self._computed_twice()]
        notes += [f'of unknown rank, so it runs once: {name}' for name in self.unknown]

        columns = ['device', 'examples', 'variables', 'sends a step', 'receives', 'messages sent']
        tables = [
            Table('Devices', columns, devices),
            Table('Gradients', ['variable', 'of each tower', 'summed on'], _first(gradients)),
            Table('Ops', [''], [[note] for note in notes]),
            Table('Run once', ['of all output', 'op', 'gathered', 'line', 'why'], _first(once)),
        ]
        return html_of(tables)

    def _devices(self) -> list[pictures.Device]:
        """What each device has: first those with towers, then others that have variables."""
        names = dict.fromkeys([*self.towers, *self.variables, *self.traffic])
        names.pop(_NOWHERE, None)

        devices = []
        for name in names:
            examples = [count for tower, count in self._examples() if tower == name]
            trained = [one.variable for one in self.gradients if one.device == name]
            size = self.variables.get(name, 0)
            devices.append(pictures.Device(name, ' + '.join(examples), size, trained))
        return devices

    def _examples(self) -> list[tuple[str, str]]:
        """The device of each tower, and how many examples the tower has, as text."""
        if self.examples_per_tower is None:
            return [(tower, 'its share of the') for tower in self.towers]
        return list(zip(self.towers, map(str, self.examples_per_tower)))

    def __str__(self) -> str:
        lines: list[str] = []
        for title, entries in self._sections().items():
            if entries:
                lines.append(title)
                lines += [f'  {entry}' for entry in entries[:_SHOWN]]
            if len(entries) > _SHOWN:
                lines.append(f'  and {len(entries) - _SHOWN} more')
        return '\n'.join(lines)

    def _sections(self) -> dict[str, list[str]]:
        """The entries of each section of the table, by its title."""
        gradients = [
            f'{one.variable}: {_bytes_sent(one)}, summed on {one.device}' for one in self.gradients
        ]
        traffic = [
            f'{device}: {_size(moved.sent)} out in {moved.messages} messages, '
            f'{_size(moved.received)} in'
            for device, moved in self.traffic.items()
        ]
        once = [
            f'{op.share:.1%} {op.name}, {_size(op.gathered)}, {op.line or "no line"}, {op.why}'
            for op in self.once
        ]
        return {
            'towers': [f'{device}: {count} examples' for device, count in self._examples()],
            'variables': [f'{device}: {_size(n)}' for device, n in self.variables.items()],
            'gradients': gradients,
            'between devices, each step': traffic,
            'much more than others': self._hot_spots(),
            f'of unknown rank, so it runs once: {RANK_REMEDY}': self.unknown,
            'micro-batches': self._micro_batches(),
            'computed twice': self._computed_twice(),
            'ops': self._counts_of_ops(),
            'run once: share of all output, name, bytes gathered, line, why': once,
        }

    def _hot_spots(self) -> list[str]:
        """The towers' devices that send and receive much more than the mean of them."""
        devices = list(dict.fromkeys(self.towers))
        moved = {
            device: self.traffic[device].sent + self.traffic[device].received
            for device in devices
            if device in self.traffic
        }
        mean = sum(moved.values()) / len(devices)
        return [
            f'{device} sends and receives {size / mean:.1f} times the mean of all devices: others '
            'wait for it. The cause is where variables are, the batch, or an op that runs once'
            for device, size in moved.items()
            if size > max(_MUCH_MORE * mean, _MUCH)
        ]

    def _micro_batches(self) -> list[str]:
        """How many micro-batches each device has, and what needs the examples of all."""
        if not self.chained and not self.before:
            return []
        if self.microbatches > 1:
            entries = [
                f'{self.microbatches} a device, one after another',
                f'{self.chained:.1%} of the activations are kept for one of them at a time',
            ]
        else:
            entries = [f'none, as they would save only {self.chained:.1%} of the activations']
        for join in self.before:
            entries.append(f'{join.share:.1%} are kept until all examples have reached {join.op}')
        return entries

    def _computed_twice(self) -> list[str]:
        """How many ops compute activations again, and how many bytes of these there are."""
        if self.recomputation is None:
            return []
        if not self.recomputation.ops:
            return ['no op, as that would save too little of all activations']
        share = f'{self.recomputation.share:.1%} of the bytes that gradients need of activations'
        return [f'{self.recomputation.ops} ops, with {share}']

    def _counts_of_ops(self) -> list[str]:
        """How many ops are sharded, and how many run once."""
        if not self.sharded and not self.once:
            return ['none is sharded: all run once, on the global batch']
        return [
            f'{self.sharded} are sharded over the devices',
            f'{len(self.once)} run once, unsharded, on the global batch',
        ]


def _bytes_sent(gradient: Gradient) -> str:
    """What each tower sends of a gradient, as text."""
    return 'gathered rows' if gradient.bytes is None else _size(gradient.bytes)


def _first(rows: list[list[str]]) -> list[list[str]]:
    """The first rows of a table, and how many more there are."""
    if len(rows) <= _SHOWN:
        return rows
    return [*rows[:_SHOWN], [f'and {len(rows) - _SHOWN} more']]


def explain(estimator: Any, input_fn: Callable[..., Any]) -> Explanation:
    """Builds an estimator's graph for training, in a graph of its own, and looks at it."""
    with tf.Graph().as_default() as graph:
        spec = _build_for_training(estimator, input_fn, graph)

        variables: Counter[str] = Counter()
        for variable in tf.global_variables():
            variables[variable.device or _NOWHERE] += bytes_of(variable)
        step = steps.of_graph(graph)
        plan = step.plan
        works = works_of(plan) if plan else {}
        results = [result for result in (spec.train_op, spec.loss) if result is not None]
        ops = [getattr(result, 'op', result) for result in results]
        moved = messages(ops, step.devices[0])
        return Explanation(
            towers=step.devices,
            examples_per_tower=step.examples_per_device,
            variables=dict(sorted(variables.items())),
            gradients=[_gradient(*pair, plan) for pair in optimizer.applied(graph)],
            traffic=by_device(moved),
            sharded=len(plan.ops) if plan else 0,
            once=ops_run_once(plan, works, _line) if plan else [],
            scopes=by_scope(plan, works) if plan else {},
            unknown=list(step.unknown),
            sent=bytes_between(moved),
            recomputation=step.recomputation,
            microbatches=step.microbatches,
            chained=step.schedule.chainable if step.schedule else 0.0,
            before=list(step.schedule.joins) if step.schedule else (),
        )


def _build_for_training(estimator: Any, input_fn: Callable[..., Any], graph: tf.Graph) -> Any:
    """Builds what an estimator trains, in the default graph, and returns its EstimatorSpec."""
    mode = tf_estimator.estimator.ModeKeys.TRAIN
    tf.set_random_seed(estimator.config.tf_random_seed)
    step = tf_estimator.global_step_of(estimator, graph)
    if step is not None:  # A SavedModel brings its own.
        graph.add_to_collection(private.GLOBAL_STEP_READ, tf.identity(step))
    features, labels, _ = tf_estimator.features_and_labels(estimator, input_fn, mode)
    return tf_estimator.spec_of(estimator, features, labels, mode)


def _gradient(gradient: Any, variable: tf.Variable, plan: Plan | None) -> Gradient:
    """Describes a gradient that is applied to a variable."""
    device = variable.device or _NOWHERE
    if plan is None:
        return Gradient(variable.op.name, 0, device)
    if isinstance(gradient, tf.IndexedSlices):
        return Gradient(variable.op.name, None, device)
    while gradient.op.type in op_types.REARRANGEMENTS:
        gradient = gradient.op.inputs[0]
    size = 0 if gradient.op.name in plan.once else bytes_of(variable)
    return Gradient(variable.op.name, size, device)


def _line(op: tf.Operation) -> str:
    """The line of the program that made an op, 'model.py:12'; '' if that isn't known."""
    frame = user_lines.frame_of(op)
    return '' if frame is None else f'{os.path.basename(frame.filename)}:{frame.lineno}'
