"""Gates of gradients, which copies can do without.

Where an op has several gradients, `tf.gradients` makes each wait for all of them, by `tf.tuple`:
two or three ops more for each op of the model. With v1 variables, that keeps one gradient from
using a variable that another has changed already. Resource variables don't change in use.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing

_V1_VARIABLES = frozenset(['Variable', 'VariableV2'])


class Gates:
    """Tells the gates of a graph from other ops.

    Args:
      graph: the graph.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._looked_at = 0
        self._needed = False
        # Whether ops come after others anyway, by the names of both.
        self._after: dict[tuple[str, frozenset[str]], bool] = {}

    def look(self) -> None:
        """Looks whether there are variables among the ops that are new since the last call."""
        ops = self._graph.get_operations()
        self._needed |= any(op.type in _V1_VARIABLES for op in ops[self._looked_at :])
        self._looked_at = len(ops)

    def can_go(self, op: tf.Operation) -> bool:
        """Whether an op does no more than to hand its input on later."""
        if self._needed or op.type != 'Identity' or private.in_control_flow(op):
            return False
        gates = op.control_inputs
        if len(gates) != 1 or gates[0].type != 'NoOp':
            return False
        members: list[tf.Operation] = []
        others = set()
        for member in gates[0].control_inputs:
            # There's one more for each device, if the gradients are on several.
            inner = member.control_inputs if member.type == 'NoOp' else [member]
            if inner and all(sharing.is_pure(op) and op.outputs for op in inner):
                members += inner
            else:
                others.add(member.name)
        source = op.inputs[0].op
        return source in members and self._comes_after(source, frozenset(others))

    def _comes_after(self, op: tf.Operation, others: frozenset[str]) -> bool:
        """Whether an op waits for others: moving averages' updates, say, as all gradients do."""
        if not others:
            return True
        users: dict[str, str | None] = {op.name: None}
        waiting = [op]
        while waiting:
            op = waiting.pop()
            known = self._after.get((op.name, others))
            if known is None and others <= {control.name for control in op.control_inputs}:
                known = True
            if known:
                name: str | None = op.name
                while name is not None:
                    self._after[name, others] = True
                    name = users[name]
                return True
            if known is None:
                for tensor in op.inputs:
                    if tensor.op.name not in users:
                        users[tensor.op.name] = op.name
                        waiting.append(tensor.op)
        self._after.update({(name, others): False for name in users})
        return False
