"""Gradients that are taken after the model_fn has returned, in a hook's `begin()` say.

`tf.gradients` goes back from a loss and asks each op for its gradient. A divided graph has the
values of one device, but not its ops: there are towers' copies, and what rewrites use in place of
an op may have another gradient. For example, a fused batch normalization gets its statistics from
sums, and takes these for constants. From a tensor in the middle, such as `h`, nothing follows:

    x ---> h ---> loss                                   as the model_fn made it

    x ---> towers ---> full value of h ---> loss         divided

So while `tf.gradients` runs, each op is given again what the model_fn gave it. Then it's given full
values as before, and so are the ops that `tf.gradients` has added. These run once, on the global
batch, and so give the gradients of one device.

In: a graph, before and after it's divided. Out: the same graph, and a `tf.gradients` that knows it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect, writes_state
from estimator_mgpu.tf_internals.liveness import Liveness

_MODEL = '_estimator_mgpu_model'  # An attribute of the graph.


def note_model(graph: tf.Graph) -> Model:
    """Notes what ops are given, before anything is changed in a graph that a model_fn has built.

    If another model in the graph was divided before, both are noted together. Until `changed()`,
    `tf.gradients` goes by the ops as they are.
    """
    _extend_gradients()
    if not hasattr(graph, _MODEL):
        setattr(graph, _MODEL, Model(graph))
    model: Model = getattr(graph, _MODEL)
    model.is_changing = True
    model.note_ops()
    return model


def refuse_batch_norm(graph: tf.Graph, existing_ops: Set[str]) -> None:
    """Lets later gradients fail that need one of a batch normalization in training.

    With `batch_norm='device'`, the loss follows from the statistics of each device, and the user's
    op would give gradients for those of the global batch.

    Args:
      graph: the graph that the model_fn has built.
      existing_ops: names of ops that were there before the model_fn.
    """
    for op in graph.get_operations():
        if op.name not in existing_ops and _normalizes(op):
            private.set_gradient_function(op, _fail)


class Model:
    """What ops of a graph were given by a model_fn, or by whoever made them later.

    Args:
      graph: the graph.

    Attributes:
      is_changing: whether the graph is being changed.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._inputs: dict[tf.Operation, Sequence[tf.Tensor]] = {}
        self._values: dict[str, str] = {}
        self._made_as: dict[str, tf.Tensor] = {}
        self._ops_seen = 0
        self._is_restored = False
        self.is_changing = True

    def note_ops(self) -> list[tf.Operation]:
        """Notes what the ops are given that were added since the last time, and returns these."""
        added = self._graph.get_operations()[self._ops_seen :]
        self._ops_seen += len(added)
        for op in added:
            self._inputs[op] = self.as_made(op.inputs) if self._made_as else op.inputs
        return added

    def note_inlined(self, inlined: Mapping[str, tf.Tensor]) -> None:
        """Notes calls of functions in whose place the functions' own ops run.

        A call that gives the same again is still gone through as it was made: only there are
        gradients that the function itself defines. For others, such as those that draw random
        numbers, the inlined ops are taken for the model's.

        Args:
          inlined: by the names of calls' outputs, the tensors in their place.
        """
        for name, tensor in inlined.items():
            call = self._graph.get_tensor_by_name(name).op
            if not _gives_the_same_again(call):
                while tensor.name in inlined:
                    tensor = inlined[tensor.name]
                self._made_as[name] = tensor
        if self._made_as:
            for op, inputs in self._inputs.items():
                self._inputs[op] = self.as_made(inputs)
        self.note_ops()

    def changed(self, values: Mapping[str, str]) -> None:
        """Notes that the graph has been changed. The ops that were added aren't the model's.

        Args:
          values: for the names of the model's tensors, those of the tensors with their values.
        """
        self._values.update(values)
        self._ops_seen = len(self._graph.get_operations())
        self.is_changing = False

    def note_result(self, tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Notes that a value is given to the user in place of a tensor, and returns the value.

        If the user may have the same value as that of another tensor, with another gradient, an
        identity of it is returned.
        """
        [tensor] = self.as_made([tensor])
        if value is tensor:
            return value
        if value.op in self._inputs or self._made_as.get(value.name, tensor) is not tensor:
            with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
                with tf.device(value.device):
                    value = tf.identity(value, f'{tensor.op.name}/result')
        self._made_as[value.name] = tensor
        return value

    def as_made(self, tensors: Sequence[Any]) -> list[Any]:
        """The model's tensors in place of others that have their values."""
        return [
            self._made_as.get(tensor.name, tensor) if _has_name(tensor) else tensor
            for tensor in tensors
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which ops are given what they were given when they were made.

        Those that are added in it are then given full values, as the others are.
        """
        if self._is_restored:  # Some gradients are made by a call of `tf.gradients`.
            yield
            return

        self.note_ops()
        changes = self._changes()
        self._is_restored = True
        try:
            for op, index, _, made_with in changes:
                private.set_input(op, index, made_with)
            yield
            added = self.note_ops()
            reruns = self._reruns(added)
            not_of_model = set(self._graph.get_operations()).difference(self._inputs)
            writes = [rerun.writes_after(not_of_model) for rerun in reruns]
        finally:
            for op, index, present, _ in changes:
                private.set_input(op, index, present)
            self._is_restored = False

        for op in added:
            self._use_values(op)
        for rerun, writes_after in zip(reruns, writes):
            self._let_wait(writes_after, rerun.ends)

    def _changes(self) -> list[tuple[tf.Operation, int, tf.Tensor, tf.Tensor]]:
        """What ops are given, by index, that isn't what they were made with; with that."""
        changes = []
        for op, inputs in self._inputs.items():
            # A loop may have got further inputs, as one gets by its gradient.
            for index, (present, made_with) in enumerate(zip(op.inputs, inputs)):
                if present is not made_with:
                    changes.append((op, index, present, made_with))
        return changes

    def _use_values(self, op: tf.Operation) -> None:
        for index, tensor in enumerate(op.inputs):
            value = self._values.get(tensor.name)
            if value is not None:
                private.set_input(op, index, self._graph.get_tensor_by_name(value))

    def _reruns(self, added: Sequence[tf.Operation]) -> list[_Rerun]:
        """What runs for gradients, although towers have copies of it.

        Gradients need what a loop or a branch has computed inside, which copies don't give.

        Args:
          added: the ops of gradients.
        """
        used: dict[tf.Operation, dict[str, tf.Tensor]] = {}
        for op in added:
            for tensor in op.inputs:
                caller = tensor.op
                if caller.type not in op_types.FUNCTION_CALLERS or tensor.name in self._values:
                    continue
                if any(output.name in self._values for output in caller.outputs):
                    used.setdefault(caller, {})[tensor.name] = tensor
        reruns = [_Rerun(caller.inputs, list(tensors.values())) for caller, tensors in used.items()]
        return reruns + self._reruns_of_v1_loops(added)

    def _reruns_of_v1_loops(self, added: Sequence[tf.Operation]) -> list[_Rerun]:
        """The loops of TensorFlow 1 among them: gradients have added ops to these."""
        enters = [op for op in self._inputs if op.type in op_types.ENTER]
        if not enters:
            return []
        liveness = Liveness(list(self._inputs))
        outermost = {liveness.frame(op)[:1] for op in added if liveness.frame(op)}
        exits = [op for op in self._inputs if op.type in op_types.EXIT]
        reruns = []
        for frame in outermost:
            inputs = [op.inputs[0] for op in enters if liveness.output_frame(op) == frame]
            ends = [op.outputs[0] for op in exits if liveness.frame(op) == frame]
            reruns.append(_Rerun(inputs, ends))
        return reruns

    def _let_wait(self, writes: Sequence[tf.Operation], ends: Sequence[tf.Tensor]) -> None:
        """Lets writes wait for what runs once more, unless it's in a branch that isn't taken."""
        before = graphs.ancestors([tensor.op for tensor in ends])
        later = [write for write in writes if write not in before]
        if not later:
            return
        with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
            name = f'{ends[0].op.name}/again'
            with tf.device(ends[0].device):
                identities = [tf.identity(tensor, name) for tensor in ends]
                with tf.control_dependencies(identities):
                    gate = tf.raw_ops.ControlTrigger(name=name)
        for write in later:
            function_calls.let_wait(write, [gate])


class _Rerun(NamedTuple):
    """A call, a branch or a loop that runs for gradients, although towers have copies of it.

    Attributes:
      inputs: what it's given.
      ends: outputs that gradients use, or all that end a v1 loop: who waits for these, waits for
        what it reads.
    """

    inputs: Sequence[tf.Tensor]
    ends: Sequence[tf.Tensor]

    def writes_after(self, not_of_model: Set[tf.Operation]) -> list[tf.Operation]:
        """The model's ops that write to variables that it's given, and that follow from it."""
        variables = [tensor for tensor in self.inputs if tensor.dtype == tf.resource]
        if not variables:
            return []
        followers = graphs.descendants([tensor.op for tensor in self.ends], until=not_of_model)
        users = {user for variable in variables for user in variable.consumers()}
        return [user for user in users if user in followers and writes_state(user)]


@functools.cache
def _extend_gradients() -> None:
    """Lets `tf.gradients` know of models."""
    private.replace_gradients(_with_models)


def _with_models(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind `tf.gradients`, with the ops of the model_fn in a divided graph."""
    signature = inspect.signature(gradients)

    @functools.wraps(gradients)
    def gradients_of_model(*args: Any, **kwargs: Any) -> Any:
        graph = graphs.outermost_graph(tf.get_default_graph())
        model: Model | None = getattr(graph, _MODEL, None)
        if model is None or model.is_changing or graph.finalized:
            return gradients(*args, **kwargs)

        bound = signature.bind(*args, **kwargs)
        for name in ('ys', 'xs', 'stop_gradients'):
            tensors = bound.arguments.get(name)
            if tensors is not None:
                as_list = tensors if isinstance(tensors, (list, tuple)) else [tensors]
                bound.arguments[name] = model.as_made(as_list)
        with model.restored():
            return gradients(*bound.args, **bound.kwargs)

    return gradients_of_model


def _gives_the_same_again(call: tf.Operation) -> bool:
    """Whether a call of a function may run twice: it only computes, and reads variables."""
    return not any(
        has_side_effect(op)
        for function in function_calls.function_graphs(call)
        for op in function.get_operations()
    )


def _has_name(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and tf.is_symbolic_tensor(tensor)


def _normalizes(op: tf.Operation) -> bool:
    """Whether an op is a fused batch normalization in training, or calls a function with one."""
    if op.type in op_types.BATCH_NORMS:
        return op.get_attr('is_training')
    if op.type not in op_types.FUNCTION_CALLERS:
        return False
    return any(
        _normalizes(called)
        for function in function_calls.function_graphs(op)
        for called in function.get_operations()
    )


def _fail(op: tf.Operation, *gradients: Any) -> Any:
    raise ValueError(
        f"{op.name} normalizes each device's examples by themselves, as batch_norm='device' asks "
        'for. After the model_fn has returned, it has no gradient. Call tf.gradients in the '
        'model_fn.'
    )
