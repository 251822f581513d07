"""What the log says before "NaN loss during training."."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import spec_of, step

pytestmark = pytest.mark.core


def squares(features, weight):
    """The error of each example, [batch]: that of an example with a NaN isn't finite."""
    return tf.square(tf.reduce_sum(features * weight, axis=1), name='errors')


def mean_of_vector(features, weight):
    return tf.reduce_mean(squares(features, weight))


def with_penalty(features, weight):
    return 2.0 * tf.reduce_mean(squares(features, weight)) + tf.nn.l2_loss(weight)


def of_tf_losses(features, weight):
    """The mean of a column, [batch, 1], over the weights that aren't 0."""
    product = tf.reduce_sum(features * weight, axis=1, keepdims=True)
    return tf.losses.mean_squared_error(tf.zeros_like(product), product)


def mean_of_matrix(features, weight):
    return tf.reduce_mean(tf.square(features * weight), name='mean')


def two_means(features, weight):
    return tf.reduce_mean(squares(features, weight)) + mean_of_matrix(features, weight)


LOSSES = {
    mean_of_vector: "errors isn't finite for 1 of 10 examples, first in tower 1, on /device:CPU:1, "
    'with example 7 of 0 to 9.',
    with_penalty: "errors isn't finite for 1 of 10 examples, first in tower 1, on /device:CPU:1, "
    'with example 7 of 0 to 9.',
    of_tf_losses: "mean_squared_error/Mul isn't finite for 1 of 10 examples, first in tower 1, on "
    '/device:CPU:1, with example 7 of 0 to 9.',
    mean_of_matrix: "mean isn't finite for 1 of 2 towers, first in tower 1, on /device:CPU:1, with "
    'examples 5 to 9 of 0 to 9.',
    two_means: "errors isn't finite for 1 of 10 examples, first in tower 1, on /device:CPU:1, with "
    'example 7 of 0 to 9.',
}


def train(loss_of, batches, initial=1.0, devices=2, **options):
    """Trains on batches, until the loss is NaN."""

    def model_fn(features, labels, mode):
        weight = tf.get_variable('weight', [3], initializer=tf.constant_initializer(initial))
        loss = loss_of(features, weight)
        train_op = tf.train.GradientDescentOptimizer(0.01).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    def input_fn():
        shape = tf.TensorShape([None, 3])
        if len({len(batch) for batch in batches}) == 1:
            shape = tf.TensorShape(batches[0].shape)
        return tf.data.Dataset.from_generator(lambda: batches, tf.float32, shape)

    estimator = estimator_mgpu.Estimator(model_fn, devices=devices, **options)
    with pytest.raises(tf.train.NanLossDuringTrainingError):
        estimator.train(input_fn)


def batch(rows=10, wrong=(), value=np.nan):
    features = np.ones([rows, 3], np.float32)
    features[list(wrong), 1] = value
    return features


def said(caplog):
    """What the log says is wrong, up to the line of the program."""
    errors = [record.getMessage() for record in caplog.records if record.levelname == 'ERROR']
    assert errors[1:] == ['Model diverged with loss = NaN.']
    explanation, _, line = errors[0].partition(' It was made by ')
    assert __file__ in line
    return explanation.removeprefix('The loss is NaN: ')


@pytest.mark.parametrize('loss_of', LOSSES, ids=lambda loss_of: loss_of.__name__)
def test_one_example(loss_of, behavior, caplog):
    """In the second step."""
    train(loss_of, [batch(), batch(wrong=[7])])
    assert said(caplog) == LOSSES[loss_of]


@pytest.mark.parametrize(
    'value, loss', [(np.nan, 'NaN'), (np.inf, 'inf - inf')], ids=['nan', 'inf']
)
def test_infinite_examples(value, loss, caplog):
    """A mean of inf and -inf is NaN, though no example's loss is."""

    def differences(features, weight):
        signs = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
        return tf.reduce_mean(tf.multiply(signs, features[:, 1] * weight[1], name='signed'))

    train(differences, [batch(8, wrong=[2, 6], value=value)])
    assert said(caplog) == (
        "signed isn't finite for 2 of 8 examples, first in tower 0, on /device:CPU:0, with "
        'example 2 of 0 to 7.'
    )


