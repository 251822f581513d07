"""Rules of ops that have an input or an attribute which says along which axes they work."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.notation import (
    Rule,
    Signature,
    parse,
    rank,
    require,
    word,
)
from estimator_mgpu.partition.size_inference import Sizes


def axes_of(op: tf.Operation, source: int | str, sizes: Sizes, count: int) -> list[int]:
    """The axes that an op works along, from 0: -1 is the last of `count`.

    Args:
      op: the op.
      source: which input or which attribute has them; one or several.
      sizes: of the op's tensors.
      count: the number of dimensions.

    Raises:
      NotSharded: if they aren't known before the step runs.
    """
    if isinstance(source, str):
        numbers = op.get_attr(source)
    else:
        numbers = require(sizes.numbers(op.inputs[source]))
    if not count:
        return []
    return sorted({number % count for number in np.ravel(numbers).tolist()})


def along_axes(source: int | str, text: str) -> Rule:
    """A rule for ops that can be sharded along all dimensions but the axes that they work along.

    For example, `Cumsum` has `along_axes(1, 'all * -> all')`: its axis is input 1, and with axis 1
    of a matrix, that is 'a_ * -> a_'. `ExpandDims` has `along_axes(1, 'left * -> all')`: the output
    has a dimension more, so with axis 1 it's 'ac * -> a_c'.

    Args:
      source: which input or which attribute has the axes.
      text: as in `notation`, but with `all` for a word with all dimensions, the axes among them,
        and `left` for a word without the axes.
    """
    # The first of these words is that of an input, which tells the number of dimensions.
    names = [one.strip('+') for one in text.split()]
    index = min(names.index(name) for name in ('all', 'left') if name in names)

    def rule(op: tf.Operation, sizes: Sizes) -> Signature:
        count = rank(op.inputs[index], sizes)
        if names[index] == 'left':
            count += 1
        every = word(count, axes_of(op, source, sizes, count))
        left = every.replace('_', '') or '*'
        signature = parse(text.replace('all', every).replace('left', left)).signature(op, sizes)
        if names[index] == names[-1] == 'all':  # The output has the shape of the input.
            signature = signature._replace(dims=[sizes.dims(op.inputs[index])])
        return signature

    return rule
