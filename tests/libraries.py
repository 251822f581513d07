"""Models of public libraries, unchanged, each with batches to train it on."""

import inspect
import sys
import types

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow_gan as tfgan
import tf_slim as slim

from estimator_mgpu.tf_internals import private
from models import spec_of, step

# Where BERT looks for it.
sys.modules['tensorflow.contrib'] = contrib = types.ModuleType('tensorflow.contrib')
contrib.layers = slim.layers
from bert import modeling, optimization  # noqa: E402


def getargspec(function):
    """What TF-GAN uses of a function that Python had before 3.11."""
    found = inspect.getfullargspec(function)
    return types.SimpleNamespace(args=found.args, keywords=found.varkw)


inspect.getargspec = getargspec
MODES = tf.estimator.ModeKeys


def sentences():
    """Batches of sentences of different lengths, with a class as label."""
    batches = []
    for i in range(3):
        random = np.random.RandomState(i)
        features = {
            'ids': random.randint(20, size=(12, 6)),
            'mask': (np.arange(6) < random.randint(2, 7, size=(12, 1))).astype(int),
            'types': random.randint(2, size=(12, 6)),
        }
        features = {name: x.astype(np.int32) for name, x in features.items()}
        batches.append((features, random.randint(3, size=12)))
    return batches


def bert(features, labels, mode):
    """Google's."""
    config = modeling.BertConfig(
        20, 8, 2, 2, 16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = modeling.BertModel(
        config, mode == MODES.TRAIN, features['ids'], features['mask'], features['types']
    )
    logits = tf.matmul(model.get_pooled_output(), tf.get_variable('w', [8, 3]))
    predictions = {'p': tf.nn.softmax(logits), 'sequence': model.get_sequence_output()}
    if mode == MODES.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == MODES.TRAIN:
        train_op = optimization.create_optimizer(loss, 0.01, 10, 2, False)
        _count_last(step())
        return spec_of(mode, loss, train_op)
    metrics = {'accuracy': tf.metrics.accuracy(labels, tf.argmax(logits, -1))}
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, predictions=predictions, eval_metric_ops=metrics
    )


def _count_last(step):
    """Lets a step be counted after it was read: for the learning rate, BERT leaves it to chance."""
    users = step.handle.consumers()
    reads = [op for op in users if op.type == 'ReadVariableOp' and not op.control_inputs]
    for op in users:
        if op.type.startswith('Assign') and op is not step.initializer:
            private.add_control_inputs(op, reads)


def gan(model_dir):
    """TF-GAN's, of which hooks run the train_ops."""

    def generator(noise, mode):
        with tf.variable_scope('g'):
            x = slim.fully_connected(noise, 6, tf.nn.tanh)
            return slim.fully_connected(x, 3, None)

    def discriminator(x, noise, mode):
        x = slim.fully_connected(x, 5, tf.nn.tanh, weights_regularizer=slim.l2_regularizer(0.1))
        return slim.fully_connected(x, 1, None)

    config = tf.ConfigProto(device_count={'CPU': 4}, allow_soft_placement=False)
    return tfgan.estimator.GANEstimator(
        model_dir,
        generator,
        discriminator,
        tfgan.losses.modified_generator_loss,
        tfgan.losses.modified_discriminator_loss,
        generator_optimizer=lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3),
        discriminator_optimizer=lambda: tf.train.AdamOptimizer(0.02, epsilon=1e-3),
        get_hooks_fn=tfgan.get_sequential_train_hooks(tfgan.GANTrainSteps(1, 2)),
        get_eval_metric_ops_fn=lambda model: {
            'mean': tf.metrics.mean(model.discriminator_gen_outputs)
        },
        config=tf.estimator.RunConfig(session_config=config, tf_random_seed=1),
    )
