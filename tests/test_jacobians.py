"""Gradients of each row by itself, and what goes forwards: several devices do as one."""

import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from models import away_from_0, batches, spec_of, step
from towers import compare, train


def variables():
    w = tf.get_variable('w', [3, 4], use_resource=True)
    v = tf.get_variable('v', [4, 1], use_resource=True)
    return [w, v]


def square(features, labels, own):
    return tf.square(tf.matmul(tf.nn.tanh(tf.matmul(features, own[0])), own[1]) - labels)


def clipped_by_row(**options):
    """The gradient of each row is clipped, over all variables, as for differential privacy."""

    def model_fn(features, labels, mode):
        own = variables()
        with tf.GradientTape() as tape:
            losses = square(features, labels, own)[:, 0]
        grads = tape.jacobian(losses, own, **options)
        norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g), [1, 2]) for g in grads]))
        factors = 1.0 / tf.maximum(norms, 1.0)
        clipped = [tf.reduce_mean(g * factors[:, None, None], 0) for g in grads]
        optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
        train_op = optimizer.apply_gradients(zip(clipped, own), step())
        return spec_of(mode, tf.reduce_mean(losses), train_op)

    return model_fn


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('rows', [12, 7, 2], ids='rows={}'.format)
def test_gradients_of_rows(rows, static):
    data = [(x[:rows], y[:rows]) for x, y in away_from_0()[:4]]
    compare(clipped_by_row(), data, 3, static=static)


def test_gradients_of_rows_in_a_loop(behavior):
    compare(clipped_by_row(experimental_use_pfor=False), away_from_0()[:4], 3)


def of_outputs(features, labels, mode):
    """Rows of two values, and a jacobian of what doesn't depend on the batch."""
    own = variables()
    with tf.GradientTape(persistent=True) as tape:
        losses = square(features, labels, own)
        both = tf.concat([losses, 2.0 * losses], 1)
        weights = tf.square(own[1][:, 0])
    [by_row] = tape.jacobian(both, own[:1])
    [decay] = tape.jacobian(weights, own[1:])
    grads = [tf.reduce_mean(by_row, [0, 1]), tf.reduce_sum(decay, 0)]
    loss = tf.reduce_mean(losses)
    with tf.control_dependencies([loss]):  # It's of the values before the step.
        train_op = tf.train.AdamOptimizer(0.01).apply_gradients(zip(grads, own), step())
    return spec_of(mode, loss, train_op)


@pytest.mark.parametrize('towers', [2, 4], ids='towers={}'.format)
def test_jacobians_of_several_outputs(towers):
    compare(of_outputs, away_from_0()[:4], towers)


def test_a_jacobian_without_rows_is_an_error():
    def model_fn(features, labels, mode):
        own = variables()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(square(features, labels, own))
        grads = tape.jacobian(loss, own)
        train_op = tf.train.GradientDescentOptimizer(0.1).apply_gradients(zip(grads, own), step())
        return spec_of(mode, loss, train_op)

    original = tf.GradientTape.jacobian
    with pytest.raises(ValueError, match=r"jacobian\(\) of 'Mean:0'.*one row an example.*gradient"):
        train(model_fn, batches(steps=1), 2)
    assert tf.GradientTape.jacobian is original
    train(model_fn, batches(steps=1), 0)


def test_hessians_are_an_error():
    def model_fn(features, labels, mode):
        own = variables()
        loss = tf.reduce_mean(square(features, labels, own))
        return spec_of(mode, loss, tf.group(*tf.hessians(loss, own)))

    with pytest.raises(ValueError, match=r'tf.hessians.*replicate\(devices=1\)'):
        train(model_fn, batches(steps=1), 2)


def forwards(features, labels, mode):
    """A derivative in a direction is a term of the loss; it's the mean of the rows' derivatives."""
    own = variables()
    with tf2.autodiff.ForwardAccumulator(own[0], 0.1 * tf.ones_like(own[0])) as accumulator:
        loss = tf.reduce_mean(square(features, labels, own))
    loss += accumulator.jvp(loss)
    return spec_of(mode, loss, tf.train.AdamOptimizer(0.01).minimize(loss, step()))


@pytest.mark.parametrize('rows', [12, 7], ids='rows={}'.format)
def test_forward_accumulators(rows, caplog):
    compare(forwards, [(x[:rows], y[:rows]) for x, y in away_from_0()[:4]], 3)
    assert 'averaged, weighted by their rows' in caplog.text
