"""The time to divide a model grows with the model, and not with the square of its size.

Times are too uncertain for a test. The calls of functions, Python's and TensorFlow's, are not: a
walk over all inputs of a concatenation of n features, made for each of these, is n * n calls.
"""

import cProfile
import pstats

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import graphs

column = tf.feature_column


def numeric_columns(count):
    """A feature, and a column, is one of many inputs of a concatenation."""
    names = [f'x{i}' for i in range(count)]
    features = {name: tf.placeholder(tf.float32, [None, 1]) for name in names}
    return features, lambda: column.input_layer(features, map(column.numeric_column, names))


def embedding_columns(count):
    """A column has a table of its own."""
    names = [f'x{i}' for i in range(count)]
    features = {name: tf.placeholder(tf.string, [None, 1]) for name in names}
    columns = [
        column.embedding_column(column.categorical_column_with_hash_bucket(name, 10), 2)
        for name in names
    ]
    return features, lambda: column.input_layer(features, columns)


def calls_to_divide(model, count):
    """How many functions are called to divide a model over two devices."""
    profile = cProfile.Profile()

    def model_fn(features):
        net = tf.layers.dense(forward(), 1)
        loss = tf.reduce_mean(tf.square(net))
        optimizer = tf.train.AdagradOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
        profile.enable()
        return estimator_mgpu.estimator.EstimatorSpec('train', loss=loss, train_op=train_op)

    with tf.Graph().as_default():
        features, forward = model(count)
        try:
            estimator_mgpu.replicate(model_fn, devices=2)(features)
        finally:
            profile.disable()
    return pstats.Stats(profile).total_calls


@pytest.mark.no_cover
@pytest.mark.parametrize(('model', 'count'), [(numeric_columns, 100), (embedding_columns, 20)])
def test_calls_grow_with_the_model(model, count, behavior):
    """From n to 2n features, as many calls are added as from 2n to 3n, but for 3%.

    The margin is for sets of ops, whose order is by chance: a search may find what it looks for
    earlier or later. With a walk over all features for each of them, it was 37% or more.
    """
    calls_to_divide(model, 2)  # What is called only once in a process.
    first, second, third = (calls_to_divide(model, parts * count) for parts in (1, 2, 3))
    assert third - second <= 1.03 * (second - first)


def test_slices_depend_on_one_feature():
    """TensorFlow looks for a constant among all that the ends of a slice are computed from."""
    with tf.Graph().as_default() as graph:
        features, forward = numeric_columns(5)

        def model_fn(features):
            return estimator_mgpu.estimator.EstimatorSpec('eval', loss=tf.reduce_mean(forward()))

        estimator_mgpu.replicate(model_fn, devices=2)(features)
        slices = [op for op in graph.get_operations() if '/replicate/StridedSlice' in op.name]
        assert len(slices) == 2 * 5
        for op in slices:
            ends = [tensor.op for tensor in op.inputs[1:]]
            upstream = graphs.ancestors(ends, graphs.data_inputs)
            assert sum(op.type == 'Placeholder' for op in upstream) <= 1
