"""CTC losses of dense labels: their loops call functions that TensorFlow 1's `Defun` makes."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import steps

pytestmark = pytest.mark.core
FRAMES, LABELS, SYMBOLS = 6, 3, 5


def batches(*sizes):
    """Sounds of different lengths, with labels of different lengths, some of which are repeated."""
    random = np.random.RandomState(0)
    for rows in sizes:
        labels = random.randint(1, SYMBOLS, [rows, LABELS])
        labels[:, 1] = labels[:, 0]
        features = {
            'sound': random.randn(rows, FRAMES, 4).astype('f'),
            'labels': labels.astype('i'),
            'label_length': random.randint(1, LABELS + 1, rows).astype('i'),
            'frame_count': random.randint(2 * LABELS - 1, FRAMES + 1, rows).astype('i'),
        }
        yield features, None


def model_fn_of(**options):
    """Recurrent, so that gradients of the loss go through a loop; `options` are the loss's."""

    def model_fn(features, labels, mode):
        cell = tf.nn.rnn_cell.GRUCell(4)
        frame_count = features['frame_count']
        net, _ = tf.nn.dynamic_rnn(cell, features['sound'], frame_count, dtype=tf.float32)
        logits = tf.layers.dense(net, SYMBOLS)
        if options.get('logits_time_major', True):
            logits = tf.transpose(logits, [1, 0, 2])
        losses = tf.nn.ctc_loss_v2(
            features['labels'], logits, features['label_length'], frame_count, **options
        )
        loss = tf.reduce_mean(losses)
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(
            loss, tf.train.get_or_create_global_step()
        )
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


OPTIONS = {
    'time_major': ({}, 'v2'),
    'batch_major': ({'logits_time_major': False, 'blank_index': -1}, 'v1'),
}


@pytest.mark.parametrize(('options', 'behavior'), OPTIONS.values(), ids=OPTIONS)
def test_as_on_one_device(options, behavior):
    """The loops of the loss run once."""
    with towers.behavior_of(behavior):
        ours, _ = towers.compare(model_fn_of(**options), [*batches(7, 4, 2)], 3, static=False)
    once = steps.of_graph(ours.graph).plan.once
    assert [reason for name, (reason, _) in once.items() if 'ctc_loss' in name]
