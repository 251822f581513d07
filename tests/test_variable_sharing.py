"""Variables of one name are shared within a model_fn, and nowhere else."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import variable_sharing
from models import batches, sgd, spec_of
from towers import TRAIN, assert_close, train

pytestmark = pytest.mark.core


def twice(features):
    return features @ tf.get_variable('w', [3, 3]) @ tf.get_variable('w', [3, 3])


def layers(features):
    hidden = tf.layers.dense(features, 3, tf.nn.tanh, name='dense')
    return tf.layers.dense(hidden, 3, tf.nn.tanh, name='dense')


def nested(features):
    for _ in range(2):
        with tf.variable_scope('outer'), tf.variable_scope('inner', reuse=False):
            features = twice(features)
    return features


def partitioned(features):
    with tf.variable_scope('parts', partitioner=tf.fixed_size_partitioner(3)):
        return twice(features)


def old_partitions(features):
    for _ in range(2):
        parts = tf.create_partitioned_variables([3, 3], [3, 1], tf.ones_initializer(), name='old')
        features = features @ tf.concat(parts, 0)
    return features


def custom_getter(features):
    def getter(getter, name, *args, **kwargs):
        return getter(name, *args, **kwargs) * 2.0

    with tf.variable_scope('own', custom_getter=getter):
        return twice(features)


def loop(features):
    def body(i, x):
        return i + 1, x @ tf.get_variable('w', [3, 3]) + tf.get_variable('b', [3])

    before = body(0, features)[1]
    return tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), before])[1]


def regularized(features):
    """A regularizer counts once."""
    for _ in range(2):
        w = tf.get_variable('w', [3, 3], regularizer=tf.nn.l2_loss)
    return features @ w


MAKERS = [twice, layers, nested, partitioned, old_partitions, custom_getter, loop, regularized]


def model(output_of, scope=lambda: tf.variable_scope(tf.get_variable_scope())):
    def model_fn(features, labels, mode):
        with scope():
            output = output_of(features)
        tf.losses.mean_squared_error(labels, tf.reduce_sum(output, 1, keepdims=True))
        loss = tf.losses.get_total_loss()
        return spec_of(mode, loss, sgd(loss))

    return model_fn


def auto_reuse():
    return tf.variable_scope(
        tf.get_variable_scope(), reuse=tf.AUTO_REUSE, auxiliary_name_scope=False
    )


@pytest.mark.parametrize('output_of', MAKERS, ids=lambda f: f.__name__)
def test_as_by_auto_reuse(output_of, behavior):
    """Where an undecorated model_fn fails, unless its variables are in a scope of `AUTO_REUSE`."""
    steps = batches(6, steps=3)
    with pytest.raises(ValueError, match='already exists'):
        train(model(output_of), steps, 0)
    one = train(model(output_of, auto_reuse), steps, 0)
    for towers in 1, 2:
        ours = train(model(output_of), steps, towers, values=one.start)
        assert_close(ours.values, one.values, 1e-5)


def get(name='w', shape=(3, 3), dtype=tf.float32, reuse=None, parts=None):
    partitioner = parts and tf.fixed_size_partitioner(parts)
    with tf.variable_scope('own', reuse=reuse, partitioner=partitioner):
        return tf.get_variable(name, shape, dtype)


REFUSED = {
    'specified shape .* found shape': {'shape': [3, 2]},
    'specified dtype .* found dtype': {'dtype': tf.float64},
    'does not exist': {'name': 'other', 'reuse': True},
    'unpartitioned version': {'parts': 3},
}


@pytest.mark.parametrize('message', REFUSED)
def test_what_cannot_be_shared(message):
    """As by `AUTO_REUSE`, and `reuse=True` demands a variable that is there."""

    def output_of(features):
        get()
        return features @ get(**REFUSED[message])

    with pytest.raises(ValueError, match=message):
        train(model(output_of), batches(6, steps=1), 2)


@pytest.mark.parametrize('message', ['found partitions', 'No partitioner was provided'])
def test_other_partitions(message):
    def output_of(features):
        get(parts=3)
        return features @ get(parts=2 if 'found' in message else None)

    with pytest.raises(ValueError, match=message):
        train(model(output_of), batches(6, steps=1), 2)


def test_only_while_a_model_fn_is_called():
    """Of variables that it has made and others, as of the input_fn, also after an error."""

    def failing(features, labels, mode):
        assert get('before') is before
        get('after')
        raise KeyError('in the model_fn')

    with tf.Graph().as_default():
        before = get('before')
        with pytest.raises(KeyError):
            estimator_mgpu.replicate(failing, devices=2)(tf.zeros([4, 3]), None, TRAIN)
        for name in 'before', 'after':
            with pytest.raises(ValueError, match='already exists'):
                get(name)
        assert get('after', reuse=True).name == 'own/after:0'


@pytest.mark.parametrize('devices', [None, 1, 2])
def test_names_that_come_after(devices):
    """Default names, which scopes count, go on from those of the model_fn, in a hook say."""

    def model_fn(features, labels, mode):
        with tf.variable_scope(None, 'block'):
            return model(twice)(features, labels, mode)

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=devices)
        replicated(tf.zeros([4, 3]), tf.zeros([4, 1]), TRAIN)
        with tf.variable_scope(None, 'block') as scope:
            assert scope.name == 'block_1'


def test_a_checkpoint_that_is_named(tmp_path):
    """`init_from_checkpoint` looks for a variable by its name, where `get_variable` keeps it."""
    path = str(tmp_path / 'saved')
    with tf.Graph().as_default(), tf.Session() as session:
        saved = tf.get_variable('saved', initializer=np.full([3, 3], 0.5, np.float32))
        parts = tf.get_variable('parts', [3, 1], partitioner=tf.fixed_size_partitioner(3))
        session.run([v.initializer for v in (saved, *parts)])
        tf.train.Saver([saved, *parts]).save(session, path)
        expected = session.run(tf.convert_to_tensor(parts))

    def output_of(features):
        output = features @ get() @ get() @ get('parts', [3, 1], parts=3)
        tf.train.init_from_checkpoint(path, {'saved': 'own/w', 'parts': 'own/parts'})
        return output

    values = train(model(output_of), batches(6, steps=1), 2, steps=0).values
    np.testing.assert_array_equal(values['own/w'], np.full([3, 3], 0.5))
    found = [values[f'own/parts/part_{i}'] for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_another_store():
    """The one of Keras' models, which shares variables itself."""
    keras = tf.keras.utils

    class Model(tf.Module):
        @keras.track_tf1_style_variables
        def __call__(self, features):
            with variable_sharing.shared_variables():
                return features @ get() @ get()

    with tf.Graph().as_default():
        model = Model()
        model(tf.zeros([4, 3]))
        assert len(model.trainable_variables) == 1
