"""Training to the end of the data is training for as many steps; so are evaluating and predicting.

One undecorated device that trains for so many steps says what has to come out. The environment
variable RUNS says how often each model trains.
"""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import ROWS, floats, spec_of, step
from towers import MODES, TRAIN, assert_close, load, session

RUNS = int(os.environ.get('RUNS', '2'))
IDS = 40  # Not all are in a batch.


def dataset():
    """Two epochs of batches of 12, 12 and 7 rows."""
    rows = 2 * ROWS + 7
    ids = np.random.RandomState(0).randint(IDS, size=[rows, 2])
    data = tf.data.Dataset.from_tensor_slices(({'x': floats(rows, 3), 'ids': ids}, floats(rows, 1)))
    return data.batch(ROWS).repeat(2)


STEPS = 6


def error_of(features, labels):
    w = tf.get_variable('w', [3, 1])
    return tf.reduce_mean(tf.square(tf.matmul(features['x'], w) - labels))


def momentum(loss):
    return tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step())


def counter(name):
    return tf.get_variable(name, [], trainable=False, initializer=tf.zeros_initializer())


def regularized(features, labels, mode):
    """By a variable that no example reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.nn.l2_loss(unreached)
    return spec_of(mode, loss, momentum(loss))


def with_statistics(features, labels, mode):
    """A product of two of a variable that no example reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.reduce_mean(unreached) * tf.reduce_max(unreached)
    return spec_of(mode, loss, momentum(loss))


class LazyAdam(tf.train.AdamOptimizer):
    """Updates moments only of the rows that a batch has."""

    def _apply_sparse_shared(self, grad, var, indices, scatter_add):
        beta1, beta2 = self._beta1_t, self._beta2_t
        m, v = self.get_slot(var, 'm'), self.get_slot(var, 'v')
        new_m = beta1 * tf.gather(m, indices) + (1 - beta1) * grad
        new_v = beta2 * tf.gather(v, indices) + (1 - beta2) * tf.square(grad)
        deltas = -self._lr_t * new_m / (tf.sqrt(new_v) + self._epsilon_t)
        writes = [
            tf.scatter_update(m, indices, new_m).op,
            tf.scatter_update(v, indices, new_v).op,
            scatter_add(var, indices, deltas),
        ]
        return tf.group(*writes)

    def _resource_apply_sparse(self, grad, var, indices):
        def scatter_add(variable, at, values):
            return tf.scatter_add(variable, at, values).op

        return self._apply_sparse_shared(grad, var, indices, scatter_add)


def embedded_by(make_optimizer):
    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [IDS, 3])
        sums = tf.reduce_sum(tf.nn.embedding_lookup(table, features['ids']), [1, 2])
        loss = error_of(features, labels - sums[:, None])
        return spec_of(mode, loss, make_optimizer().minimize(loss, step()))

    return model_fn


def averaged(features, labels, mode):
    """Averages of all variables after each step, and of one that only a regularizer reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.nn.l2_loss(unreached)
    averages = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([momentum(loss)]):
        return spec_of(mode, loss, averages.apply(tf.trainable_variables()))


def counted(features, labels, mode):
    """How many steps there were, and three times as many by a loop, and by a branch."""
    count, in_loop, in_branch = map(counter, ['count', 'in_loop', 'in_branch'])
    loss = error_of(features, labels)
    _, tripled = tf.while_loop(
        lambda i, _: i < 3, lambda i, _: (i + 1, tf.assign_add(in_loop, 1.0)), (0, 0.0)
    )
    gate = tf.get_variable('gate', [], trainable=False, initializer=tf.ones_initializer())
    branch = tf.cond(gate > 0, lambda: tf.assign_add(in_branch, 1.0), lambda: 0.0)
    return spec_of(mode, loss, momentum(loss), count.assign_add(1.0), tripled, branch)


def accumulated(features, labels, mode):
    """Gradients of two steps at a time, of which a counter of the model's own tells."""
    loss = error_of(features, labels)
    optimizer = tf.train.AdamOptimizer(0.1)
    [(gradient, w)] = optimizer.compute_gradients(loss)
    total = tf.get_variable('total', [3, 1], trainable=False, initializer=tf.zeros_initializer())
    count = tf.get_variable(
        'count', [], tf.int64, trainable=False, initializer=tf.ones_initializer()
    )

    def apply():
        with tf.control_dependencies([optimizer.apply_gradients([(total.read_value() / 2, w)])]):
            return tf.group(total.assign(tf.zeros_like(total)))

    with tf.control_dependencies([total.assign_add(gradient)]):
        train_op = tf.cond(tf.equal(count % 2, 1), apply, tf.no_op)
    with tf.control_dependencies([train_op]):
        return spec_of(mode, loss, count.assign_add(1.0), step().assign_add(1))


