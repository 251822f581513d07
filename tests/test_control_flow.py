"""Loops, branches and functions of both TensorFlows: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes
from towers import compare_modes


def map_rows(features):
    w = tf.get_variable('w', [3, 4])
    return tf.layers.dense(
        tf.map_fn(lambda row: tf.nn.tanh(tf.matmul(row[None], w)[0]), features), 1
    )


MODELS = [map_rows]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
