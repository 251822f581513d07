"""What a model costs on several devices: what is sharded, what isn't, and what each step moves.

In: a graph that `replicate()` has built, with its plan. Out: the `Explanation` that
`Estimator.explain()` returns and prints, and the line in the log as training starts.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from estimator_mgpu import optimizer, steps
from estimator_mgpu.batches.batch import RANK_REMEDY
from estimator_mgpu.devices import Devices, device_spec, has_useless_passes
from estimator_mgpu.errors import user_lines
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.rewrites.recomputation.recompute import Recomputation
from estimator_mgpu.partition.towers.op_devices import device_of
from estimator_mgpu.partition.towers.schedule import Join, Schedule
from estimator_mgpu.reports import pictures
from estimator_mgpu.reports.notebooks import Table, html_of
from estimator_mgpu.reports.work import works_of
from estimator_mgpu.tf_internals import graphs, op_types, private, tf_estimator

_NOWHERE = '(no device)'  # TensorFlow will choose one.
_SHARE_TO_TELL = 0.05  # of all output, or of all activations: the log is silent on less
_SHOWN = 10  # entries of a section of the table
_MUCH_MORE = 1.5  # times as much as the mean of all devices
_MUCH = 1 << 20  # bytes: who sends and receives less has little to do in any case
_size = functools.partial(tqdm.format_sizeof, suffix='B')  # of 1536: '1.54kB'


class Once(NamedTuple):
    """An op that runs once, unsharded, although what it computes depends on the batch."""

    name: str
    why: str  # why it runs once; or why the op that computes its inputs does
    gathered: int  # bytes gathered for it in a step; ops that need the same tensor share them
    share: float  # its part of the output, in bytes, of all ops that depend on the batch: 0 to 1
    line: str  # of the model_fn, or of what it calls: 'model.py:12'; '' if that isn't known


class Gradient(NamedTuple):
    """A gradient that a `TowerOptimizer` applies."""

    variable: str
    bytes: int | None  # that each tower sends: 0 if it's made once; None: of the rows it gathers
    device: str  # the variable's, where the towers' gradients are summed


class Traffic(NamedTuple):
    """What a device sends to others in a step, and receives from them."""

    sent: int  # bytes
    received: int  # bytes
    messages: int  # that it sends: a tensor is one message for each device that needs it


class Explanation(NamedTuple):
    """How a model trains on several devices. As a str it's a table.

    If the batch size is known only when a step runs, bytes are those of 64 examples. Other unknown
    dimensions count as 1.
    """

    towers: list[str]  # one device string a tower
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

    def draw(self, path: str) -> None:
        """Draws what each scope puts out, and the devices beside it, with Matplotlib.

        Args:
          path: of the picture; its ending says in which format: 'plan.svg' or 'plan.png'.
        """
        pictures.draw(path, self.scopes, self._devices(), self.sent)

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
        notes = [[entry] for entry in self._counts_of_ops()]
        notes += [[entry] for entry in self._hot_spots()]
        notes += [[f'micro-batches: {entry}'] for entry in self._micro_batches()]
        notes += [[f'of unknown rank, so it runs once: {name}'] for name in self.unknown]

        columns = ['device', 'examples', 'variables', 'sends a step', 'receives', 'messages sent']
        tables = [
            Table('Devices', columns, devices),
            Table('Gradients', ['variable', 'of each tower', 'summed on'], _first(gradients)),
            Table('Ops', [''], notes),
            Table('Run once', ['of all output', 'op', 'gathered', 'line', 'why'], _first(once)),
        ]
        return html_of(tables)

    def _devices(self) -> list[pictures.Device]:
        """What each device has: first those with towers, then others that have variables."""
        counts: Sequence[Any] = self.examples_per_tower or ['its share of the'] * len(self.towers)
        names = dict.fromkeys([*self.towers, *self.variables, *self.traffic])
        names.pop(_NOWHERE, None)

        devices = []
        for name in names:
            examples = [str(n) for tower, n in zip(self.towers, counts) if tower == name]
            trained = [one.variable for one in self.gradients if one.device == name]
            size = self.variables.get(name, 0)
            devices.append(pictures.Device(name, ' + '.join(examples), size, trained))
        return devices

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
        counts: Sequence[Any] = self.examples_per_tower or ['its share of the'] * len(self.towers)
        gradients = []
        for gradient in self.gradients:
            size = _bytes_sent(gradient)
            gradients.append(f'{gradient.variable}: {size}, summed on {gradient.device}')
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
            'towers': [f'{device}: {n} examples' for device, n in zip(self.towers, counts)],
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
        results = [result for result in (spec.train_op, spec.loss) if result is not None]
        ops = [getattr(result, 'op', result) for result in results]
        moved = messages(ops, step.devices[0])
        return Explanation(
            towers=step.devices,
            examples_per_tower=step.examples_per_device,
            variables=dict(sorted(variables.items())),
            gradients=[_gradient(*pair, plan) for pair in optimizer.applied(graph)],
            traffic=_traffic(moved),
            sharded=len(plan.ops) if plan else 0,
            once=ops_run_once(plan, _line) if plan else [],
            scopes=_scopes(plan) if plan else {},
            unknown=list(step.unknown),
            sent=_bytes_between(moved),
            recomputation=step.recomputation,
            microbatches=step.microbatches,
            **_of_schedule(step.schedule),
        )


def _of_schedule(schedule: Schedule | None) -> dict[str, Any]:
    """What an `Explanation` says of micro-batches."""
    if schedule is None:
        return {}
    return dict(chained=schedule.chainable, before=list(schedule.joins))


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


def messages(ops: Sequence[tf.Operation], first: str) -> list[tuple[str, str, int]]:
    """What devices send each other when ops run: from, to and bytes of each message.

    TensorFlow sends a tensor once to each device. An op without a device counts as on the first.
    """
    devices = {op: device_of_op(op, first) for op in graphs.ancestors(ops)}
    sent = {
        (source, target, tensor.name): bytes_of(tensor)
        for source, target, tensor in _crossing(devices)
    }
    for op, device in devices.items():
        for before in op.control_inputs:
            if devices[before] != device:
                sent.setdefault((devices[before], device, before.name), 0)
    return [(source, target, size) for (source, target, _), size in sent.items()]


def tensors_sent(ops: Sequence[tf.Operation], first: str) -> list[tuple[str, str, tf.Tensor]]:
    """The tensors that devices send each other when ops run, each with from and to.

    Control edges aren't among them.
    """
    return _crossing({op: device_of_op(op, first) for op in graphs.ancestors(ops)})


def _crossing(devices: Mapping[tf.Operation, str]) -> list[tuple[str, str, tf.Tensor]]:
    """As `tensors_sent`, by the devices of all ops that run."""
    needed = {(t.name, device): t for op, device in devices.items() for t in op.inputs}
    return [
        (devices[tensor.op], device, tensor)
        for (_, device), tensor in needed.items()
        if devices[tensor.op] != device
    ]


def device_of_op(op: tf.Operation, first: str) -> str:
    """The device of an op, or of what it's colocated with; else the first device."""
    device = device_of(op)
    if not device:
        for name in graphs.colocated_with(op):
            device = device_of(op.graph.get_operation_by_name(name))
            if device:
                break
    return device_spec(device or first).to_string()


