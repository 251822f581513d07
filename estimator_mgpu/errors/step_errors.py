"""Explains the error of a step: which of the user's ops failed, where, and with which examples.

In: the error that a session raises in a step. Out: an error of the same class that also names the
user's op and its line. TensorFlow's error is its cause:

    loss : Tensor had NaN values
    loss/CheckNumerics ran in tower 2, on /device:GPU:2, with examples 6 to 8 of 0 to 11. It was
    made by File "model.py", line 5, in model_fn

If a Python function has failed, which `tf.numpy_function` calls, say, Python's traceback is a part
of the text, once. TensorFlow's error has it several times, and so isn't shown as the cause.

An op in the function of a loop or a branch isn't in the graph. In a divided graph, TensorFlow's
error gives its path, by which it's found: see `op_paths.OpPath`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.errors import user_lines
from estimator_mgpu.memory import memory_advice
from estimator_mgpu.partition.nodes.names import CopyName
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.tower import static_extents
from estimator_mgpu.tf_internals import (
    error_messages,
    function_calls,
    op_paths,
    session_runs,
    tf_estimator,
)

# Errors that say that a session was lost, or closed: the op that they name isn't the cause.
_OF_SESSIONS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)
# An error of this very class ends training without a failure. Explained, it would be of a subclass.
_END_OF_DATA = tf.errors.OutOfRangeError
_XLA_ON_CPUS = (
    'XLA compiles no ops of several logical CPU devices by itself. Leave out global_jit_level and '
    '--tf_xla_cpu_global_jit, or give devices=1.'
)
_ORIGINAL = '_estimator_mgpu_original'  # An attribute of an error that was explained.


class ExplainErrorsHook(tf.train.SessionRunHook):
    """Makes a session explain its errors: it wraps `run`, as hooks aren't told of errors."""

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        graph = session.graph  # The lambda must not hold the session, which holds it.
        session_runs.run_within(session, lambda: op_errors_explained(graph))


def explain_errors(spec: Any) -> Any:
    """An EstimatorSpec with a hook that makes sessions explain the errors of its steps."""
    modes = tf_estimator.estimator.ModeKeys
    hooks = {modes.EVAL: 'evaluation_hooks', modes.PREDICT: 'prediction_hooks'}
    name = hooks.get(spec.mode, 'training_hooks')
    return spec._replace(**{name: [*(getattr(spec, name) or []), ExplainErrorsHook()]})


@contextlib.contextmanager
def op_errors_explained(graph: tf.Graph | None = None) -> Iterator[None]:
    """Explains errors of the ops of a divided graph, and errors of memory.

    Args:
      graph: that of the session, if there is one already.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if original(error) is not error:
            raise
        explained = _explained(error, graph)
        if explained is None:
            raise
        cause = None if error_messages.python_traceback(error) else error
        raise explained from cause


def original(error: Any) -> Any:
    """The error that TensorFlow raised: for an explained error its cause, for others the same."""
    return getattr(error, _ORIGINAL, error)


def _explained(error: tf.errors.OpError, graph: tf.Graph | None) -> tf.errors.OpError | None:
    """An error that says more than another; None if there is nothing to add."""
    sentences = _explanation(error, graph)
    if not sentences:
        return None
    traceback = error_messages.python_traceback(error)
    text = '\n'.join([error_messages.reason(error), *traceback, ' '.join(sentences)])
    error_class: Any = type(error)
    if error.op is not None:
        error_class = _without_traceback(error_class)

    # A class of the user's may need other arguments: then the error stays as it is.
    with contextlib.suppress(Exception):
        explained = error_class(error.node_def, error.op, text)
        setattr(explained, _ORIGINAL, error)
        return explained
    return None


@functools.cache
def _without_traceback(error_class: type[tf.errors.OpError]) -> type[tf.errors.OpError]:
    """A subclass of an error's class, whose text doesn't end with the traceback of the op.

    The explained error's cause has that traceback anyway.
    """
    members = {'__module__': error_class.__module__, '__str__': lambda error: error.message}
    return type(error_class.__name__, (error_class,), members)


def _explanation(error: tf.errors.OpError, graph: tf.Graph | None) -> list[str]:
    """What there is to add to an error, in sentences; [] if TensorFlow has said all."""
    if isinstance(error, (*_OF_SESSIONS, _END_OF_DATA)):
        return []
    if error.op is not None:
        graph = error.op.graph
    step = steps.Step(None, None, []) if graph is None else steps.of_graph(graph)

    where = ''
    line = ''
    # If an unusual graph makes this fail, the user still gets TensorFlow's error, and what helps.
    with contextlib.suppress(Exception):
        if graph is not None and error_messages.is_of_input(error):
            where, made_for = _where_in_input(error, graph)
            line = _line(made_for)
        else:
            failed = _failed_op(error, graph, step)
            if failed is not None:
                where = _where(failed, step)
                line = _line(failed.made_for) if where else ''

    what_helps = ''
    if error_messages.is_of_step_memory(error):
        what_helps = memory_advice.for_op(error.op, step)
    elif error_messages.is_of_xla_on_cpus(error):
        what_helps = _XLA_ON_CPUS

    # A line has no full stop, so that it can be clicked on where it's the end.
    raised_by = user_lines.last_of(error_messages.python_traceback(error))
    if raised_by:
        line = f'{line}.' if line else ''
        raised_by = f'The error was raised by {raised_by}'
    return [sentence for sentence in (where, what_helps, line, raised_by) if sentence]


def _where_in_input(error: tf.errors.OpError, graph: tf.Graph) -> tuple[str, tf.Operation | None]:
    """Says which op of an input_fn's dataset failed; and the op, if its name is that of one only.

    TensorFlow doesn't say which function of the dataset it is in.
    """
    name = error_messages.node_name(error)
    ops = [] if name is None else function_calls.ops_of_functions(graph, name)
    made_at = {}
    for op in ops:
        if not user_lines.is_of_model_fn(op):
            made_at[str(user_lines.frame_of(op))] = op
    if len(made_at) != 1:
        return "It's of the dataset that the input_fn gives.", None
    [op] = made_at.values()
    return f'{name} ran in the dataset that the input_fn gives.', op


class _FailedOp(NamedTuple):
    """An op that has failed, in the graph or in a function.

    Attributes:
      path: its name; in a function, its path.
      in_graph: the op itself, or the op of the graph that calls the function.
      made_for: an op that has the traceback of the user's op.
    """

    path: str
    in_graph: tf.Operation
    made_for: tf.Operation


def _failed_op(
    error: tf.errors.OpError, graph: tf.Graph | None, step: steps.Step
) -> _FailedOp | None:
    """The op of a divided graph that an error is about; None if it isn't known."""
    if graph is None or step.plan is None:
        return None
    if error.op is not None:
        return _FailedOp(error.op.name, error.op, error.op)
    path = error_messages.node_name(error)
    if path is None:
        return None
    split = op_paths.split_path(graph, path)
    if split is None:  # The op is in the graph.
        op = op_paths.op_of_path(graph, path)
        return None if op is None else _FailedOp(path, op, op)

    # A copy's functions have no graphs with tracebacks; those of the user's op have.
    copy = step.names.copy_of(path)
    users_op = op_paths.op_of_path(graph, path if copy is None else copy.op_name)
    return None if users_op is None else _FailedOp(path, split.caller, users_op)