@pytest.mark.parametrize(
    'loss_of, unit', [(mean_of_vector, 'examples'), (mean_of_matrix, 'towers')]
)
def test_a_variable_that_is_nan(loss_of, unit, caplog):
    train(loss_of, [batch(2)], initial=np.nan)
    assert f"isn't finite for any of 2 {unit}, so perhaps a variable isn't." in said(caplog)


def test_what_is_added_is_nan(caplog):
    train(lambda *args: mean_of_vector(*args) + tf.log(-1.0), [batch(4)])
    assert (
        said(caplog) == 'errors is finite for all 4 examples, so look for other parts of the loss.'
    )


@pytest.mark.parametrize('rows, wrong, tower', [(7, 6, 2), (2, 1, 1)], ids=['7', '2'])
def test_a_batch_of_dynamic_size(rows, wrong, tower, caplog):
    """Three devices share 7 examples as 3, 2 and 2; of 2 examples, the third device has none."""
    train(mean_of_vector, [batch(12), batch(rows, wrong=[wrong])], devices=3)
    assert said(caplog) == (
        f"errors isn't finite for 1 of {rows} examples, first in tower {tower}, on "
        f'/device:CPU:{tower}, with example {wrong} of 0 to {rows - 1}.'
    )


def test_a_tower_without_examples(caplog):
    """It computes on the first example, which is wrong, and isn't counted."""
    train(mean_of_matrix, [batch(12), batch(2, wrong=[0])], devices=3)
    assert said(caplog) == (
        "mean isn't finite for 1 of 2 towers, first in tower 0, on /device:CPU:0, with example 0 "
        'of 0 to 1.'
    )


def test_micro_batches(caplog):
    """The towers of a device follow each other: 0 and 1 are on the first one."""
    train(mean_of_matrix, [batch(8, wrong=[5, 7])], microbatches=2)
    assert said(caplog) == (
        "mean isn't finite for 2 of 4 towers, first in tower 2, on /device:CPU:1, with examples 4 "
        'to 5 of 0 to 7.'
    )


def of_sorted(features, weight):
    """Needs all examples, so it runs once."""
    return tf.tensordot(tf.sort(features[:, 1]), [1.0, 2.0, 3.0, 4.0], 1) * weight[1]


def mean_of_selection(features, weight):
    """The first device has no rows of the selection, and a mean of nothing is NaN."""
    return tf.reduce_mean(tf.boolean_mask(features * weight, tf.not_equal(features[:, 1], 1.0)))


def of_branches(features, weight):
    """A step takes one of two branches, so no tower has what is in the other one."""
    return tf.cond(
        tf.reduce_any(features > 1.0),
        lambda: tf.reduce_mean(squares(features, weight)),
        lambda: tf.reduce_mean(tf.abs(features * weight)),
    )


def test_a_loss_of_branches(behavior, caplog):
    """The first two steps end, though each takes another branch."""
    large = batch(4, wrong=[2], value=2.0)
    train(of_branches, [large, batch(4), batch(4, wrong=[2])])
    errors = [record.getMessage() for record in caplog.records if record.levelname == 'ERROR']
    assert errors[-1] == 'Model diverged with loss = NaN.'


@pytest.mark.parametrize('loss_of', [of_sorted, mean_of_selection], ids=lambda made: made.__name__)
def test_nothing_is_said(loss_of, caplog):
    train(loss_of, [batch(4, wrong=[2, 3])])
    errors = [record.getMessage() for record in caplog.records if record.levelname == 'ERROR']
    assert errors == ['Model diverged with loss = NaN.']
