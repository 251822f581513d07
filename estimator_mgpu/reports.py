"""What is only shown, in summaries and by hooks, is the whole batch's where that can be.

It comes from tower 0's shard. Where hooks hold tensors, scalars are summarized, or `tf.identity`
gives them a name to be logged by, the whole batch's values take their place. Only who looks at them
needs these, so that a step that shows nothing doesn't compute them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private, sharing
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.rows import Rows
from estimator_mgpu.subjects import is_variable
from estimator_mgpu.towers import Towers, is_own
from estimator_mgpu.walks import walk

_ONE_ONLY = (
    "%s shows %r of one device's shard: that it follows from sums and means over rows can't "
    "be told from the graph. If it has to be the whole batch's, run this model with "
    'replicate(devices=1).'
)
# Which of their inputs summaries, and names for a value, show.
_SHOWN = {'ScalarSummary': 1, 'Identity': 0}
# The attribute in which a LoggingTensorHook keeps what it had in the place of other attributes.
_BEFORE = '_before_replicate'


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
        self._sparse: list[tuple[tf.SparseTensor, str]] = []
        kept = {getattr(result, 'op', result) for result in [*results, *others]}
        ops = towers.graph.get_operations()
        self._ops = [op for op in ops if op.type in _SHOWN and _is_shown(op) and op not in kept]
        self.run = list(self._ops)  # by those who look at them, and by hooks
        for hook in hooks:
            _take_back(hook)
            self._hold(hook)
        for op in sorted(self._ops, key=_is_name):
            value = self._named(op.inputs[_SHOWN[op.type]])
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
            writes = copies.updates([value]).without(once).writes
            if writes and all(sharing.shared_handles(write) <= handles for write in writes):
                found[f'{value.name} of {by}'] = value
        return found

    def show(self, wholes: dict[str, tf.Tensor], updates: dict[str, tf.Tensor]) -> None:
        """Shows the whole batch's values.

        Args:
          wholes: those that are known, by the names of tower 0's.
          updates: what metrics' updates of the whole batch give, by the names of tower 0's.
        """
        wholes = {**wholes, **updates}
        if not self._shown and not self._sparse:
            return
        rows = self._towers.rows()
        apart = []
        for value, by, log in self._shown.values():
            known = wholes.get(value.name, value)
            if not isinstance(value, tf.Tensor) or value.op.name not in rows.dependents:
                continue
            if known is not value:
                if value.name in updates:  # It's made of a metric that goes by one shard, too.
                    log(_ONE_ONLY, by, value.name)
                continue
            parts = self._take_apart(value, rows)
            if parts is not None:
                apart.append((value, parts))
            elif self._can_join(value, rows):
                wholes[value.name] = self._towers.joined(value)
            elif not value.op.type.endswith('Summary'):  # Which may consist of whole ones.
                log(_ONE_ONLY, by, value.name)
        for sparse, by in self._sparse:
            if sparse.values.op.name in rows.dependents:
                tf.logging.warning(_ONE_ONLY, by, sparse.values.name)
        names = [value.name for value, _ in apart]
        wholes.update(zip(names, self._towers.values(apart)))
        self._put(wholes)

    def _take_apart(self, value: tf.Tensor, rows: Rows) -> losses.Parts | None:
        """Returns what the whole batch's value follows from, if that's certain."""
        single = value.shape.num_elements() == 1
        if (rows.has(value) and not single) or private.in_control_flow(value.op):
            return None
        self._towers.notices.mixing(rows, value)
        parts = losses.take_apart(value, rows, losses.AUTO, len(self._towers.devices))
        terms = [term.tensor for leaf in parts.leaves for term in self._towers.terms(leaf)]
        # What has another shape in another shard would fail when it's added up.
        certain = not parts.doubts and all(t.shape.is_fully_defined() for t in terms)
        return parts if certain and self._towers.copies.can_have(terms) else None

    def _can_join(self, value: tf.Tensor, rows: Rows) -> bool:
        known = value.shape.rank and value.shape[1:].is_fully_defined()
        if not known or rows.axis(value) != 0 or private.in_control_flow(value.op):
            return False
        self._towers.notices.mixing(rows, value)
        return self._towers.copies.can_have([value])

    def _hold(self, hook: Any) -> None:
        """Finds what a hook holds; a name to log something by becomes the tensor of that name."""

        def hold(leaf: Any, logged: bool) -> Any:
            leaf = _element(leaf, logged, self._towers.graph)
            by = f'A {type(hook).__name__}'
            if isinstance(leaf, tf.SparseTensor):
                self._sparse.append((leaf, by))
            op = getattr(leaf, 'op', leaf)  # An update may be a variable.
            if isinstance(op, tf.Operation) and op.graph is self._towers.graph:
                self.run.append(op)
                if isinstance(leaf, (tf.Tensor, tf.Operation)):
                    value = self._named(leaf)
                    self._shown.setdefault(value.name, _Shown(value, by, tf.logging.warning))
            return leaf

        _give(hook, hold)

    def _named(self, value: tf.Tensor | tf.Operation) -> tf.Tensor | tf.Operation:
        """Returns what a value only gives a name to, by which it will be the whole batch's, too."""
        op = getattr(value, 'op', value)
        return op.inputs[0] if _is_name(op) and op in self._ops else value

    def _put(self, wholes: dict[str, tf.Tensor]) -> None:
        for op in self._ops:
            i = _SHOWN[op.type]
            if op.inputs[i].name in wholes:
                private.set_input(op, i, wholes[op.inputs[i].name])

        def whole(leaf: Any, _: bool) -> Any:
            if not isinstance(leaf, (tf.Tensor, tf.Operation)) or leaf.name not in wholes:
                return leaf
            found = wholes[leaf.name]
            return found if isinstance(leaf, tf.Tensor) else found.op

        for hook in self._hooks:
            _give(hook, whole)


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