def _where(failed: _FailedOp, step: steps.Step) -> str:
    """Says which of the user's ops failed, where, and with which examples; '' for other ops."""
    in_graph = failed.in_graph
    why = _why_once(step.plan, in_graph.name)
    if why is not None:
        return f'{failed.path} ran once, on the global batch: {why}.'

    copy = step.names.copy_of(in_graph.name)
    if copy is not None:
        users_path = copy.op_name + failed.path.removeprefix(in_graph.name)
        tower = f'tower {copy.tower}, on {in_graph.device}'
        examples = _examples(step, copy)
        frames = step.plan.frames.get(copy.op_name, ())
        joint = ', in a joint loop' if any(frame.is_joint for frame in frames) else ''
        return f'{users_path} ran in {tower}, with {examples}{joint}.'

    if step.names.is_added(in_graph.name):
        return f'{failed.path} ran on {in_graph.device}, for an op of all towers.'
    if user_lines.is_of_model_fn(failed.made_for):
        return f'{failed.path} ran once, for all towers.'
    return ''


def _why_once(plan: Plan, op_name: str) -> str | None:
    """Why an op that depends on the batch runs once; None for other ops.

    If a v1 loop runs once, the plan only has the ops that give its results. The loop's other ops
    run once for the same reason.
    """
    if op_name in plan.once:
        why, _ = plan.once[op_name]
        return why
    frames = plan.frames.get(op_name)
    if frames is None:
        return None
    for member, (why, _) in plan.once.items():
        is_in_same_loop = plan.frames.get(member, ())[:1] == frames[:1]
        if is_in_same_loop:
            return why
    return None


def _line(op: tf.Operation | None) -> str:
    """Says which line of the user's program has made an op; '' if that isn't known."""
    frame = None if op is None else user_lines.frame_of(op)
    if frame is None:
        return ''
    name = frame.name or '<lambda>'  # In a dataset, TensorFlow knows no name of a lambda.
    return f'It was made by File "{frame.filename}", line {frame.lineno}, in {name}'


def _examples(step: steps.Step, copy: CopyName) -> str:
    """Says which examples a tower's copy of an op has, as `static_extents` divides them."""
    if _row_spaces(step.plan, copy.op_name) - {step.plan.rows}:
        return 'its share of the rows'  # that a mask left, say
    if not isinstance(step.examples, int):
        return 'its share of the examples'
    extents = static_extents(step.examples, len(step.devices), step.microbatches)
    start, count = extents[copy.tower]
    if count == 1:
        return f'example {start} of 0 to {step.examples - 1}'
    return f'examples {start} to {start + count - 1} of 0 to {step.examples - 1}'


def _row_spaces(plan: Plan, op_name: str) -> set[RowSpace]:
    """The row spaces of an op's inputs and outputs."""
    forms: list[Any] = []
    if op_name in plan.ops:
        forms += plan.ops[op_name].needs
    for placements in (plan.placements, plan.in_loops):
        for name, placement in placements.items():
            if name.partition(':')[0] == op_name:
                forms.append(placement)
    return {form.rows for form in forms if hasattr(form, 'rows')}
