"""What the log says of a model: how its losses are understood, and what may be meant otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow.compat.v1 as tf

from estimator_mgpu import backward, losses, mixing, powers, shard_values
from estimator_mgpu.findings import find
from estimator_mgpu.rows import Rows
from estimator_mgpu.walks import walk

_OTHERS = (
    'In what %r comes from, rows are combined with other rows of their shard, or taken by their '
    'place in it, by %s. Each device has its own shard, so that this may not be what one device '
    'gives. Let the input_fn put into one row what belongs together, or run this model with '
    'replicate(devices=1).'
)
_VALUES = (
    'In what %r comes from, rows are combined with values of all rows of their shard, as batch '
    'normalization does, by %s. Each device has its own shard, so that this may not be what one '
    'device gives. Combine them in the input_fn, or run this model with replicate(devices=1).'
)
_NORMS = "In what %r comes from, batch normalization takes each device's own statistics: %s."
_BACKWARD = (
    'In the gradient of %r, what all rows of a shard have is combined, as a custom gradient that '
    'clips does, by %s. Each device has its own shard, so that this may not be what one device '
    'gives. Clip what compute_gradients() or tf.gradients() returns, which is of the whole batch, '
    'or train with replicate(devices=1).'
)
_LOOPS = (
    'In what %r comes from, a loop that the rows of its shard end gives an entry for each round: '
    '%s. Other devices have more of these, or fewer, than one device has for the batch. Let it run '
    'while ~tf.reduce_all(finished), by control flow v2 (tf.enable_control_flow_v2()), and outside '
    'of functions; or a fixed number of rounds; or run this model with replicate(devices=1).'
)
_ENDS = (
    'In what %r comes from, a loop runs until all rows are finished at once, which each round '
    'computes anew: %s. Where a row that was finished goes on later, this may end before it would '
    'on one device. Keep rows finished, by finished = tf.logical_or(finished, ended); let it run '
    'a fixed number of rounds; or run this model with replicate(devices=1).'
)
_TAPE = (
    'A GradientTape was asked for the gradient of what comes from a loop that runs until all rows '
    'are finished. On several devices that is what tf.gradients gives, for which what was computed '
    'outside of the tape counts, too: stop that by tf.stop_gradient().'
)
_PYTHON = 'In what %r comes from, Python functions are called with the rows of one shard each: %s.'


class Notices:
    """Says each thing once for a model_fn's call."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._seen: set[str] = set()  # Ops of which everything was told.
        # Whether rows were found to be combined. If so, their gradients are, too.
        self._combined = False

    def loss(self, name: str, parts: losses.Parts) -> None:
        """Tells what a loss consists of, and warns of what the graph doesn't tell for certain."""
        if not self._is_new(name):
            return
        for sentence in [*parts.doubts, *parts.notes]:
            tf.logging.warning('%s', sentence)
        self._combined |= bool(parts.doubts)
        self._told.update([parts.neither, *(mixed for mixed, _ in parts.mixed)])
        for leaf in parts.leaves:
            tf.logging.info(
                "Loss %r: the towers' %r is taken for a %s over rows.",
                name,
                leaf.tensor.name,
                leaf.kind,
            )

    def off_tape(self) -> None:
        """Warns of what a GradientTape can't leave out."""
        if self._is_new('tape'):
            tf.logging.warning('%s', _TAPE)

    def reshapes(self, rows: Rows, towers: int) -> None:
        """Warns of rows of a shard that are given the shape of those of the whole batch."""
        size = (rows.static or 0) * towers
        for op in rows.reshaped_to(size) if size else ():
            if self._is_new(op.name):
                tf.logging.warning(
                    '%r (%s) gives the %d rows of a shard a shape of %d, which is the size of the '
                    "whole batch. If that's what it's meant to be, each row is cut up: take -1 or "
                    'tf.shape(features)[0] instead.',
                    op.name,
                    op.type,
                    rows.static,
                    size,
                )

    def mixed(self, parts: losses.Parts) -> None:
        """Warns of rows that are combined with values of all rows of their shard."""
        for mixed, sentence in parts.mixed:
            if self._is_new(mixed):
                tf.logging.warning('%s', sentence)

    def values(self, rows: Rows, value: tf.Tensor) -> None:
        """Warns of rows, predicted or scattered, combined with values of all of their shard."""
        _, mixed, _ = shard_values.near_reduction([value], rows)
        scale = powers.scales(rows).get(value.name)
        mixed = mixed if scale is None else scale.by
        if mixed is not None and self._is_new(mixed.name):
            tf.logging.warning(
                'The rows of %r are combined with %r, which is a value of all rows of a shard, '
                'and each device has its own. Run this model with replicate(devices=1).',
                value.name,
                mixed.name,
            )

    def mixing(self, rows: Rows, value: tf.Tensor) -> None:
        """Warns of what a value comes from that gives rows something of others of their shard."""
        ops = list(walk([value.op], lambda op: mixing.before(op, rows), without=self._seen))
        self._seen.update(op.name for op in ops)
        self._segments(ops, rows)
        numbered = [f'{op.name!r} ({op.type})' for op in mixing.numbered(value, rows)]
        found = find(ops, rows, certain=True)
        self._combined |= bool(found.others or found.values or found.norms)
        values, norms = (
            [op for op, of_shard in of.items() if of_shard not in self._told]
            for of in (found.values, found.norms)
        )
        self._tell(tf.logging.warning, _OTHERS, value, numbered + found.others)
        self._tell(tf.logging.warning, _VALUES, value, values)
        self._tell(tf.logging.warning, _LOOPS, value, found.loops)
        self._tell(tf.logging.warning, _ENDS, value, found.ends)
        self._tell(tf.logging.info, _NORMS, value, norms)
        self._tell(tf.logging.info, _PYTHON, value, found.python)

    def gradients(
        self, loss: tf.Tensor, rows: Rows, gradients: list[tf.Tensor], first: int
    ) -> None:
        """Warns of gradients of a user's own that don't add up to the whole batch's.

        Args:
          loss: a tensor of tower 0.
          rows: which tensors have rows.
          gradients: tower 0's.
          first: the place of the first op that was made for them among the graph's.
        """
        if not self._combined:
            made = {op.name for op in loss.graph.get_operations()[first:]}
            found = backward.combining(gradients, rows, made)
            self._tell(tf.logging.warning, _BACKWARD, loss, found)

    def _tell(
        self, log: Callable[..., None], sentence: str, value: tf.Tensor, found: Iterable[str]
    ) -> None:
        new = list(filter(self._is_new, found))
        if new:
            more = f' and {len(new) - 3} more' if len(new) > 3 else ''
            log(sentence, value.name, ', '.join(new[:3]) + more)

    def _segments(self, ops: Iterable[tf.Operation], rows: Rows) -> None:
        for op in ops:
            if rows.sums_into_rows(op) and self._is_new(op.name):
                tf.logging.warning(
                    '%r (%s) sums rows up into %d segments, which is also the number of rows of a '
                    'shard, so the segments are taken for rows. If there are as many with any '
                    'batch, take another batch size, or run this model with replicate(devices=1).',
                    op.name,
                    op.type,
                    rows.static,
                )

    def unknown_shapes(self, rows: Rows, value: tf.Tensor) -> None:
        """Warns of Python functions' results that a value comes from, if they may have no rows."""
        for op in rows.assumed(value):
            if self._is_new(op.name):
                tf.logging.warning(
                    'The shape of what %r (%s) gives is not known, so it is taken to have one row '
                    "an example. Say that it has, by its set_shape([None]) or the like. If it's a "
                    'value of the batch, each shard has its own: say set_shape([]).',
                    op.name,
                    op.type,
                )

    def _is_new(self, name: str) -> bool:
        new = name not in self._told
        self._told.add(name)
        return new
