"""What a model costs on several devices: what is divided, what isn't, and what each step moves."""

from __future__ import annotations

import functools
import itertools
import os
import re
import site
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from tqdm import tqdm

from estimator_mgpu import optimizer, steps
from estimator_mgpu.devices import device_spec
from estimator_mgpu.partition.costs import bytes_of
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.towers.placement import device_of
from estimator_mgpu.tf_internals import graphs, op_types, private, tf_estimator

_NOWHERE = '(no device)'  # TensorFlow will choose one.
_WORTH_IT = 0.05  # of all output: the log is silent on what has less
_PACKAGES = (*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(__file__))
_REPLICATE = os.path.join(_PACKAGES[-1], 'replicate.py')  # calls the model_fn
_REMEDY = 'give it a shape in the input_fn or the model_fn, say by tensor.set_shape([None, 3])'
_size = functools.partial(tqdm.format_sizeof, suffix='B')  # of 1536: '1.54kB'


class Once(NamedTuple):
    """An op that runs once, though it's given rows, or what another such op made of rows."""

    name: str
    why: str  # where it's given no rows itself, why that other op runs once
    gathered: int  # bytes gathered for it in a step; ops that need the same tensor share them
    share: float  # its part of the bytes that all ops put out that depend on the batch, up to 1
    line: str  # of the model_fn, or of what it calls: 'model.py:12'; '' if that isn't known


class Gradient(NamedTuple):
    """A gradient that a `TowerOptimizer` applies."""

    variable: str
    bytes: int | None  # that each tower sends: 0 if it's made once; None: of the rows it gathers
    device: str  # the variable's, where towers' gradients are summed


class Traffic(NamedTuple):
    """What a device sends to others in a step, and gets from them."""

    sent: int  # bytes
    received: int  # bytes
    messages: int  # that it sends: a tensor is one for each device that needs it


class Explanation(NamedTuple):
    """How a model trains on several devices. As a str it's a table.

    Where only a step knows their number, bytes are of 64 rows; of 1 along unknown dimensions.
    """

    towers: list[str]  # one device string a tower
    rows_per_tower: list[int] | None  # None if the batch size isn't static
    variables: dict[str, int]  # bytes of variables, slots and the like included, by device
    gradients: list[Gradient]
    traffic: dict[str, Traffic]  # by device, of a step: the batch, variables, gradients and all
    divided: int  # how many ops run in towers
    once: list[Once]  # the costliest first
    scopes: dict[str, dict[str, int]]  # bytes that ops put out: 'shard', 'partial' and 'once'
    unknown: list[str]  # features and labels of unknown rank: what is made of them runs once

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        lists = {name: [e._asdict() for e in getattr(self, name)] for name in ('gradients', 'once')}
        traffic = {device: moved._asdict() for device, moved in self.traffic.items()}
        return {**self._asdict(), **lists, 'traffic': traffic}

    def draw(self, path: str) -> None:
        """Draws what each scope puts out, by placement, with Matplotlib: to 'plan.svg', say."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1.5 + len(self.scopes) / 4), layout='constrained')
        axes, left = figure.subplots(), [0.0] * len(self.scopes)
        for kind, color in ('shard', 'tab:blue'), ('partial', 'tab:green'), ('once', 'tab:red'):
            widths = [sizes.get(kind, 0) / 1e6 for sizes in self.scopes.values()]
            axes.barh(list(self.scopes), widths, left=left, label=kind, color=color)
            left = [end + width for end, width in zip(left, widths)]
        axes.invert_yaxis()
        axes.set_xlabel('output of its ops, MB a step')
        axes.legend()
        figure.savefig(path)

    def __str__(self) -> str:
        rows: Sequence[Any] = self.rows_per_tower or ['its share of the'] * len(self.towers)
        sent = [(g, 'gathered rows' if g.bytes is None else _size(g.bytes)) for g in self.gradients]
        moved = [
            f'{where}: {_size(t.sent)} out in {t.messages} messages, {_size(t.received)} in'
            for where, t in self.traffic.items()
        ]
        parts = {
            'towers': [f'{where}: {n} rows' for where, n in zip(self.towers, rows)],
            'variables': [f'{where}: {_size(n)}' for where, n in self.variables.items()],
            'gradients': [f'{g.variable}: {n}, summed on {g.device}' for g, n in sent],
            'between devices, each step': moved,
            f'of unknown rank, so it runs once: {_REMEDY}': self.unknown,
            'ops': [f'{self.divided} run in towers', f'{len(self.once)} run once, on all rows'],
            'run once: share of all output, name, bytes gathered, line, why': [
                f'{op.share:.1%} {op.name}, {_size(op.gathered)}, {op.line or "no line"}, {op.why}'
                for op in self.once
            ],
        }
        lines = []
        for title, entries in parts.items():
            more = [f'and {len(entries) - 10} more'] if len(entries) > 10 else []
            lines += [title, *(f'  {entry}' for entry in [*entries[:10], *more])] if entries else []
        return '\n'.join(lines)


def explain(estimator: Any, input_fn: Callable[..., Any]) -> Explanation:
    """Builds an estimator's graph for training, in a graph of its own, and looks at it."""
    mode = tf_estimator.estimator.ModeKeys.TRAIN
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(estimator.config.tf_random_seed)
        step = tf_estimator.global_step_of(estimator, graph)
        if step is not None:  # A SavedModel brings its own.
            graph.add_to_collection(private.GLOBAL_STEP_READ, tf.identity(step))
        features, labels, _ = tf_estimator.features_and_labels(estimator, input_fn, mode)
        spec = tf_estimator.spec_of(estimator, features, labels, mode)
        variables: Counter[str] = Counter()
        for variable in tf.global_variables():
            variables[variable.device or _NOWHERE] += bytes_of(variable)
        known, gradients = steps.of_graph(graph), []
        plan = known.plan
        for gradient, variable in optimizer.applied(graph):
            sparse = isinstance(gradient, tf.IndexedSlices)
            while not sparse and gradient.op.type in op_types.REARRANGEMENTS:
                gradient = gradient.op.inputs[0]
            once = plan is None or (not sparse and gradient.op.name in plan.once)
            size = 0 if once else None if sparse else bytes_of(variable)
            gradients.append(Gradient(variable.op.name, size, variable.device or _NOWHERE))
        divided = (len(plan.ops), _once(plan, _line), _scopes(plan)) if plan else (0, [], {})
        step_ops = [op for op in (spec.train_op, spec.loss) if op is not None]
        moved = _traffic([getattr(op, 'op', op) for op in step_ops], known.devices[0])
        parts = dict(sorted(variables.items())), gradients, moved, *divided
        return Explanation(known.devices, known.rows_per_tower, *parts, list(known.unknown))


