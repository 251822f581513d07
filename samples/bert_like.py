"""Trains a small transformer on several devices: from which package is this line of Python?

    python samples/bert_like.py --devices=2

The training code is like BERT's. It has an optimizer of its own, whose weight decay isn't part of
the loss. The learning rate warms up and then falls. Gradients come from tf.gradients and are
clipped by their global norm. The lines of Python come from nine packages of the standard library.
At the end, the sample prints some lines that the model hasn't seen, each with the package that it
predicts.
"""

from __future__ import annotations

import collections
import itertools
import re

import common
import numpy as np
import python_source
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.DEFINE_integer('batch_size', 128, 'Examples in a global batch.', lower_bound=1)
flags.DEFINE_integer(
    'train_steps', 800, 'Total steps to train, those of earlier runs included.', lower_bound=1
)
flags.DEFINE_integer(
    'warmup_steps', 80, 'Steps during which the learning rate grows.', lower_bound=1
)
flags.DEFINE_float('learning_rate', 0.002, 'Learning rate after the warm-up.')
flags.DEFINE_integer('hidden', 64, 'Size of the vector for each token.', lower_bound=1)
flags.DEFINE_integer('layers', 2, 'Number of layers of the transformer.', lower_bound=1)

PACKAGES = ['asyncio', 'email', 'http', 'importlib', 'logging', 'multiprocessing']
PACKAGES += ['unittest', 'urllib', 'xml']
TOKENS = 4000  # How many tokens there are, the three below among them.
PADDING, CLASSIFY, UNKNOWN = range(3)
LENGTH = 24  # Tokens of a row. The first is CLASSIFY, and the answer is read off it.
HEADS = 4
SHOWN = 10  # Lines whose package is told at the end.


class AdamWeightDecay(tf.train.Optimizer):
    """Adam, with weights that also shrink by themselves, biases and norms apart.

    The decay is no L2 loss, as Adam would divide that by the gradient's size, too.
    """

    def __init__(self, learning_rate, decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-6):
        super().__init__(use_locking=False, name='AdamWeightDecay')
        self._rate, self._decay, self._epsilon = learning_rate, decay, epsilon
        self._beta1, self._beta2 = beta1, beta2

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        zeros = tf.zeros_initializer()
        updates = []
        for gradient, variable in grads_and_vars:
            path = variable.op.name
            gradient = tf.convert_to_tensor(gradient)
            mean, square = (
                tf.get_variable(name, variable.shape, initializer=zeros, trainable=False)
                for name in (f'{path}/adam_m', f'{path}/adam_v')
            )
            next_mean = self._beta1 * mean + (1 - self._beta1) * gradient
            next_square = self._beta2 * square + (1 - self._beta2) * tf.square(gradient)
            change = next_mean / (tf.sqrt(next_square) + self._epsilon)
            if not re.search('bias|norm', path):
                change += self._decay * variable
            updates += [
                mean.assign(next_mean),
                square.assign(next_square),
                variable.assign_sub(self._rate * change),
            ]
        if global_step is None:
            return tf.group(*updates, name=name)
        with tf.control_dependencies(updates):  # What reads it in this step reads it before.
            return tf.group(global_step.assign_add(1), name=name)


def dense(name, inputs, units):
    with tf.variable_scope(name):
        start = tf.truncated_normal_initializer(stddev=0.05)
        kernel = tf.get_variable('kernel', [inputs.shape[-1], units], initializer=start)
        bias = tf.get_variable('bias', [units], initializer=tf.zeros_initializer())
    return tf.tensordot(inputs, kernel, 1) + bias


def norm(name, inputs):
    """Gives what stands for each token mean 0 and variance 1, then a scale and an offset."""
    with tf.variable_scope(name):
        scale = tf.get_variable('norm_scale', [inputs.shape[-1]], initializer=tf.ones_initializer())
        bias = tf.get_variable('bias', [inputs.shape[-1]], initializer=tf.zeros_initializer())
    mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
    return (inputs - mean) * tf.rsqrt(variance + 1e-6) * scale + bias


def attention(inputs, mask):
    """Lets every token look at every other one, in several ways at once."""
    size = inputs.shape[-1] // HEADS

    def heads(name):
        split = tf.reshape(dense(name, inputs, HEADS * size), [-1, LENGTH, HEADS, size])
        return tf.transpose(split, [0, 2, 1, 3])

    scores = tf.matmul(heads('query'), heads('key'), transpose_b=True) / float(size) ** 0.5
    scores += -1e4 * (1 - mask[:, tf.newaxis, tf.newaxis, :])
    seen = tf.transpose(tf.nn.softmax(scores) @ heads('value'), [0, 2, 1, 3])
    return dense('output', tf.reshape(seen, [-1, LENGTH, HEADS * size]), inputs.shape[-1])