def _give(hook: Any, of: Callable[[Any, bool], Any]) -> None:
    """Gives a hook others for what it has as attributes, or in lists, dicts or hooks that are.

    Args:
      hook: the hook.
      of: of(what it has, whether that may be a name of what is to be logged) -> the other.
    """
    for each in _with_inner(hook):
        logs = isinstance(each, tf.train.LoggingTensorHook)
        for name, value in list(vars(each).items()):
            other = value if name == _BEFORE else _mapped(value, of, logs)
            if other is not value:
                vars(each)[name] = other
                if logs and name not in vars(each).setdefault(_BEFORE, {}):
                    vars(each)[_BEFORE][name] = value


def _take_back(hook: Any) -> None:
    """Gives a hook the names again that were those of tensors in another graph.

    A hook that's made once may be given to Estimator each time that it builds a graph.
    """
    for each in _with_inner(hook):
        vars(each).update(vars(each).pop(_BEFORE, {}))


def _with_inner(hook: Any) -> list[Any]:
    """Lists a hook, and the hooks that it has as attributes, but for those without a `__dict__`."""
    hooks = [hook]
    for each in hooks:  # Which grows as they're found.
        held = getattr(each, '__dict__', {}).values()
        found = [v for v in held if isinstance(v, tf.train.SessionRunHook)]
        hooks += [v for v in found if all(v is not h for h in hooks)]
    return [each for each in hooks if hasattr(each, '__dict__')]


def _mapped(value: Any, of: Callable[[Any, bool], Any], logs: bool, has_key: bool = False) -> Any:
    if isinstance(value, dict):
        others = {key: _mapped(v, of, logs, True) for key, v in value.items()}
        if any(others[key] is not v for key, v in value.items()):
            value = copy.copy(value)
            value.update(others)
        return value
    named = isinstance(value, tuple) and hasattr(value, '_fields')
    if named or type(value) in (list, tuple):
        items = [_mapped(v, of, logs) for v in value]
        # A LoggingTensorHook's list is of its dict's keys.
        if logs or all(a is b for a, b in zip(items, value)):
            return value
        return type(value)(*items) if named else type(value)(items)
    return of(value, logs and has_key)


def _element(leaf: Any, logged: bool, graph: tf.Graph) -> Any:
    """Returns the tensor that a hook's name or update stands for, or else what it has."""
    if logged and isinstance(leaf, str):
        try:
            return graph.as_graph_element(leaf if ':' in leaf else f'{leaf}:0')
        except (KeyError, ValueError):
            return leaf  # The hook will say what is wrong.
    updates = not isinstance(leaf, tf.Tensor) and is_variable(leaf)
    if updates and getattr(leaf, 'graph', None) is graph and sharing.is_write(leaf.op):
        with absolute_scope(graph, 'replicate'):
            return tf.convert_to_tensor(leaf)
    return leaf
