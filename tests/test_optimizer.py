"""`TowerOptimizer`: what every optimizer is in a replicated model_fn."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import TowerOptimizer, optimizer
from models import batches, predict, spec_of, step
from towers import train


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
    [sgd, lambda: Own(0.1, 2.0), lambda: tf.train.SyncReplicasOptimizer(sgd(), 1)],
    ids=['sgd', 'own', 'sync replicas'],
)
def test_wraps_and_changes_nothing(make):
    inner = make()
    own, attributes = type(inner), dict(vars(inner))
    wrapped = TowerOptimizer(inner)
    assert wrapped is inner
    assert isinstance(wrapped, TowerOptimizer) and isinstance(wrapped, own)
    assert type(wrapped).__name__ == own.__name__ and type(wrapped).__module__ == own.__module__
    assert attributes.items() <= vars(wrapped).items()
    assert not isinstance(make(), TowerOptimizer)
    ours = type(wrapped)
    assert TowerOptimizer(wrapped) is wrapped and type(wrapped) is ours


@pytest.mark.parametrize(
    'given', [3, lambda: 3, tf.keras.optimizers.SGD, None], ids=['3', '-> 3', 'keras', 'None']
)
def test_of_no_optimizer(given):
    with pytest.raises(TypeError, match='It takes a tf.train.Optimizer'):
        TowerOptimizer(given)


@pytest.mark.parametrize('towers', [1, 3])
def test_every_optimizer_of_a_replicated_model_fn_is_one(towers):
    found = []

    def model_fn(features, labels, mode):
        made = TowerOptimizer(optimizer_or_optimizer_fn=lambda: Own(0.1, factor=3.0))
        found.extend([sgd(), made, TowerOptimizer(sgd)])
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, found[1].minimize(loss, step()))

    train(model_fn, batches(6, steps=1), towers)
    assert all(isinstance(o, TowerOptimizer) for o in found)
    kinds = [tf.train.GradientDescentOptimizer, Own, tf.train.GradientDescentOptimizer]
    assert all(isinstance(o, kind) for o, kind in zip(found, kinds))
    assert found[1].factor == 3.0
    assert not isinstance(sgd(), TowerOptimizer)  # Outside of it none is.
    assert 'TowerOptimizer' not in repr(tf.train.GradientDescentOptimizer.__mro__)


def test_an_optimizer_that_waits_for_other_processes(caplog):
    """It's warned of before its first step, which may never end."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        optimizer = tf.train.SyncReplicasOptimizer(sgd(), 1)
        return spec_of(mode, loss, optimizer.minimize(loss, step()))

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = [tf.zeros([6, size]) for size in (3, 1)]
        estimator_mgpu.replicate(model_fn, devices=2)(*batch, 'train')
    warnings = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert sum('SyncReplicasOptimizer waits' in warning for warning in warnings) == 1


class AppliesByType(tf.train.GradientDescentOptimizer):
    """Finds the class before its own by the type of the instance, as no derived class can."""

    def apply_gradients(self, *args, **kwargs):
        return super(type(self), self).apply_gradients(*args, **kwargs)  # here


class ComputesByType(tf.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        return super(type(self), self).compute_gradients(*args, **kwargs)  # here


@pytest.mark.parametrize('towers', [1, 2])
@pytest.mark.parametrize('own', [AppliesByType, ComputesByType])
def test_a_method_that_calls_itself(own, towers):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, own(0.1).minimize(loss, step()))

    match = (
        rf'_gradients\(\) calls itself without end in File "{__file__}", line .* Write super\(\)'
    )
    with pytest.raises(RecursionError, match=match):
        train(model_fn, batches(6, steps=1), towers)


def test_another_recursion_stays_as_it_is():
    def model_fn(features, labels, mode):
        return model_fn(features, labels, mode)

    with pytest.raises(RecursionError, match='^maximum recursion depth'):
        train(model_fn, batches(6, steps=1), 2)


def test_none_is_after_an_error():
    before = tf.train.Optimizer.__init__

    def failing(features, labels, mode):
        assert isinstance(sgd(), TowerOptimizer)
        raise KeyError('in the model_fn')

    with pytest.raises(KeyError, match='in the model_fn'):
        train(failing, batches(6, steps=1), 2)
    assert tf.train.Optimizer.__init__ is before


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

    found = optimizer.applied(train(model_fn, batches(6, steps=1), 2).graph)
    assert [v.op.name for _, v in found] == ['table', 'net/w', 'net/b', 'net/v']
    assert all(g.shape.as_list() == v.shape.as_list() for g, v in found if isinstance(g, tf.Tensor))
    assert optimizer.applied(train(model_fn, batches(6, steps=1), 0).graph) == []


def test_current_tower_is_gone():
    with pytest.raises(
        AttributeError, match="no attribute 'current_tower' any more.*called once.*Leave it out"
    ):
        estimator_mgpu.current_tower  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        estimator_mgpu.nothing  # noqa: B018


def test_a_class_that_is_told_of_its_subclasses():
    """It's told of users' classes, and not of what makes its optimizers tower optimizers."""
    known = []

    class Listed(tf.train.GradientDescentOptimizer):
        def __init_subclass__(cls, name):
            known.append(name)

    class Own(Listed, name='own'):
        pass

    optimizer = estimator_mgpu.TowerOptimizer(Own(0.1))
    assert isinstance(optimizer, Own)
    assert known == ['own']

    class Derived(type(optimizer), name='derived'):
        pass

    assert known == ['own', 'derived']


def test_an_optimizer_that_becomes_another():
    optimizer = estimator_mgpu.TowerOptimizer(tf.train.GradientDescentOptimizer(0.1))

    class Other(tf.train.GradientDescentOptimizer):
        pass

    optimizer.__class__ = Other
    assert type(optimizer) is Other


def test_a_users_class_of_tower_optimizers():
    """It is constructed as the optimizer's own class is."""

    class Descent(TowerOptimizer, tf.train.GradientDescentOptimizer):
        pass

    made = Descent(0.1)
    assert isinstance(made, TowerOptimizer) and made.get_name() == 'GradientDescent'
