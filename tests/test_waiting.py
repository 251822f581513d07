"""No tower waits for another but for sums that the model itself asks for."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import models
import towers


def clipped(loss):
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    grads, variables = zip(*optimizer.compute_gradients(loss))
    grads, _ = tf.clip_by_global_norm(grads, 0.5)
    return optimizer.apply_gradients(zip(grads, variables), models.step())


def model_fn(features, labels, mode):
    loss = tf.reduce_mean(tf.square(models.predict(features) - labels))
    return models.spec_of(mode, loss, clipped(loss))


CASES = {
    'mean, static': (model_fn, True),
    'mean, dynamic': (model_fn, False),
    'tf.losses, dynamic': (models.regression(clipped), False),
}


@pytest.mark.parametrize('of, static', CASES.values(), ids=CASES)
def test_towers_wait_for_no_other(of, static):
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        rows = 12 if static else None
        x, y = tf.placeholder(tf.float32, [rows, 3]), tf.placeholder(tf.float32, [rows, 1])
        estimator_mgpu.replicate(of, devices=3)(features=x, labels=y, mode=towers.TRAIN)
        own = [op for op in graph.get_operations() if 'tower_0/' in op.name]
        # How many losses there are is asked for, too, but is known before any of them.
        stack = [op for op in own if op.type in ('MatMul', 'Tanh', 'TanhGrad')]
        assert len(stack) == 8
        behind = set(stack)
        while stack:
            op = stack.pop()
            after = {user for t in op.outputs for user in t.consumers()} | set(op._control_outputs)
            stack += after - behind
            behind |= after
        waiting = [op.name for op in behind if 'tower_1/' in op.name]
        assert not waiting
        # Each gradient is scaled once, after the sum, and summed where its variable is.
        assert not [op.name for op in own if 'clip_by_global_norm' in op.name]