def transformer(tokens, hidden, layers, dropout):
    """Returns what stands for each row."""
    start = tf.truncated_normal_initializer(stddev=0.05)
    table = tf.get_variable('tokens', [TOKENS, hidden], initializer=start)
    positions = tf.get_variable('positions', [LENGTH, hidden], initializer=start)
    mask = tf.cast(tf.not_equal(tokens, PADDING), tf.float32)
    net = norm('start', tf.gather(table, tokens) + positions)
    for layer in range(layers):
        with tf.variable_scope(f'layer{layer}'):
            net = norm('attended', net + tf.nn.dropout(attention(net, mask), rate=dropout))
            wide = dense('wide', net, 4 * hidden)
            wide *= (1 + tf.erf(wide / 2**0.5)) / 2  # GELU
            net = norm('end', net + tf.nn.dropout(dense('narrow', wide, hidden), rate=dropout))
    return tf.tanh(dense('pooled', net[:, 0], hidden))


def model_fn(features, labels, mode, params):
    """An ordinary model_fn: nothing in it knows of devices."""
    training = mode == estimator.ModeKeys.TRAIN
    dropout = 0.1 if training else 0.0
    net = transformer(features, params['hidden'], params['layers'], dropout)
    logits = dense('logits', net, len(PACKAGES))
    packages = tf.argmax(logits, axis=1)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={'package': packages})

    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = None
    if training:
        step = tf.train.get_global_step()
        done = tf.cast(step, tf.float32)
        warming = done / params['warmup_steps']
        falling = tf.maximum(0.0, 1 - done / params['train_steps'])
        rate = params['learning_rate'] * tf.minimum(warming, falling)
        variables = tf.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
        train_op = AdamWeightDecay(rate).apply_gradients(zip(gradients, variables), step)
    accuracy = {'accuracy': tf.metrics.accuracy(labels, packages)}
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=accuracy)


def encode(lines, vocabulary):
    """Returns tokens and packages of lines."""
    rows = np.full([len(lines), LENGTH], PADDING, 'int32')
    for row, (line, _) in zip(rows, lines):
        words = python_source.words(line)
        tokens = [CLASSIFY, *(vocabulary.get(word, UNKNOWN) for word in words)][:LENGTH]
        row[: len(tokens)] = tokens
    return rows, np.array([package for _, package in lines], 'int32')


def main(argv):
    common.start(argv)
    lines = python_source.lines(PACKAGES)
    test_lines, train_lines = lines[: len(lines) // 10], lines[len(lines) // 10 :]
    words = itertools.chain.from_iterable(python_source.words(line) for line, _ in train_lines)
    frequent = collections.Counter(words).most_common(TOKENS - 3)
    vocabulary = {word: token for token, (word, _) in enumerate(frequent, start=3)}
    train, test = encode(train_lines, vocabulary), encode(test_lines, vocabulary)

    def train_input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(train)
        return dataset.shuffle(len(train[1]), seed=FLAGS.seed).repeat().batch(FLAGS.batch_size)

    def test_input_fn():
        return tf.data.Dataset.from_tensor_slices(test).batch(FLAGS.batch_size)

    classifier = estimator_mgpu.Estimator(
        model_fn,
        FLAGS.model_dir,
        config=estimator.RunConfig(tf_random_seed=FLAGS.seed),
        params=FLAGS.flag_values_dict(),
        devices=common.devices(),
    )
    progress = estimator_mgpu.ProgressHook(max_steps=FLAGS.train_steps)
    classifier.train(train_input_fn, [progress], max_steps=FLAGS.train_steps)
    result = classifier.evaluate(test_input_fn)

    answers = classifier.predict(test_input_fn)
    for (line, package), answer in zip(test_lines[:SHOWN], answers):
        right = '' if answer['package'] == package else ' (wrong)'
        print(f'{PACKAGES[answer["package"]] + right:24} {line[:75]}')
    most = np.bincount(test[1]).max() / len(test[1])
    print(
        f'accuracy {result["accuracy"]:.4f} on {len(test[1])} held-out lines of {len(PACKAGES)} '
        f'packages, {most:.4f} of them from the most frequent package '
        f'(devices={common.devices()}, {result["global_step"]} steps)'
    )


if __name__ == '__main__':
    app.run(main)
