"""What is only shown, in summaries and by hooks, is the whole batch's where that can be.

It comes from tower 0's shard. Where hooks hold tensors, scalars are summarized, or `tf.identity`
gives them a name to be logged by, the whole batch's values take their place. Only who looks at them
needs these, so that a step that shows nothing doesn't compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private, sharing
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.nests import flat_tensors
from estimator_mgpu.rows import Rows
from estimator_mgpu.subjects import is_variable
from estimator_mgpu.towers import Towers, is_own
from estimator_mgpu.walks import walk

_ONE_ONLY = (
    "%s shows %r of one device's shard: that it follows from sums and means over rows can't "
    "be told from the graph. If it has to be the whole batch's, run this model with "
    'replicate(devices=1).'
)
_BY_NAME = (
    "%s shows %r by its name, which is that of one device's shard. Give it the tensor, or the name "
    'of a tf.identity() of it that nothing else uses.'
)
# Which of their inputs summaries, and names for a value, show.
_SHOWN = {'ScalarSummary': 1, 'Identity': 0}


class _Shown(NamedTuple):
    """A tensor, or an op that updates a metric; what shows it; and how to tell what it can't."""

    value: tf.Tensor | tf.Operation
    by: str
    log: Callable[..., None]


class Reports:
    """What is shown of tower 0.

    Args:
      hooks: the EstimatorSpec's.
      results: what else it has, tensors and ops of tower 0.
      others: what else isn't only shown.
      towers: the towers.
    """

    def __init__(
        self, hooks: Sequence[Any], results: Sequence[Any], others: Sequence[Any], towers: Towers
    ):
        self._hooks = hooks
        self._results = results
        self._towers = towers
        self._shown: dict[str, _Shown] = {}
        self._named: list[tuple[tf.Tensor, str]] = []  # by a name only
        self._composite: list[tuple[tf.Tensor, str]] = []
        self._read: dict[int, tf.Tensor] = {}  # after updates that are variables
        kept = {getattr(result, 'op', result) for result in [*results, *others]}
        copies = towers.copies.names()
        ops = [op for op in towers.graph.get_operations() if op.type in _SHOWN]
        self._ops = [op for op in ops if op.name not in copies and op not in kept and _is_shown(op)]
        self.run = list(self._ops)  # by those who look at them, and by hooks
        _give(hooks, self._hold)
        for op in sorted(self._ops, key=_is_name):
            value = self._source(op.inputs[_SHOWN[op.type]])
            log = tf.logging.debug if _is_name(op) else tf.logging.info
            self._shown.setdefault(value.name, _Shown(value, f'{op.name!r} ({op.type})', log))

    def updates(self, eval_metric_ops: dict[str, Any]) -> dict[str, tf.Tensor | tf.Operation]:
        """Finds what is there only once metrics are updated, by a name for it.

        Args:
          eval_metric_ops: the EstimatorSpec's.
        """
        if not self._shown:
            return {}
        graph, copies = self._towers.graph, self._towers.copies
        variables = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
        handles = {v.op.name for v in variables if getattr(v, 'graph', None) is graph}
        writes = copies.updates(update for _, update in eval_metric_ops.values()).writes
        handles.update(*map(sharing.shared_handles, writes))
        starts = [graph.get_operation_by_name(name) for name in handles]
        after = {op.name for op in walk(starts, private.followers)}
        updated = [s for s in self._shown.values() if getattr(s.value, 'op', s.value).name in after]
        once = copies.updates(self._results).writes if updated else []
        found = {}
        for value, by, _ in updated:
            if getattr(value, 'op', value).type.endswith('Summary'):
                continue  # What it merges is the whole batch's by itself.
            writes = copies.updates([value]).without(once).writes
            written = [sharing.shared_handles(write) for write in writes]
            if any(written) and all(own <= handles for own in written):
                found[f'{value.name} of {by}'] = value
        return found

    def show(self, wholes: dict[str, tf.Tensor], updates: dict[str, tf.Tensor]) -> None:
        """Shows the whole batch's values.

        Args:
          wholes: those that are known, by the names of tower 0's.
          updates: what metrics' updates of the whole batch give, by the names of tower 0's.
        """
        if not (self._shown or self._named or self._composite):
            return
        wholes = {**wholes, **updates}
        dependents = self._towers.dependents()
        shown = [s for s in self._shown.values() if isinstance(s.value, tf.Tensor)]
        shown = [s for s in shown if s.value.op.name in dependents]
        for value, by, log in shown:
            if value.name in updates and updates[value.name] is not value:
                log(_ONE_ONLY, by, value.name)  # It's made of a metric that goes by one shard, too.
        missing = [s for s in shown if wholes.get(s.value.name, s.value) is s.value]
        if missing:
            wholes.update(self._wholes(missing))
        for sentence, tensors in ((_ONE_ONLY, self._composite), (_BY_NAME, self._named)):
            for tensor, by in tensors:
                if tensor.op.name in dependents:
                    tf.logging.warning(sentence, by, tensor.name)
        self._put(wholes)

    def _wholes(self, shown: Sequence[_Shown]) -> dict[str, tf.Tensor]:
        """Returns the whole batch's values, where they can be told, by the names of tower 0's."""
        rows = self._towers.rows()
        apart, wholes = [], {}
        for value, by, log in shown:
            parts = self._take_apart(value, rows)
            if parts is not None:
                for note in parts.notes:
                    log('%s', note)
                apart.append((value, parts))
            elif self._can_join(value, rows):
                wholes[value.name] = self._towers.joined(value)
            elif not value.op.type.endswith('Summary'):  # Which may consist of whole ones.
                log(_ONE_ONLY, by, value.name)
        names = [value.name for value, _ in apart]
        return {**wholes, **dict(zip(names, self._towers.values(apart)))}

    def _take_apart(self, value: tf.Tensor, rows: Rows) -> losses.Parts | None:
        """Returns what the whole batch's value follows from, if that's certain."""
        single = value.shape.num_elements() == 1
        if (rows.has(value) and not single) or private.in_control_flow(value.op):
            return None
        self._towers.notices.mixing(rows, value)
        parts = self._towers.parts(value, rows)
        terms = [term.tensor for leaf in parts.leaves for term in self._towers.terms(leaf)]
        # What has another shape in another shard would fail when it's added up.
        certain = not parts.doubts and all(t.shape.is_fully_defined() for t in terms)
        return parts if certain and self._towers.copies.can_have(terms) else None

    def _can_join(self, value: tf.Tensor, rows: Rows) -> bool:
        known = value.shape.rank and value.shape[1:].is_fully_defined() and rows.is_plain(value)
        if not known or rows.axis(value) != 0 or private.in_control_flow(value.op):
            return False
        self._towers.notices.mixing(rows, value)
        return self._towers.copies.can_have([value])

    def _hold(self, hook: Any, leaf: Any) -> Any:
        """Finds what a hook holds."""
        graph, by = self._towers.graph, f'A {type(hook).__name__}'
        if isinstance(leaf, str) and isinstance(hook, tf.train.LoggingTensorHook):
            named = _tensor_of_name(leaf, graph)
            if named is not None and self._source(named) is named:
                self._named.append((named, by))
            return leaf
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
            self._composite += [(tensor, by) for tensor in flat_tensors([leaf])[:1]]
            return leaf
        op = getattr(leaf, 'op', leaf)  # An update may be a variable.
        if not isinstance(op, tf.Operation) or op.graph is not graph:
            return leaf
        self.run.append(op)
        value = leaf
        if is_variable(leaf) and not isinstance(leaf, tf.Tensor) and sharing.is_write(op):
            with absolute_scope(graph, 'replicate'):
                self._read[id(leaf)] = value = tf.convert_to_tensor(leaf)
        if isinstance(value, (tf.Tensor, tf.Operation)):
            value = self._source(value)
            self._shown.setdefault(value.name, _Shown(value, by, tf.logging.warning))
        return leaf

    def _source(self, value: tf.Tensor | tf.Operation) -> tf.Tensor | tf.Operation:
        """Returns what a value only gives a name to, by which it will be the whole batch's, too."""
        op = getattr(value, 'op', value)
        return op.inputs[0] if _is_name(op) and op in self._ops else value

    def _put(self, wholes: dict[str, tf.Tensor]) -> None:
        for op in self._ops:
            i = _SHOWN[op.type]
            if op.inputs[i].name in wholes:
                private.set_input(op, i, wholes[op.inputs[i].name])

        def whole(_: Any, leaf: Any) -> Any:
            value = self._read.get(id(leaf), leaf)
            of_graph = getattr(value, 'graph', None) is self._towers.graph
            if not of_graph or not isinstance(value, (tf.Tensor, tf.Operation)):
                return leaf
            found = wholes.get(value.name)
            if found is None:
                return leaf
            return found if isinstance(value, tf.Tensor) else found.op

        _give(self._hooks, whole)


