"""Draws plan.png, of what `explain` says of a small model: `python docs/draw_plan.py`."""

import pathlib

import tensorflow.compat.v1 as tf

import estimator_mgpu

PATH = pathlib.Path(__file__).with_name('plan.png')
DEVICES = 4
EXAMPLES = 64


def dense(net, size, name):
    with tf.variable_scope(name):
        kernel = tf.get_variable('kernel', [net.shape[-1], size])
        bias = tf.get_variable('bias', [size], initializer=tf.zeros_initializer())
        return net @ kernel + bias


def model_fn(features, labels, mode):
    """Sorts one of its layers over all examples, which no device can do alone."""
    net = tf.nn.relu(dense(features, 256, 'first'))
    net = tf.nn.relu(dense(net, 256, 'second'))
    ranks = tf.sort(dense(net, 32, 'narrow'), axis=0, name='order')
    logits = dense(tf.concat([net, ranks], axis=1), 10, 'logits')
    with tf.name_scope('loss'):
        loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    batch = tf.zeros([EXAMPLES, 100]), tf.zeros([EXAMPLES], tf.int32)
    return tf.data.Dataset.from_tensors(batch)


if __name__ == '__main__':
    estimator = estimator_mgpu.Estimator(model_fn, devices=DEVICES)
    estimator.explain(input_fn).draw(str(PATH))
