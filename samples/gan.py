"""Trains a GAN on several devices to draw handwritten digits, from 1,797 real ones.

    python samples/gan.py --devices=2

The generator gets a digit and draws it. The discriminator gets a picture and a digit, and decides
whether the picture is real. Each has its own optimizer, and gets the gradient of the whole batch,
whatever the number of devices. The generator's drawings are saved to drawn.png, next to the
checkpoints. At the end, a classifier that was trained on real digits only tries to read them.
"""

from __future__ import annotations

import pathlib

import common
import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags
from matplotlib import image
from sklearn import datasets, neighbors

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.DEFINE_integer('batch_size', 128, 'Examples in a global batch.', lower_bound=1)
flags.DEFINE_integer('train_steps', 5000, 'Steps to train.', lower_bound=1)
flags.DEFINE_float('learning_rate', 0.001, 'Learning rate of both Adam optimizers.')

NOISE = 16  # How many random numbers a drawing starts from.
SIDE = 8  # Pictures are 8 by 8 pixels, from 0 to 1.


def dense(name, inputs, units, activation=tf.nn.leaky_relu):
    with tf.variable_scope(name):
        kernel = tf.get_variable('kernel', [inputs.shape[-1], units])
        bias = tf.get_variable('bias', [units], initializer=tf.zeros_initializer())
    return activation(inputs @ kernel + bias)


def generator(digits):
    """Returns a picture for each digit, another one each time."""
    noise = tf.random.normal([tf.shape(digits)[0], NOISE])
    with tf.variable_scope('generator', reuse=tf.AUTO_REUSE):
        net = tf.concat([noise, tf.one_hot(digits, 10)], axis=1)
        net = dense('hidden1', net, 128)
        net = dense('hidden2', net, 128)
        return tf.reshape(dense('pixels', net, SIDE * SIDE, tf.sigmoid), [-1, SIDE, SIDE])


def discriminator(pictures, digits):
    """Returns a number for each picture: the greater, the more it looks like a real one."""
    with tf.variable_scope('discriminator', reuse=tf.AUTO_REUSE):
        net = tf.reshape(pictures, [-1, SIDE * SIDE])
        net = tf.concat([net, tf.one_hot(digits, 10)], axis=1)
        net = tf.nn.dropout(dense('hidden1', net, 128), rate=0.3)
        net = tf.nn.dropout(dense('hidden2', net, 128), rate=0.3)
        return dense('logit', net, 1, tf.identity)


def model_fn(features, labels, mode, params):
    """An ordinary model_fn: nothing in it knows of devices."""
    digits = features['digit']
    drawn = generator(digits)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={'picture': drawn})

    on_real = discriminator(features['picture'], digits)
    on_drawn = discriminator(drawn, digits)
    right = tf.losses.sigmoid_cross_entropy
    # Real ones count as 0.9 only, so that the discriminator is never quite sure.
    discriminator_loss = right(0.9 * tf.ones_like(on_real), on_real)
    discriminator_loss += right(tf.zeros_like(on_drawn), on_drawn)
    generator_loss = right(tf.ones_like(on_drawn), on_drawn)

    updates = []
    for name, loss in (('discriminator', discriminator_loss), ('generator', generator_loss)):
        optimizer = tf.train.AdamOptimizer(params['learning_rate'], beta1=0.5, name=f'Adam_{name}')
        updates.append((optimizer, optimizer.compute_gradients(loss, tf.trainable_variables(name))))
    # Nothing is updated that a gradient still has to be computed with.
    with tf.control_dependencies([gradient for _, pairs in updates for gradient, _ in pairs]):
        steps = [optimizer.apply_gradients(pairs) for optimizer, pairs in updates]
    with tf.control_dependencies(steps):
        train_op = tf.assign_add(tf.train.get_global_step(), 1)
    return estimator.EstimatorSpec(
        mode, loss=discriminator_loss + generator_loss, train_op=train_op
    )


def main(argv):
    common.start(argv)
    real = datasets.load_digits()
    pictures, digits = (real.images / 16).astype('float32'), real.target.astype('int32')

    def train_input_fn():
        dataset = tf.data.Dataset.from_tensor_slices({'picture': pictures, 'digit': digits})
        return dataset.shuffle(len(digits), seed=FLAGS.seed).repeat().batch(FLAGS.batch_size)

    asked = np.repeat(np.arange(10, dtype='int32'), 10)  # Ten of each.

    def asked_input_fn():
        return tf.data.Dataset.from_tensor_slices({'digit': asked}).batch(FLAGS.batch_size)

    gan = estimator_mgpu.Estimator(
        model_fn,
        FLAGS.model_dir,
        config=estimator.RunConfig(tf_random_seed=FLAGS.seed),
        params={'learning_rate': FLAGS.learning_rate},
        devices=common.devices(),
    )
    progress = estimator_mgpu.ProgressHook(steps=FLAGS.train_steps)
    gan.train(train_input_fn, [progress], steps=FLAGS.train_steps)
    drawn = np.stack([prediction['picture'] for prediction in gan.predict(asked_input_fn)])

    # A grid of 10 by 10 pictures, each with a margin, and each pixel as 4 by 4 of the file's.
    framed = np.pad(drawn, [(0, 0), (1, 1), (1, 1)])
    grid = framed.reshape(10, 10, SIDE + 2, SIDE + 2).swapaxes(1, 2).reshape(10 * (SIDE + 2), -1)
    picture = pathlib.Path(gan.model_dir) / 'drawn.png'
    image.imsave(picture, np.kron(grid, np.ones([4, 4])), cmap='gray')
    print(f'Drawings, one row for each digit: {picture}')

    reader = neighbors.KNeighborsClassifier(3).fit(pictures.reshape(len(pictures), -1), digits)
    read = reader.predict(drawn.reshape(len(drawn), -1))
    print(
        f'{(read == asked).sum()} of {len(asked)} drawings are read as the digit that was asked '
        f'for (devices={common.devices()}, {gan.get_variable_value("global_step")} steps)'
    )


if __name__ == '__main__':
    app.run(main)
