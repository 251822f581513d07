"""Ops that give what they are given: towers have no copies of them, and who fetches one has it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, sgd, spec_of, weights
from towers import NAMES

X, Y = floats(7, 3), floats(7, 1)

NEEDLESS = 'same', 'gradients/net_grad/Sum', 'gradients/net_grad/Reshape'
NEEDED = 'net', 'folded', 'gradients/MatMul_grad/MatMul_1'


def model_fn(features, labels, mode):
    """Gradients of `net` are summed over no dimension, as the size of the batch is dynamic."""
    net = tf.add(tf.matmul(features, weights('w', 3, 3)), features, name='net')
    same = tf.reshape(net, tf.shape(features), name='same')
    folded = tf.reduce_sum(same, 1, keepdims=True, name='folded')
    loss = tf.reduce_mean(tf.square(folded - labels) * same)
    return spec_of(mode, loss, sgd(loss))


def run(devices, microbatches=1):
    """Returns the names of all ops, and what a step gives of some, and of the loss."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        batch = [tf.placeholder_with_default(array, [None, array.shape[1]]) for array in (X, Y)]
        replicated = estimator_mgpu.replicate(model_fn, devices=devices, microbatches=microbatches)
        spec = replicated(*batch, mode='train')
        names = [op.name for op in graph.get_operations()]
        fetched = [f'{name}:0' for name in (*NEEDLESS, *NEEDED)]
        with tf.Session(config=estimator_mgpu.session_config(2)) as session:
            session.run(tf.global_variables_initializer())
            return names, session.run([*fetched, spec.loss])


@pytest.mark.core
@pytest.mark.parametrize('devices, microbatches', [(2, 1), (1, 2)], ids=['2x1', '1x2'])
def test_they_have_no_copies(devices, microbatches, behavior):
    names, ours = run(devices, microbatches)
    _, of_one_device = run(1)
    for value, expected in zip(ours, of_one_device):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)

    assert not {name for name in NEEDLESS if NAMES.copy(name, 1) in names}
    assert not {name for name in NEEDED if NAMES.copy(name, 1) not in names}
