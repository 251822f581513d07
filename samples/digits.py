"""Trains a convolutional network on several devices to recognize handwritten digits.

    python samples/digits.py --devices=2

If there is no GPU, --devices=2 means two logical CPU devices. The confusion matrix is drawn to
confusion.png, next to the checkpoints.
"""

from __future__ import annotations

import pathlib

import common
import matplotlib
import tensorflow.compat.v1 as tf
from absl import app, flags
from sklearn import datasets, metrics, model_selection

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)  # Its flags stand in --help, too.
flags.DEFINE_integer('batch_size', 64, 'Examples in a global batch.', lower_bound=1)
flags.DEFINE_integer('train_steps', 600, 'Steps to train.', lower_bound=1)
flags.DEFINE_float('learning_rate', 0.003, 'Learning rate of Adam.')


def model_fn(features, labels, mode, params):
    """An ordinary model_fn: nothing in it knows of devices."""
    net = features[..., tf.newaxis]
    for layer, filters in enumerate([32, 64]):
        with tf.variable_scope(f'conv{layer}'):
            kernel = tf.get_variable('kernel', [3, 3, net.shape[-1], filters])
            bias = tf.get_variable('bias', [filters], initializer=tf.zeros_initializer())
        net = tf.nn.relu(tf.nn.conv2d(net, kernel, strides=1, padding='SAME') + bias)
    net = tf.nn.max_pool2d(net, ksize=2, strides=2, padding='SAME')
    net = tf.reshape(net, [-1, 4 * 4 * 64])
    if mode == estimator.ModeKeys.TRAIN:
        net = tf.nn.dropout(net, rate=0.5)
    with tf.variable_scope('logits'):
        kernel = tf.get_variable('kernel', [4 * 4 * 64, 10])
        bias = tf.get_variable('bias', [10], initializer=tf.zeros_initializer())
    logits = net @ kernel + bias

    digits = tf.argmax(logits, axis=1)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={'digit': digits})

    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = None
    if mode == estimator.ModeKeys.TRAIN:
        optimizer = tf.train.AdamOptimizer(params['learning_rate'])
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
    accuracy = {'accuracy': tf.metrics.accuracy(labels, digits)}
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=accuracy)


def load_digits():
    """Returns 1,437 images and labels to train on, and 360 held out."""
    digits = datasets.load_digits()
    images = (digits.images / 16).astype('float32')
    labels = digits.target.astype('int32')
    train_images, test_images, train_labels, test_labels = model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return (train_images, train_labels), (test_images, test_labels)


def draw_confusion(labels, digits, path):
    """Draws how often the digit of each row was taken for that of each column."""
    matplotlib.use('Agg')  # Draws to files, without a screen.
    drawn = metrics.ConfusionMatrixDisplay.from_predictions(
        labels, digits, cmap='Blues', colorbar=False
    )
    drawn.figure_.savefig(path, dpi=100)


def main(argv):
    common.start(argv)
    train, test = load_digits()

    def train_input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(train)
        return dataset.shuffle(len(train[1]), seed=FLAGS.seed).repeat().batch(FLAGS.batch_size)

    def test_input_fn():
        return tf.data.Dataset.from_tensor_slices(test).batch(FLAGS.batch_size)

    devices = common.devices()
    # The same as @estimator_mgpu.replicate above model_fn, but for the devices of the flag.
    replicated = estimator_mgpu.replicate(model_fn, devices=devices)
    # A session has one CPU device unless told otherwise.
    session_config = estimator_mgpu.session_config(devices)

    classifier = estimator.Estimator(
        replicated,
        model_dir=FLAGS.model_dir,
        config=estimator.RunConfig(session_config=session_config, tf_random_seed=FLAGS.seed),
        params={'learning_rate': FLAGS.learning_rate},
    )
    progress = estimator_mgpu.ProgressHook(steps=FLAGS.train_steps)
    classifier.train(train_input_fn, [progress], steps=FLAGS.train_steps)
    result = classifier.evaluate(test_input_fn)

    digits = [prediction['digit'] for prediction in classifier.predict(test_input_fn)]
    picture = pathlib.Path(classifier.model_dir) / 'confusion.png'
    draw_confusion(test[1], digits, picture)
    print(f'Confusion matrix: {picture}')
    print(
        f'accuracy {result["accuracy"]:.4f} on {len(test[1])} held-out digits '
        f'(devices={devices}, {result["global_step"]} steps)'
    )


if __name__ == '__main__':
    app.run(main)
