"""The names of added ops.

They are in the outermost name scope of the user's op that they serve. TensorBoard draws a box for
each scope, so that a model looks as it does on one device, with the towers beside each other in
each box. For example, the copies of `dense/MatMul` are

    dense/replicate/tower_0/MatMul      dense/replicate/tower_1/MatMul
"""

from __future__ import annotations

import re
from typing import NamedTuple


class CopyName(NamedTuple):
    """A tower's copy of an op, by the tower's number and the op's name."""

    tower: int
    op_name: str


class Names:
    """Makes names, and tells what is named so.

    Args:
      word: what no scope of the user's is called, such as 'replicate'.
    """

    def __init__(self, word: str):
        self.word = word
        self._copy = re.compile(rf'((?:[^/]+/)?){word}/tower_(\d+)/(.+)')

    def added(self, op_name: str, name: str) -> str:
        """The name of something that is added for one of the user's ops."""
        scope, slash, _ = op_name.partition('/')
        return f'{scope}/{self.word}/{name}' if slash else f'{self.word}/{name}'

    def copy(self, op_name: str, tower: int) -> str:
        """The name of a tower's copy of an op."""
        rest = op_name.partition('/')[2] or op_name
        return self.added(op_name, f'tower_{tower}/{rest}')

    def copy_of(self, name: str) -> CopyName | None:
        """Which op's copy has a name, and in which tower; None if it's no copy's."""
        match = self._copy.fullmatch(name)
        if match is None:
            return None
        scope, tower, rest = match.groups()
        return CopyName(int(tower), f'{scope}{rest}')
