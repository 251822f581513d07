"""Gradients that are taken after the model_fn has returned, for example in a hook's `begin()`.

`tf.gradients` goes back from a loss and asks each op for its gradient. A divided graph has the
values of one device, but not its ops: there are towers' copies, and what rewrites use in place of
an op may have another gradient. For example, a fused batch normalization is given its statistics by
sums, and its gradient treats these as constants. And no path leads from a tensor in the middle,
such as `h`, to the loss:

    x ---> h ---> loss                                   as the model_fn made it

    x ---> towers ---> full value of h ---> loss         divided

So while `tf.gradients` runs, each op has the inputs again that the model_fn gave it. Afterwards it
has full values as before, and so have the ops that `tf.gradients` has added. The added ops run
once, on the global batch: they compute the gradients that one device would compute.

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
    """Notes the inputs of all ops of a graph that a model_fn has built, before anything is changed.

    If another model in the graph was divided before, both are noted together. Until
    `Model.end_changes()` is called, `tf.gradients` is TensorFlow's own.
    """
    _extend_gradients()
    if not hasattr(graph, _MODEL):
        setattr(graph, _MODEL, Model(graph))
    model: Model = getattr(graph, _MODEL)
    model.is_changing = True
    model.note_ops()
    return model


def refuse_batch_norm(graph: tf.Graph, existing_ops: Set[str]) -> None:
    """Makes later gradients raise an error if they go through a batch normalization in training.

    With `batch_norm='device'`, the loss follows from the statistics of each device, but the
    gradients of the user's op would be those for statistics of the global batch.

    Args:
      graph: the graph that the model_fn has built.
      existing_ops: names of ops that were there before the model_fn.
    """
    for op in graph.get_operations():
        if op.name not in existing_ops and _normalizes(op):
            private.set_gradient_function(op, _refuse_gradient)


def users_of_reruns(graph: tf.Graph) -> Set[tf.Operation]:
    """The ops that use what calls, branches and loops give that run again for later gradients."""
    return getattr(graph, _MODEL).users_of_reruns


class Model:
    """The ops of a graph with the inputs that a model_fn gave them, or whoever made them later.

    What rewrites and towers add isn't a part of the model.

    Args:
      graph: the graph.

    Attributes:
      is_changing: whether the graph is being changed: from `note_model` to `end_changes`.
      users_of_reruns: ops that use what runs again for gradients, although towers have copies.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        # The model's ops, with their inputs as they were made.
        self._inputs: dict[tf.Operation, Sequence[tf.Tensor]] = {}
        # By the names of the model's tensors, those of the tensors that have their values now.
        self._values: dict[str, str] = {}
        # By the names of tensors that the user may have, the model's tensors that they stand for.
        self._made_as: dict[str, tf.Tensor] = {}
        self._ops_seen = 0
        self._is_restored = False
        self.is_changing = True
        self.users_of_reruns: set[tf.Operation] = set()

    def note_ops(self) -> list[tf.Operation]:
        """Notes the inputs of the ops that were added since the last call, and returns the ops."""
        added = self._graph.get_operations()[self._ops_seen :]
        self._ops_seen += len(added)
        for op in added:
            # Most ops are noted before any tensor stands for another: then nothing is copied.
            self._inputs[op] = self.as_made(op.inputs) if self._made_as else op.inputs
        return added

    def has(self, op: tf.Operation) -> bool:
        """Whether an op is the model's, and not one that a rewrite or a tower has added."""
        return op in self._inputs

    def note_inlined(self, inlined: Mapping[str, tf.Tensor]) -> None:
        """Notes calls of functions in whose place the functions' own ops run.

        If a call may run again, gradients go through the call: it has a gradient of its own if the
        function defines one, as with `tf.custom_gradient`. Otherwise the inlined ops become a part
        of the model in its place. For example, another run would draw other random numbers.

        Args:
          inlined: by the names of calls' outputs, the tensors in their place.
        """
        for name, tensor in inlined.items():
            call = self._graph.get_tensor_by_name(name).op
            if not _gives_the_same_again(call):
                while tensor.name in inlined:  # It may be an output of another call.
                    tensor = inlined[tensor.name]
                self._made_as[name] = tensor
        if self._made_as:
            for op, inputs in self._inputs.items():
                self._inputs[op] = self.as_made(inputs)
        self.note_ops()

    def end_changes(self, values: Mapping[str, str]) -> None:
        """Notes that the graph is divided. Ops added since the last `note_ops` aren't the model's.

        Args:
          values: by the names of the model's tensors, those of the tensors that have their values
            now. A tensor that isn't in it has its value itself.
        """
        self._values.update(values)
        self._ops_seen = len(self._graph.get_operations())
        self.is_changing = False

    def note_result(self, tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Notes that the user gets a value in place of a tensor, and returns the value.

        One value can't stand for two tensors, as these may have different gradients: one may be
        `tf.stop_gradient` of the other. So the second one gets an identity of the value.
        """
        [tensor] = self.as_made([tensor])
        if value is tensor:
            return value
        is_of_model = value.op in self._inputs
        if is_of_model or self._made_as.get(value.name, tensor) is not tensor:
            with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
                with tf.device(value.device):
                    value = tf.identity(value, f'{tensor.op.name}/result')
        self._made_as[value.name] = tensor
        return value

    def as_made(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the model's tensors in place of those that stand for them.

        Other tensors are returned as they are, and so is what isn't a tensor, such as a variable.
        """
        return [
            self._made_as.get(tensor.name, tensor) if tf.is_symbolic_tensor(tensor) else tensor
            for tensor in tensors
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the model's ops have the inputs that they were made with.

        Ops that are added in it have full values afterwards, as the others have.
        """
        if self._is_restored:  # The gradients of some ops call `tf.gradients` themselves.
            yield
            return

        self.note_ops()
        with self._inputs_as_made():
            yield
            added = self.note_ops()
            # What follows from a loop, say, can only be seen as long as the graph is restored.
            reruns = self._reruns(added)
            not_of_model = set(self._graph.get_operations()).difference(self._inputs)
            writes = [rerun.writes_after(not_of_model) for rerun in reruns]

        for op in added:
            self._use_values(op)
        for rerun, writes_after in zip(reruns, writes):
            self._let_wait(writes_after, rerun.ends)

    @contextlib.contextmanager
    def _inputs_as_made(self) -> Iterator[None]:
        """A context in which the ops that are noted have the inputs that they were made with.

        Loops wait for nothing in it: TensorFlow can't give further inputs to one that does.
        """
        changes = self._changed_inputs()
        controls = {
            op: op.control_inputs
            for op in self._inputs
            if op.type in op_types.LOOPS and op.control_inputs
        }

        self._is_restored = True
        try:
            for change in changes:
                private.set_input(change.op, change.position, change.first)
            for op in controls:
                private.remove_control_inputs(op)
            yield
        finally:
            for op, before in controls.items():
                private.add_control_inputs(op, before)
            for change in changes:
                private.set_input(change.op, change.position, change.present)
            self._is_restored = False

    def _changed_inputs(self) -> list[_ChangedInput]:
        """The inputs of the model's ops that aren't those that they were made with."""
        changes = []
        for op, inputs in self._inputs.items():
            # A loop may have got further inputs, as one gets by its gradient.
            for position, (present, first) in enumerate(zip(op.inputs, inputs)):
                if present is not first:
                    changes.append(_ChangedInput(op, position, present, first))
        return changes

    def _use_values(self, op: tf.Operation) -> None:
        """Gives an op the values that the model's tensors have now."""
        for index, tensor in enumerate(op.inputs):
            value = self._values.get(tensor.name)
            if value is not None:
                private.set_input(op, index, self._graph.get_tensor_by_name(value))

    def _reruns(self, added: Sequence[tf.Operation]) -> list[_Rerun]:
        """The calls, branches and loops that run for gradients, although towers have copies.

        Gradients need what a loop or a branch has computed inside, which copies don't give. The ops
        of a TensorFlow 1 branch have full values, so no branch of that kind runs again.

        Args:
          added: the ops of gradients.
        """
        used: dict[tf.Operation, dict[str, tf.Tensor]] = {}
        for op in added:
            for tensor in op.inputs:
                caller = tensor.op
                # A full value comes from copies. Outputs that gradients have added have none.
                if caller.type not in op_types.FUNCTION_CALLERS or tensor.name in self._values:
                    continue
                has_copies = any(output.name in self._values for output in caller.outputs)
                if has_copies:
                    used.setdefault(caller, {})[tensor.name] = tensor
        reruns = [_Rerun(caller.inputs, list(tensors.values())) for caller, tensors in used.items()]
        return reruns + self._reruns_of_v1_loops(added)

    def _reruns_of_v1_loops(self, added: Sequence[tf.Operation]) -> list[_Rerun]:
        """The loops of TensorFlow 1 that run for gradients: those in which gradients have ops."""
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
        """Lets writes wait for the ends of a call, branch or loop that runs for gradients.

        In the model they follow it. A write that the ends wait for now can't wait for them. None
        may wait for what is in a branch of TensorFlow 1: it wouldn't run if the branch isn't taken.

        Args:
          writes: ops that write to variables that it reads.
          ends: its outputs.
        """
        before = graphs.ancestors([tensor.op for tensor in ends])
        later = [write for write in writes if write not in before]
        if not later:
            return

        liveness = Liveness(self._graph.get_operations())
        for tensor in ends:
            if liveness.may_be_dead(tensor.op):
                raise ValueError(
                    f'{tensor.op.name} is a loop in a tf.cond, and reads a variable that is '
                    'written afterwards. After the model_fn has returned, it has no gradient. '
                    'Call tf.gradients in the model_fn.'
                )

        with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
            name = f'{ends[0].op.name}/again'
            with tf.device(ends[0].device):
                identities = [tf.identity(tensor, name) for tensor in ends]
                with tf.control_dependencies(identities):
                    end = tf.no_op(name)
        self.users_of_reruns.update(identity.op for identity in identities)
        for write in later:
            function_calls.let_wait(write, [end])


class _ChangedInput(NamedTuple):
    """An input of one of the model's ops that isn't what the op was made with."""

    op: tf.Operation
    position: int
    present: tf.Tensor
    first: tf.Tensor


class _Rerun(NamedTuple):
    """A call, a branch or a loop that runs for gradients, although towers have copies of it.

    Attributes:
      inputs: of the call or branch, or what enters the loop.
      ends: the outputs that gradients use, or all outputs of a v1 loop. Whoever waits for these
        waits for the reads of variables in it.
    """

    inputs: Sequence[tf.Tensor]
    ends: Sequence[tf.Tensor]

    def writes_after(self, not_of_model: Set[tf.Operation]) -> list[tf.Operation]:
        """The model's ops that follow from it, and write to variables that are among its inputs.

        Args:
          not_of_model: ops of towers and rewrites, which aren't followed any further.
        """
        variables = [tensor for tensor in self.inputs if tensor.dtype == tf.resource]
        if not variables:
            return []
        followers = graphs.descendants([tensor.op for tensor in self.ends], until=not_of_model)
        users = {user for variable in variables for user in variable.consumers()}
        return [user for user in users if user in followers and writes_state(user)]


@functools.cache
def _extend_gradients() -> None:
    """Lets `tf.gradients` know of models. TensorFlow's function is replaced only once."""
    private.replace_gradients(_with_models)


def _with_models(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Extends the function behind `tf.gradients`: in a divided graph, it uses the model's ops."""
    signature = inspect.signature(gradients)

    @functools.wraps(gradients)
    def gradients_of_model(*args: Any, **kwargs: Any) -> Any:
        graph = graphs.outermost_graph(tf.get_default_graph())
        model: Model | None = getattr(graph, _MODEL, None)
        # In a finalized graph, TensorFlow itself raises an error.
        if model is None or model.is_changing or graph.finalized:
            return gradients(*args, **kwargs)

        # The user may have results of the model_fn, which stand for the model's tensors.
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
    """Whether a call that runs twice gives the same: its function only computes and reads."""
    return not any(
        has_side_effect(op)
        for function in function_calls.function_graphs(call)
        for op in function.get_operations()
    )


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


def _refuse_gradient(op: tf.Operation, *gradients: Any) -> Any:
    """Raises an error, in place of the function that makes an op's gradient."""
    raise ValueError(
        f"{op.name} normalizes each device's examples by themselves, as batch_norm='device' asks "
        'for. After the model_fn has returned, it has no gradient. Call tf.gradients in the '
        'model_fn.'
    )
