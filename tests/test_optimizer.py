"""`TowerOptimizer`: what every optimizer is in a replicated model_fn."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import TowerOptimizer, optimizer
from models import batches, predict, regression, spec_of, step
from towers import compare, train


def sgd():
    return tf.train.GradientDescentOptimizer(0.1)


class Own(tf.train.AdamOptimizer):
    """Has arguments, attributes and methods of its own."""

    def __init__(self, rate, factor):
        super().__init__(rate, epsilon=1e-3)
        self.factor = factor

    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(self.factor * g, v) for g, v in pairs]


@pytest.mark.parametrize(
    'make',
    [
        sgd,
        lambda: tf.train.AdamOptimizer(0.1),
        lambda: Own(0.1, 2.0),
        lambda: tf.train.SyncReplicasOptimizer(sgd(), 1),
    ],
    ids=['sgd', 'adam', 'own', 'sync replicas'],
)
def test_wraps_and_changes_nothing(make):
    inner = make()
    own, attributes = type(inner), dict(vars(inner))
    wrapped = TowerOptimizer(inner)
    assert wrapped is inner
    assert isinstance(wrapped, TowerOptimizer) and isinstance(wrapped, own)
    assert isinstance(wrapped, tf.train.Optimizer)
    assert type(wrapped).__name__ == own.__name__ and type(wrapped).__module__ == own.__module__
    assert attributes.items() <= vars(wrapped).items()
    assert not isinstance(make(), TowerOptimizer)


def test_of_a_function():
    assert isinstance(TowerOptimizer(sgd), tf.train.GradientDescentOptimizer)
    assert isinstance(TowerOptimizer(optimizer_or_optimizer_fn=sgd), TowerOptimizer)
    assert TowerOptimizer(lambda: Own(0.1, factor=3.0)).factor == 3.0


def test_twice():
    once = TowerOptimizer(sgd())
    own = type(once)
    assert TowerOptimizer(once) is once and type(once) is own


@pytest.mark.parametrize(
    'given', [3, lambda: 3, tf.keras.optimizers.SGD, None], ids=['3', '-> 3', 'keras', 'None']
)
def test_of_no_optimizer(given):
    with pytest.raises(TypeError, match='It takes a tf.train.Optimizer'):
        TowerOptimizer(given)


def made_in(model_fn, towers):
    """The optimizers that a replicated model_fn makes."""
    found = []

    def keeping(features, labels, mode):
        return model_fn(features, labels, mode, found)

    train(keeping, batches(6, steps=1), towers)
    return found


def of_all_kinds(features, labels, mode, found):
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    found += [sgd(), tf.train.AdamOptimizer(0.1), Own(0.1, factor=2.0), TowerOptimizer(sgd)]
    return spec_of(mode, loss, found[2].minimize(loss, step()))


@pytest.mark.parametrize('towers', [1, 3])
def test_every_optimizer_of_a_replicated_model_fn_is_one(towers):
    found = made_in(of_all_kinds, towers)
    assert all(isinstance(o, TowerOptimizer) for o in found)
    kinds = [tf.train.GradientDescentOptimizer, tf.train.AdamOptimizer, Own]
    assert all(isinstance(o, kind) for o, kind in zip(found, [*kinds, kinds[0]]))
    assert type(found[0]) is not type(found[1])
    assert not isinstance(sgd(), TowerOptimizer)  # Outside of it none is.
    assert 'TowerOptimizer' not in repr(tf.train.GradientDescentOptimizer.__mro__)


def test_none_is_after_an_error():
    before = tf.train.Optimizer.__init__

    def failing(features, labels, mode):
        assert tf.train.Optimizer.__init__ is not before
        assert isinstance(sgd(), TowerOptimizer)
        raise KeyError('in the model_fn')

    with pytest.raises(KeyError, match='in the model_fn'):
        train(failing, batches(6, steps=1), 2)
    assert tf.train.Optimizer.__init__ is before
    assert not isinstance(sgd(), TowerOptimizer)


def wrapped(loss):
    return TowerOptimizer(tf.train.AdamOptimizer(0.05)).minimize(loss, step())


def own(loss):
    return TowerOptimizer(Own(0.05, factor=0.5)).minimize(loss, step())


@pytest.mark.parametrize('use', [wrapped, own], ids=lambda f: f.__name__)
def test_trains_as_on_one_device(use, behavior):
    compare(regression(use), batches(), 5)


def test_slots_are_the_optimizers_own():
    """Who asks an optimizer for its slots, or variables, gets them."""
    asked = {}

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        adam = TowerOptimizer(tf.train.AdamOptimizer(0.1))
        train_op = adam.minimize(loss, step())
        asked['slots'] = adam.get_slot_names()
        asked['m'] = adam.get_slot(tf.trainable_variables()[0], 'm').op.name
        asked['variables'] = len(adam.variables())
        return spec_of(mode, loss, train_op)

    train(model_fn, batches(6, steps=1), 2)
    assert asked == {'slots': ['m', 'v'], 'm': 'net/w/Adam', 'variables': 2 + 2 * 3}


def test_applied_is_a_record():
    """Of gradients given to apply, clipped say, and of those alone; each graph has its own."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [5, 3])
        tf.get_variable('unused', [2])
        ids = tf.cast(tf.abs(features[:, 0]) * 10, tf.int32) % 5
        loss = tf.reduce_mean(tf.square(predict(features + tf.gather(table, ids)) - labels))
        first = sgd()
        pairs = first.compute_gradients(loss, [table, *tf.trainable_variables('net/w')])
        clipped = [(tf.clip_by_norm(g, 0.1), v) for g, v in pairs]
        rest = tf.train.AdamOptimizer(0.1, name='rest')
        variables = [*tf.trainable_variables('net/[bv]'), *tf.trainable_variables('unused')]
        return spec_of(
            mode, loss, first.apply_gradients(clipped, step()), rest.minimize(loss, None, variables)
        )

    run = train(model_fn, batches(6, steps=1), 2)
    found = optimizer.applied(run.graph)
    assert [v.op.name for _, v in found] == ['table', 'net/w', 'net/b', 'net/v']
    assert all(g.shape.as_list() == v.shape.as_list() for g, v in found if isinstance(g, tf.Tensor))
    assert optimizer.applied(tf.Graph()) == []
    assert optimizer.applied(train(model_fn, batches(6, steps=1), 0).graph) == []


def test_where_nothing_is_replicated():
    """It is what it wraps."""
    run = train(regression(wrapped), batches(6, steps=4), 0)
    plain = regression(lambda loss: tf.train.AdamOptimizer(0.05).minimize(loss, step()))
    expected = train(plain, batches(6, steps=4), 0)
    for name, value in expected.values.items():
        np.testing.assert_array_equal(run.values[name], value)


def test_current_tower_is_gone():
    with pytest.raises(
        AttributeError, match="no attribute 'current_tower' any more.*called once.*Leave it out"
    ):
        estimator_mgpu.current_tower  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        estimator_mgpu.nothing  # noqa: B018