def messages(ops: Sequence[tf.Operation], first: str) -> list[tuple[str, str, int]]:
    """What devices send each other where ops run: from, to and bytes of each message.

    TensorFlow sends a tensor once to each device. What is on none is taken to be on the first.
    """

    def place(op: tf.Operation) -> str:
        found = device_of(op)
        if not found:
            groups = map(op.graph.get_operation_by_name, graphs.colocated_with(op))
            found = next(filter(None, map(device_of, groups)), first)
        return device_spec(found).to_string()

    needed = {op: place(op) for op in graphs.ancestors(ops)}
    sent = {(t.name, to): (t.op, t) for op, to in needed.items() for t in op.inputs}
    waits = {(o.name, to): (o, None) for op, to in needed.items() for o in op.control_inputs}
    return [
        (needed[op], to, bytes_of(tensor) if tensor is not None else 0)
        for (_, to), (op, tensor) in {**sent, **waits}.items()
        if needed[op] != to
    ]


def _traffic(ops: Sequence[tf.Operation], first: str) -> dict[str, Traffic]:
    sent, received, count = Counter[str](), Counter[str](), Counter[str]()
    for source, target, size in messages(ops, first):
        sent[source] += size
        received[target] += size
        count[source] += 1
    return {to: Traffic(sent[to], received[to], count[to]) for to in sorted({*count, *received})}


def tell() -> None:
    """Tells in the log how the default graph's batch is divided, and what costs most that isn't."""
    step = steps.of_graph(tf.get_default_graph())
    rows: Sequence[Any] = step.rows_per_tower or ['its share'] * len(step.devices)
    to = ', '.join(f'{device} ({n})' for device, n in zip(step.devices, rows))
    text, level = f'The input_fn gives the global batch; its rows go to {to}.', tf.logging.INFO
    if step.plan is None and len(step.devices) > 1:
        level = tf.logging.WARN  # More devices were asked for than have anything to do.
        text = (
            'Nothing is divided: fewer rows than devices, or none in a dense or sparse tensor of '
            'known rank.'
        )
    if step.plan is not None:
        text += f' {len(step.plan.ops)} ops run in towers.'
        once = _once(step.plan, lambda op: '') if step.plan.once else []
        shares: dict[str, float] = defaultdict(float)
        for op in once:
            shares[op.why] += op.share
        why = max(shares, key=lambda why: shares[why], default='')
        if shares[why] > _WORTH_IT:
            name = next(op.name for op in once if op.why == why)
            text += f' {shares[why]:.0%} of all output is of {name} and more that run once: {why}.'
    if step.unknown:
        names = ', '.join(step.unknown)
        text += f' The rank of {names} is unknown, so what is made of it runs once: {_REMEDY}.'
    tf.logging.log(level, '%s', text)


def _once(plan: Plan, line: Callable[[tf.Operation], str]) -> list[Once]:
    """The ops that run once, the costliest first."""
    total = sum(bytes_of(t) for op in _counted(plan) for t in op.outputs) or 1
    ops = [op for op in plan.order if op.name in plan.once]
    shares = [sum(map(bytes_of, op.outputs)) / total for op in ops]
    found = [Once(op.name, *plan.once[op.name], n, line(op)) for op, n in zip(ops, shares)]
    return sorted(found, key=lambda once: (-once.share, -once.gathered))


def _counted(plan: Plan) -> list[tf.Operation]:
    """The ops that run in towers, or once though they follow from rows."""
    return [op for op in plan.order if op.name in plan.ops or op.name in plan.once]


def _scopes(plan: Plan) -> dict[str, dict[str, int]]:
    """By the outermost scope, in the model's order; gradients are in that of what they're of."""
    found: dict[str, Counter[str]] = {}
    for op in sorted(_counted(plan), key=private.creation_index):
        scope = re.sub(r'^gradients(_\d+)?/', '', op.name).partition('/')[0].removesuffix('_grad')
        for tensor in op.outputs:
            partial = isinstance(plan.placements.get(tensor.name), Partial)
            kind = 'once' if op.name in plan.once else 'partial' if partial else 'shard'
            found.setdefault(scope, Counter())[kind] += bytes_of(tensor)
    return {scope: dict(sizes) for scope, sizes in found.items()}


def _line(op: tf.Operation) -> str:
    """Where the program made an op: what a model_fn calls, but for installed packages."""
    frames = reversed(list(op.traceback or ()))  # What tf.function made may have none.
    inside = itertools.takewhile(lambda frame: frame.filename != _REPLICATE, frames)
    own = (frame for frame in inside if not frame.filename.startswith(_PACKAGES))
    return next((f'{os.path.basename(frame.filename)}:{frame.lineno}' for frame in own), '')
