"""Ops that draw random numbers.

Without a seed, any numbers of the distribution are as good as others, so each tower draws those of
its shard. With a seed, the numbers are those that one device draws: the op runs once, for the
global batch, and towers are given slices. So the mask of seeded dropout is drawn once.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.notation import NotSharded, table
from estimator_mgpu.partition.size_inference import Sizes


def _unseeded(op: tf.Operation, sizes: Sizes) -> str:
    if op.get_attr('seed') or op.get_attr('seed2'):
        raise NotSharded
    return '#S -> S'


RULES = table({'RandomStandardNormal RandomUniform TruncatedNormal': _unseeded})