def _is_name(op: tf.Operation) -> bool:
    return op.type == 'Identity'


def _is_shown(op: tf.Operation) -> bool:
    """Whether an op is there to be looked at: nothing else waits for it."""
    if is_own(op) or private.in_control_flow(op):
        return False
    if any(user.type not in ('ScalarSummary', 'MergeSummary') for user in private.followers(op)):
        return False
    if _is_name(op) and sharing.calls_function(op.inputs[0].op):
        return False  # As loops and branches end in, whether that's used or not.
    return not (_is_name(op) and '_class' in op.node_def.attr)  # As gradients do.


def _give(hooks: Sequence[Any], of: Callable[[Any, Any], Any]) -> None:
    """Gives hooks others for what they have as attributes, or in lists, dicts or hooks that are.

    Args:
      hooks: the hooks.
      of: of(the hook, what it has) -> the other.
    """
    waiting: list[tuple[Any, Any]] = [(hook, hook) for hook in hooks]
    seen: set[int] = set()

    def other(hook: Any, value: Any) -> Any:
        if isinstance(value, (dict, list, tf.train.SessionRunHook)):
            waiting.append((hook, value))
            return value
        if not isinstance(value, tuple):
            return of(hook, value)
        items = [other(hook, item) for item in value]
        if all(a is b for a, b in zip(items, value)):
            return value
        return value._make(items) if hasattr(value, '_make') else type(value)(items)

    for hook, container in waiting:  # Which grows as they're found.
        if id(container) in seen:
            continue
        seen.add(id(container))
        if isinstance(container, tf.train.SessionRunHook):
            hook, container = container, getattr(container, '__dict__', {})
            if isinstance(hook, tf.train.LoggingTensorHook):  # Its lists are of keys.
                container = {k: v for k, v in container.items() if isinstance(v, dict)}
        keys = range(len(container)) if isinstance(container, list) else list(container)
        for key in keys:
            value = container[key]
            found = other(hook, value)
            if found is not value:
                container[key] = found


def _tensor_of_name(name: str, graph: tf.Graph) -> tf.Tensor | None:
    try:
        return graph.as_graph_element(name if ':' in name else f'{name}:0')
    except (KeyError, ValueError):
        return None  # The hook will say what is wrong.
