"""What Python functions give is of rows, or it is warned of."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import adam, batches, predict, spec_of
from towers import compare, evaluate, train

UNKNOWN = 'is not known, so it is taken to have one row an example'
OF_SHARDS = 'they are taken over shards instead'
UNTOLD = 'is a mean or a sum over rows cannot be told'


def metric(function, shape):
    """Returns a model_fn with a metric of a Python function's result."""

    def model_fn(features, labels, mode):
        values = tf.py_func(function, [features], tf.float32)
        if shape is not None:
            values.set_shape(shape)
        loss = tf.reduce_mean(labels)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, eval_metric_ops={'metric': tf.metrics.mean(values)}
        )

    return model_fn


def of_rows(x):
    return np.square(x).mean(1)


@pytest.mark.parametrize('shape', [[None], None], ids=['known', 'unknown'])
def test_metrics_of_rows(shape, caplog):
    data = batches(7, steps=3)
    one, ours = (evaluate(metric(of_rows, shape), data, n, static=False) for n in (0, 3))
    np.testing.assert_allclose(ours.metrics['metric'], one.metrics['metric'], rtol=1e-5)
    assert (UNKNOWN in caplog.text) == (shape is None)
    assert OF_SHARDS not in caplog.text


@pytest.mark.parametrize(
    ('shape', 'warning'), [([], OF_SHARDS), (None, UNKNOWN)], ids=['known', 'unknown']
)
def test_metrics_of_batches_are_warned_of(shape, warning, caplog):
    data = batches(6, steps=3)
    model_fn = metric(lambda x: x.max(), shape)
    evaluate(model_fn, data, 1)
    assert not caplog.text.count('WARNING')
    one, ours = (evaluate(model_fn, data, n).metrics['metric'] for n in (0, 3))
    assert warning in caplog.text and ours < one


def with_loss(function, shape):
    def model_fn(features, labels, mode):
        losses = tf.py_function(function, [predict(features), labels], tf.float32)
        if shape is not None:
            losses.set_shape(shape)
        loss = tf.reduce_mean(losses)
        return spec_of(mode, loss, adam(loss))

    return model_fn


@pytest.mark.parametrize('shape', [[None], None], ids=['known', 'unknown'])
def test_losses_of_rows(shape, caplog):
    model_fn = with_loss(lambda x, y: tf.reduce_sum(tf.square(x - y), 1), shape)
    compare(model_fn, batches(7, steps=3), 3, static=False)
    assert (UNKNOWN in caplog.text) == (shape is None)
    assert UNTOLD not in caplog.text


@pytest.mark.parametrize(
    ('shape', 'warning'), [([], UNTOLD), (None, UNKNOWN)], ids=['known', 'unknown']
)
def test_losses_of_batches_are_warned_of(shape, warning, caplog):
    model_fn = with_loss(lambda x, y: tf.reduce_max(tf.square(x - y)), shape)
    train(model_fn, batches(6, steps=1), 3)
    assert caplog.text.count(warning) == 1


def test_a_loss_that_the_user_knows_is_not_warned_of(caplog):
    model_fn = with_loss(lambda x, y: tf.reduce_mean(tf.square(x - y)), None)
    train(model_fn, batches(6, steps=1), 3, loss_reduction='mean')
    assert UNKNOWN not in caplog.text


def written(features, labels, mode):
    seen = tf.get_variable('seen', [], trainable=False)
    values = tf.py_func(of_rows, [features], tf.float32)
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    return spec_of(mode, loss, adam(loss), seen.assign(tf.reduce_mean(values)))


def test_what_is_written_is_warned_of(caplog):
    compare(written, batches(6, steps=2), 3)
    assert UNKNOWN in caplog.text