MODELS = {
    'regularized': regularized,
    'statistics': with_statistics,
    'adam': embedded_by(lambda: tf.train.AdamOptimizer(0.1)),
    'ftrl': embedded_by(lambda: tf.train.FtrlOptimizer(0.1)),
    'rmsprop': embedded_by(lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5)),
    'lazy adam': embedded_by(lambda: LazyAdam(0.1)),
    'averaged': averaged,
    'counted': counted,
    'accumulated': accumulated,
}


def runs_of(model_fn, towers, mode=TRAIN, *, runs=1, values=None, steps=None):
    """Runs steps over and over, from the same values; yields the variables that they come to."""
    with tf.Graph().as_default():
        tf.train.create_global_step()
        iterator = tf.data.make_initializable_iterator(dataset())
        spec = model_fn(*iterator.get_next(), mode)
        updates = [update for _, update in spec.eval_metric_ops.values()]
        fetches = [
            t for t in (spec.train_op, spec.loss, spec.predictions, updates) if t is not None
        ]
        variables = {v.op.name: v for v in tf.global_variables() + tf.local_variables()}
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(runs):
                load(sess, {variables[name]: value for name, value in (values or {}).items()})
                sess.run(iterator.initializer)
                try:
                    for _ in range(1000 if steps is None else steps):
                        sess.run(fetches)
                except tf.errors.OutOfRangeError:
                    assert steps is None
                yield sess.run(variables)


def compare(model_fn, mode=TRAIN):
    """Compares running to the end of the data with one undecorated device's known steps."""
    [values] = runs_of(model_fn, 1, mode, steps=0)
    [expected] = runs_of(model_fn, 1, mode, values=values, steps=STEPS)
    for towers in (1, 2, 3, 4):
        replicated = estimator_mgpu.replicate(model_fn, devices=towers)
        for found in runs_of(replicated, towers, mode, runs=RUNS, values=values):
            assert_close(found, expected, 1e-4)
    return expected


@pytest.mark.core
@pytest.mark.parametrize('name', MODELS)
def test_training_to_the_end(name, behavior):
    assert compare(MODELS[name])['global_step'] == STEPS


def test_evaluating_to_the_end(behavior):
    """A metric and a counter that no example reaches."""

    def model_fn(features, labels, mode):
        unreached = tf.get_variable('unreached', [4])
        metrics = {
            'error': tf.metrics.mean(tf.abs(labels)),
            'unreached': tf.metrics.mean(unreached),
            'count': (counter('count').value(), tf.assign_add(counter('counted'), 1.0)),
        }
        loss = error_of(features, labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    found = compare(model_fn, MODES.EVAL)
    assert found['counted'] == STEPS
    assert found['mean_1/count'] == 4 * STEPS  # entries of the variable


def test_predicting_to_the_end(behavior):
    def model_fn(features, labels, mode):
        counted = tf.assign_add(counter('counted'), 1.0)
        predictions = {
            'x': features['x'],
            'counted': tf.fill([tf.shape(features['x'])[0]], counted),
        }
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)

    assert compare(model_fn, MODES.PREDICT)['counted'] == STEPS
