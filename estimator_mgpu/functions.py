"""A tower's own copies of the functions that its ops call.

v2 loops and branches and `tf.function`s keep their ops in functions, which all of a graph's ops
share. A function gets a copy for a tower where its body draws random numbers from a fixed seed
(the towers would draw the same), writes to a variable (which happens once, in tower 0), calls a
Python function (which keeps a tape for its gradient) or colocates ops with one that isn't in it (as
gradients of loops do, which would colocate those of all towers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing


def reseed(node: tf.NodeDef, tower: int) -> None:
    """Gives a random op of a tower a seed of its own, the same in every run."""
    if 'seed' in node.attr and 'seed2' in node.attr:
        seed, seed2 = node.attr['seed'].i, node.attr['seed2'].i
        if tower and (seed or seed2):
            # Weyl's sequence of the golden ratio spreads neighbouring numbers far apart.
            node.attr['seed2'].i = (seed2 + tower * 0x9E3779B1) % (2**31 - 1) or tower


def called(node: tf.NodeDef) -> list[Any]:
    """Returns the references to functions in a node."""
    return [
        func
        for attr in node.attr.values()
        for func in ([attr.func] if attr.HasField('func') else attr.list.func)
    ]


class Library:
    """A graph's functions, by name."""

    def __init__(self, graph: tf.Graph):
        self.graph = graph
        self._functions: dict[str, Any] = {}
        self._uses: dict[str, tuple[set[int], set[int]]] = {}

    def get(self, name: str) -> Any:
        """Returns the `FunctionDef` of that name, or None where the graph has no such function."""
        if name not in self._functions:
            library = self.graph.as_graph_def().library
            self._functions.update((f.signature.name, f) for f in library.function)
        return self._functions.get(name)

    def writes(self, node: tf.NodeDef) -> bool:
        """Whether the functions that a node calls write to variables."""
        return any(sharing.is_write_type(inner.op) for inner in self.nodes(node))

    def nodes(self, node: tf.NodeDef) -> Iterator[tf.NodeDef]:
        """Lists the nodes of the functions that a node calls, and of those that they call."""
        waiting, seen = called(node), set()
        while waiting:
            name = waiting.pop().name
            if name not in seen:
                seen.add(name)
                for inner in self.get(name).node_def if self.get(name) else ():
                    yield inner
                    waiting += called(inner)

    def gives_written(self, node: tf.NodeDef) -> bool:
        """Whether results of a function that a node calls come from variables that it writes."""
        for name in (func.name for func in called(node)):
            function = self.get(name)
            nodes = {inner.name: inner for inner in function.node_def}
            waiting, reached = list(function.ret.values()), set()
            while waiting:
                source = waiting.pop().split(':')[0]
                if source[0] != '^' and source not in reached:
                    reached.add(source)
                    waiting += nodes[source].input if source in nodes else []
            written, _ = self._uses_of_arguments(name)
            if any(function.signature.input_arg[i].name in reached for i in written):
                return True
        return False

    def uses(self, node: tf.NodeDef) -> tuple[set[int], set[int]]:
        """Returns which inputs of a node are written to, as variables, and which are read."""
        written: set[int] = set()
        read: set[int] = set()
        names = [func.name for func in called(node)] or [node.op]
        functions = [name for name in names if self.get(name) is not None]
        count = sum(name[0] != '^' for name in node.input)
        if not functions:
            (written if sharing.is_write_type(node.op) else read).update(range(count))
        for name in functions:
            # A branch is given all inputs but the first, which says which one it is.
            first = count - len(self.get(name).signature.input_arg)
            for uses, found in zip(self._uses_of_arguments(name), (written, read)):
                found.update(first + i for i in uses)
        return written, read

    def _uses_of_arguments(self, name: str) -> tuple[set[int], set[int]]:
        if name not in self._uses:
            self._uses[name] = set(), set()  # For a function that calls itself.
            function = self.get(name)
            places = {arg.name: i for i, arg in enumerate(function.signature.input_arg)}
            for node in function.node_def:
                given = [name for name in node.input if name[0] != '^']
                for uses, found in zip(self.uses(node), self._uses[name]):
                    found.update(places[given[i]] for i in uses if given[i] in places)
        return self._uses[name]


class TowerFunctions:
    """The functions of one tower, copied as they're needed.

    Args:
      tower: the tower's number.
    """

    def __init__(self, tower: int):
        self._tower = tower
        self._names: dict[tuple[str, bool], str] = {}
        self._new: list[Any] = []
        self._tokens: dict[bytes, bytes] = {}  # of Python functions, by tower 0's

    def adapt(self, node: tf.NodeDef, library: Library, writes: bool = False) -> None:
        """Makes a node call the tower's own functions, where those differ.

        Args:
          node: a call of functions.
          library: the graph's functions.
          writes: whether this tower, too, is to write to variables in them.
        """
        for func in called(node):
            func.name = self._own(func.name, library, writes)
        if node.op == 'EagerPyFunc':
            node.attr['token'].s = self._token(node.attr['token'].s, library.graph)

    def take_new(self) -> list[Any]:
        """Returns the `FunctionDef`s that were made since the last call."""
        new, self._new = self._new, []
        return new

    def _token(self, token: bytes, graph: tf.Graph) -> bytes:
        if token not in self._tokens:
            self._tokens[token] = private.own_python_function(
                token, graph, lambda forward: self._token(forward, graph)
            )
        return self._tokens[token]

    def _own(self, name: str, library: Library, writes: bool) -> str:
        key = (name, writes)
        if key not in self._names:
            self._names[key] = name  # A function that calls itself, and the common case.
            original = library.get(name)
            if original is not None:
                own = type(original)()
                own.CopyFrom(original)
                self._change(own, library, writes)
                if own != original:
                    suffix = f'tower_{self._tower}' + ('_writes' if writes else '')
                    own.signature.name = f'{name}_{suffix}'
                    self._names[key] = own.signature.name
                    self._new.append(own)
        return self._names[key]

    def _change(self, function: Any, library: Library, writes: bool) -> None:
        names = {f'loc:@{node.name}'.encode() for node in function.node_def}
        for node in function.node_def:
            reseed(node, self._tower)
            self.adapt(node, library, writes)
            if not names.issuperset(node.attr['_class'].list.s if '_class' in node.attr else ()):
                del node.attr['_class']
        if not writes:
            _drop_writes(function)


def _drop_writes(function: Any) -> None:
    """Takes the writes to variables out of a function."""
    outputs = {t.split(':')[0] for node in function.node_def for t in node.input if t[0] != '^'}
    outputs |= {t.split(':')[0] for t in function.ret.values()}
    writes = {
        node.name
        for node in function.node_def
        if sharing.is_write_type(node.op) and node.name not in outputs
    }
    if not writes:
        return
    kept = [node for node in function.node_def if node.name not in writes]
    for node in kept:
        inputs = [t for t in node.input if t[0] != '^' or t[1:] not in writes]
        del node.input[:]
        node.input.extend(inputs)
    del function.node_def[:]
    function.node_def.extend(kept)
    for key in [key for key, name in function.control_ret.items() if name in writes]:
        del function.control_ret[key]
        function.signature.control_output.remove(key)