def _traffic(moved: Sequence[tuple[str, str, int]]) -> dict[str, Traffic]:
    """What each device sends and receives, of the messages between all of them."""
    sent, received, count = Counter[str](), Counter[str](), Counter[str]()
    for source, target, size in moved:
        sent[source] += size
        received[target] += size
        count[source] += 1
    return {to: Traffic(sent[to], received[to], count[to]) for to in sorted({*count, *received})}


def _bytes_between(moved: Sequence[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """How many bytes go from one device to another, of the messages between all of them."""
    sent: dict[str, Counter[str]] = {}
    for source, target, size in moved:
        sent.setdefault(source, Counter())[target] += size
    return {source: dict(sizes) for source, sizes in sorted(sent.items())}


def log_sharding(devices: Devices, microbatches: int, config: Any) -> None:
    """Logs how the default graph's batch is sharded, and what costs time without need.

    Args:
      devices: as for `replicate()`.
      microbatches: how many were asked for.
      config: the RunConfig of the training; None if it isn't known.
    """
    step = steps.of_graph(tf.get_default_graph())
    counts: Sequence[Any] = step.examples_per_device or ['its share'] * len(step.devices)
    towers = ', '.join(f'{device} ({n})' for device, n in zip(step.devices, counts))
    text = f'The input_fn gives the global batch; its examples go to {towers}.'
    level = tf.logging.INFO

    if step.plan is not None:
        text += f' {len(step.plan.ops)} ops are sharded.{_costliest_once(step.plan)}'
        text += _useless_passes(devices, config)
    elif len(step.devices) > 1:
        level = tf.logging.WARN  # More devices were asked for than have anything to do.
        text = (
            'Nothing is sharded: fewer examples than devices, or none in a dense or sparse tensor '
            'of known rank.'
        )
        if step.has_arrays:
            text += (
                ' NumPy arrays become constants of the graph. Let the input_fn give tensors: '
                'tf.data.Dataset.from_tensor_slices((features, labels)).batch(100).'
            )
    elif devices is None and device_spec(step.devices[0]).device_type == 'CPU':
        level = tf.logging.WARN  # The user may expect GPUs.
        text += (
            ' That is one CPU device, as TensorFlow finds no GPU; devices=2 makes two logical CPU '
            'devices.'
        )
    most = step.most_microbatches
    if step.plan is not None and most is not None and microbatches > most:
        level = tf.logging.WARN
        text += f' microbatches={microbatches} is more than a device has examples: {most}.'
    if step.schedule is not None:
        text += _micro_batches(step.schedule)
        if step.microbatches > 1 and most is None:
            least = step.microbatches * len(step.devices)
            text += f' With fewer than {least} examples, some of them are empty.'
    if step.recomputation is not None:
        text += _recomputed(step.recomputation)
    if step.unknown:
        names = ', '.join(step.unknown)
        text += f' The rank of {names} is unknown, so ops on it run once: {RANK_REMEDY}.'
    tf.logging.log(level, '%s', text)


def _micro_batches(schedule: Schedule) -> str:
    """Says what micro-batches save, and what they don't."""
    chained = f'{schedule.chainable:.0%} of the activations'
    if schedule.is_worth_it:
        text = (
            f' Each device runs {schedule.turns} micro-batches one after another, and keeps '
            f'{chained} for one of them at a time.'
        )
        if schedule.chainable < 1 - _SHARE_TO_TELL:
            text += f' The others are kept {schedule.why_others_are_kept}.'
        return text

    remedy = 'more devices would help'
    batch_norms = [*op_types.BATCH_NORMS, *op_types.BATCH_NORMS.values()]
    normalized = tuple(
        op.name for op in tf.get_default_graph().get_operations() if op.type in batch_norms
    )
    if any(join.op.startswith(normalized) for join in schedule.joins):
        remedy = "batch_norm='device' would help"
    return (
        f' microbatches={schedule.turns} is left out: it would save only {chained}, as the others '
        f'are kept {schedule.why_others_are_kept}; {remedy}.'
    )


def _recomputed(recomputation: Recomputation) -> str:
    """Says what is computed twice."""
    if not recomputation.ops:
        return ' recompute=True is left out: it would save too little of the activations.'
    return (
        f' {recomputation.ops} ops run a second time for the gradients, so that '
        f"{recomputation.share:.0%} of the activations needn't be kept."
    )


def _costliest_once(plan: Plan) -> str:
    """Says for which reason most of the output is of ops that run once; '' if that is little."""
    once = ops_run_once(plan) if plan.once else []
    shares: dict[str, float] = defaultdict(float)
    for op in once:
        shares[op.why] += op.share
    why = max(shares, key=lambda why: shares[why], default='')
    text = ''
    if shares[why] > _SHARE_TO_TELL:
        costliest = [op.name for op in once if op.why == why][0]
        share = f'{shares[why]:.0%}'
        text = f' {share} of all output is of {costliest} and more that run once: {why}.'
    return text + _products_once(plan)


def _products_once(plan: Plan) -> str:
    """Says how many matrix products and convolutions run once; '' if few do."""
    works = works_of(plan) if plan.once else {}
    once = {op.name: work.products for op, work in works.items() if op.name in plan.once}
    count = sum(once.values())
    total = sum(work.products for work in works.values())
    if count <= _SHARE_TO_TELL * total:
        return ''
    most = max(once, key=lambda name: once[name])
    why, _ = plan.once[most]
    return (
        f' {count} of {total} matrix products and convolutions run once, most of them in {most}: '
        f'{why}.'
    )


def _useless_passes(devices: Devices, config: Any) -> str:
    """Says that the session config makes start-up longer than it has to be; '' if it doesn't."""
    session = getattr(config, 'session_config', None)
    if session is None or not has_useless_passes(session, devices):
        return ''
    return (
        ' The session config has graph optimizers on that make no step shorter, but start-up up to '
        'twice as long. They are off in estimator_mgpu.session_config(devices): set your own '
        'options there.'
    )


def ops_run_once(plan: Plan, line: Callable[[tf.Operation], str] = lambda op: '') -> list[Once]:
    """The ops that run once, the costliest first; `line` tells an op's line in the program."""
    works = works_of(plan)
    total = sum(work.bytes for work in works.values()) or 1
    ops = []
    for op, work in works.items():
        if op.name in plan.once:
            why, gathered = plan.once[op.name]
            ops.append(Once(op.name, why, gathered, work.bytes / total, line(op)))
    return sorted(ops, key=lambda once: (-once.share, -once.gathered))


def _scopes(plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes of output by outermost scope and kind, in the model's order.

    Gradients count in the scope of the op whose gradients they are, and copies in that of the op.
    """
    scopes: dict[str, Counter[str]] = {}
    works = works_of(plan)
    for op in sorted(works, key=private.creation_index):
        name = re.sub(r'^((gradients|recompute)(_\d+)?/)+', '', op.name)
        scope = name.partition('/')[0].removesuffix('_grad')
        sizes = scopes.setdefault(scope, Counter())
        if op.name in plan.once:
            sizes['once'] += works[op].bytes
            continue
        partial = [t for t in op.outputs if isinstance(plan.placements.get(t.name), Partial)]
        size = sum(map(bytes_of, partial))
        sizes['partial'] += size
        sizes['shard'] += max(works[op].bytes - size, 0)
    return {scope: dict(+sizes) for scope, sizes in scopes.items() if +sizes}


def _line(op: tf.Operation) -> str:
    """The line of the program that made an op, 'model.py:12'; '' if that isn't known."""
    frame = user_lines.frame_of(op)
    return '' if frame is None else f'{os.path.basename(frame.filename)}:{frame.lineno}'
