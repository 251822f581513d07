"""The names of added ops.

They are in the outermost name scope of the user's op that they serve. TensorBoard draws a box for
each outermost scope, and sets those aside that are connected with many others. So it draws a model
as on one device; and within each box, the towers beside each other:

    dense/MatMul    =>    dense/replicate/tower_0/MatMul    dense/replicate/tower_1/MatMul
    Relu            =>    Relu/replicate/tower_0            Relu/replicate/tower_1

What serves many ops is in a scope of its own: packs of small tensors, and numbers of examples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow.compat.v1 as tf

_WORD = 'replicate'


class CopyName(NamedTuple):
    """What the name of a tower's copy of an op says: the tower's number, and the op's name."""

    tower: int
    op_name: str


class Names:
    """Makes names of added ops, and reads them.

    Args:
      word: a scope name that the user's graph doesn't have, such as 'replicate'.
    """

    def __init__(self, word: str):
        self.word = word
        self._copy = re.compile(rf'([^/]+)/{word}/tower_(\d+)(/.+)?')
        self._added = re.compile(rf'([^/]+/)?{word}/.+')

    def added(self, served: str, name: str) -> str:
        """The name of what is added for an op; '' if it serves many."""
        return f'{served.partition("/")[0]}/{self.word}/{name}' if served else f'{self.word}/{name}'

    def copy(self, op_name: str, tower: int) -> str:
        """The name of a tower's copy of an op, or of a frame."""
        scope, slash, rest = op_name.partition('/')
        return f'{scope}/{self.word}/tower_{tower}{slash}{rest}'

    def frame(self, name: str, tower: int, is_joint: bool) -> str:
        """The name of the frame of a tower's copy of a v1 loop; a joint loop has one for all."""
        return f'{self.word}/all_towers/{name}' if is_joint else self.copy(name, tower)

    def loop_of_frame(self, name: str) -> CopyName:
        """The tower and the v1 loop of a frame; a joint loop counts as the first tower's."""
        joint = name.removeprefix(f'{self.word}/all_towers/')
        return self.copy_of(name) or CopyName(0, joint)

    def result(self, op_name: str) -> str:
        """The name of what gives a user's op's value to a fetch, or to who waits for it."""
        return self.added(op_name, f'result_{op_name.rpartition("/")[2]}')

    def copy_of(self, name: str) -> CopyName | None:
        """What the name of a copy says; None if it's no copy's."""
        match = self._copy.fullmatch(name)
        if match is None:
            return None
        return CopyName(int(match[2]), f'{match[1]}{match[3] or ""}')

    def is_added(self, name: str) -> bool:
        """Whether it's the name of an added op, be it a copy or another one."""
        return self._added.fullmatch(name) is not None


def unused_word(ops: Iterable[tf.Operation]) -> str:
    """A word that none of the ops has as its scope, or as a scope in its outermost one."""
    used = {part for op in ops if _WORD in op.name for part in op.name.split('/')[:2]}
    word = _WORD
    count = 0
    while word in used:
        count += 1
        word = f'{_WORD}_{count}'
    return word
