"""Models of public libraries, unchanged, each with batches to train it on."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu  # noqa: F401, as it brings tf.estimator
from estimator_mgpu import private
from models import floats, of_all_modes, spec_of, step

fc = tf.feature_column
PREDICT, TRAIN = tf.estimator.ModeKeys.PREDICT, tf.estimator.ModeKeys.TRAIN


class ArgSpec(NamedTuple):
    """What Python had before 3.11."""

    args: list
    varargs: str | None
    keywords: str | None
    defaults: tuple | None


# Where libraries look for packages of TensorFlow, and where these are.
MOVED = {
    'tensorflow.python.estimator': 'tensorflow_estimator.python.estimator',
    'tensorflow.contrib.layers': 'tf_slim.layers',
    'tf_keras.legacy_tf_layers': 'tf_keras.src.legacy_tf_layers',
}
MODULES = {
    'tensorflow_estimator.python.estimator': ('.canned', '.canned.head', '.canned.optimizers'),
    'tf_keras.src.legacy_tf_layers': ('.normalization',),
}


def import_library(name: str) -> Any:
    """Imports a library that knows modules of TensorFlow by names that they have no longer."""
    for old, new in MOVED.items():
        for module in ('', *MODULES.get(new, ())):
            sys.modules[old + module] = importlib.import_module(new + module)
    contrib = types.ModuleType('tensorflow.contrib')
    contrib.layers = sys.modules['tensorflow.contrib.layers']
    sys.modules['tensorflow.contrib'] = contrib
    if not hasattr(inspect, 'getargspec'):
        inspect.getargspec = lambda f: ArgSpec(*inspect.getfullargspec(f)[:4])
    return importlib.import_module(name)


slim = import_library('tf_slim')
nets = import_library('tf_slim.nets')


def estimator_fn(name: str, make: Callable[[], Any]) -> Callable[..., Any]:
    """Returns the model_fn of an estimator that a library builds."""
    built = functools.lru_cache(maxsize=None)(make)

    def model_fn(features, labels, mode):
        return built().model_fn(features, labels, mode, built().config)

    model_fn.__name__ = name
    return model_fn


# Networks of slim.


def images() -> list:
    """Batches of small images, with a number as label."""
    return [(floats(12, 32, 32, 3, seed=i), floats(12, 1, seed=100 + i) + 2) for i in range(3)]


def slim_train(loss):
    def clip(grads):
        clipped, _ = tf.clip_by_global_norm([g for g, _ in grads], 0.5)
        return [(g, v) for g, (_, v) in zip(clipped, grads)]

    optimizer = tf.train.MomentumOptimizer(0.01, 0.9)
    return slim.training.create_train_op(loss, optimizer, transform_grads_fn=clip)


def lenet(x):
    scope = slim.arg_scope(
        [slim.conv2d, slim.fully_connected],
        weights_regularizer=slim.l2_regularizer(0.01),
        normalizer_fn=slim.layer_norm,
    )
    with scope:
        x = slim.repeat(x, 2, slim.conv2d, 4, [3, 3], stride=2, scope='conv')
        x = slim.separable_conv2d(x, 4, [3, 3], 1, scope='separable')
        x = slim.max_pool2d(x, [2, 2])
        x = slim.stack(slim.flatten(x), slim.fully_connected, [6, 5], scope='fc')
    slim.summarize_activations()
    return slim.fully_connected(x, 1, activation_fn=None, scope='out')


def resnet_v2(x):
    blocks = [nets.resnet_v2.resnet_v2_block('block', 2, 1, 1)]
    with slim.arg_scope(nets.resnet_v2.resnet_arg_scope()):
        x, _ = nets.resnet_v2.resnet_v2(x, blocks, 1, is_training=False)
    return slim.flatten(x)


LENET, RESNET = (of_all_modes(forward, slim_train) for forward in (lenet, resnet_v2))


# Google's BERT.


def sentences() -> list:
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
    modeling = import_library('bert.modeling')
    config = modeling.BertConfig(
        20, 8, 2, 2, 16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = modeling.BertModel(
        config, mode == TRAIN, features['ids'], features['mask'], features['types']
    )
    logits = tf.matmul(model.get_pooled_output(), tf.get_variable('w', [8, 3]))
    predictions = {'p': tf.nn.softmax(logits), 'sequence': model.get_sequence_output()}
    if mode == PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == TRAIN:
        optimization = import_library('bert.optimization')
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


# Recommenders of deepctr, on heads that sum.


IDS = {'user': 8, 'item': 5, 'shop': 4}


def clicks() -> list:
    """Batches of ids and a number, with a click or none as label."""
    batches = []
    for i in range(3):
        random = np.random.RandomState(i)
        features = {name: random.randint(n, size=(12, 1)) for name, n in IDS.items()}
        features['price'] = floats(12, 1, seed=i)
        batches.append((features, random.randint(2, size=(12, 1)).astype(np.float32)))
    return batches


def recommender(name: str) -> Any:
    ids = [fc.categorical_column_with_identity(*pair) for pair in IDS.items()]
    price = fc.numeric_column('price')
    wide, deep = [*ids, price], [*(fc.embedding_column(i, 4) for i in ids), price]
    make = getattr(import_library('deepctr.estimator'), name + 'Estimator')
    return make(wide, deep, dnn_hidden_units=[6, 4], model_dir='unused')


DEEP_FM = estimator_fn('DeepFM', functools.partial(recommender, 'DeepFM'))


# Rankers of TF-Ranking.


def queries() -> list:
    """Batches of lists of five documents, of which some are missing, with their relevance."""
    batches = []
    for i in range(3):
        random = np.random.RandomState(i)
        labels = np.argsort(random.rand(12, 5)).astype(np.float32)
        labels[::3, 3:] = -1
        batches.append(({'text': floats(12, 5, 3, seed=i), 'query': floats(12, 2, seed=i)}, labels))
    return batches


def ranker(loss: str) -> Any:
    tfr = import_library('tensorflow_ranking')

    def score(context, group, mode, params, config):
        x = tf.concat([tf.layers.flatten(group['text']), context['query']], 1)
        return tf.layers.dense(tf.layers.dense(x, 5, tf.nn.tanh), 1, use_bias=False)

    ndcg = tfr.metrics.make_ranking_metric_fn(tfr.metrics.RankingMetricKey.NDCG, topn=3)
    head = tfr.head.create_ranking_head(
        tfr.losses.make_loss_fn(loss), {'ndcg': ndcg}, tf.train.MomentumOptimizer(0.02, 0.9)
    )
    model_fn = tfr.model.make_groupwise_ranking_fn(
        score, 1, transform_fn=tfr.feature.make_identity_transform_fn(['query']), ranking_head=head
    )
    return tf.estimator.Estimator(model_fn, 'unused')


SOFTMAX, LIST_MLE = (
    estimator_fn(loss, functools.partial(ranker, loss))
    for loss in ('softmax_loss', 'list_mle_loss')
)


# TF-GAN, of which hooks run the train_ops.


def gan(model_dir: str) -> Any:
    tfgan = import_library('tensorflow_gan')

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
