"""What a model_fn can read of its surroundings reads as without us, on one device or several."""

import contextlib
import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import sgd, spec_of
from towers import TRAIN, assert_close, train

pytestmark = pytest.mark.core
on_devices = pytest.mark.parametrize('devices', [1, 2, 3], ids='devices={}'.format)
BATCH = np.ones([6, 1], np.float32), np.zeros([6, 1], np.float32)


def findings_of(probe, device=None, **options):
    """What a probe finds, undecorated and on a device if there are no options of replicate()."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        features, labels = map(tf.constant, BATCH)
        model_fn = estimator_mgpu.replicate(probe, **options) if options else probe
        with tf.device(device) if device else contextlib.nullcontext():
            model_fn(features, labels, TRAIN, PARAMS, CONFIG)
        return probe.findings


PARAMS, CONFIG = {'rate': 0.1}, tf.estimator.RunConfig()
IN_GRAPHS = 'building_function', 'finalized', 'seed', 'version'


class Probe:
    """A model_fn that notes what it reads, in all that a model_fn is made of."""

    def __init__(self):
        self.findings = {}

    def __call__(self, features, labels, mode, params, config):
        self.note('arguments', mode, params is PARAMS, config is CONFIG)
        self.note_scope('at first')
        self.note_graph('at first')
        output = self.loop(self.layers(self.variables(features)))
        self.note('seeds', *self.seeds())
        tf.losses.mean_squared_error(labels, output)
        loss = tf.losses.get_total_loss()
        train_op = self.optimize(loss)
        self.note_scope('at last')
        self.note_graph('at last')
        return spec_of(mode, loss, train_op)

    def note(self, what, *values):
        assert what not in self.findings, what
        self.findings[what] = values

    def note_scope(self, where):
        """All attributes of the variable scope, and the name scope."""
        scope = tf.get_variable_scope()
        attributes = {n: getattr(scope, n) for n in dir(scope) if not n.startswith('_')}
        values = {n: value for n, value in attributes.items() if not inspect.ismethod(value)}
        values['custom_getter'] = bool(values['custom_getter'])  # A probe has its own.
        assert 'reuse' in values
        self.note(f'scope {where}', values, type(scope), tf.get_default_graph().get_name_scope())

    def note_graph(self, when):
        """All ops, collections, and what the next op would be."""
        graph = tf.get_default_graph()
        self.note(f'graph {when}', type(graph), [getattr(graph, name) for name in IN_GRAPHS])
        ops = graph.get_operations()
        self.note(f'ops {when}', [(op.name, op.type, op.device) for op in ops])
        self.note(f'inputs {when}', [[t.name for t in op.inputs] for op in ops])
        waits = [sorted(before.name for before in op.control_inputs) for op in ops]
        self.note(f'what ops wait for {when}', waits)
        self.note(f'names {when}', graph.unique_name('block', mark_as_used=False))
        for key in graph.collections:
            found = [getattr(value, 'name', None) for value in tf.get_collection(key)]
            self.note(f'collection {key} {when}', found)

    def variables(self, features):
        def getter(getter, name, *args, **kwargs):
            self.note_scope(f'in the getter of {name}')
            told = {key: value for key, value in kwargs.items() if not callable(value)}
            self.note(f'the getter of {name}', args, told)
            return getter(name, *args, **kwargs)

        with tf.variable_scope('outer', custom_getter=getter):
            self.note_scope('outer')
            w = tf.get_variable('w', [1, 4])
            with tf.variable_scope('inner', reuse=False):
                self.note_scope('inner')
                product = w * tf.get_variable('v', [1, 4], regularizer=tf.nn.l2_loss)
        for i in range(2):
            with tf.variable_scope(None, 'block'):
                self.note_scope(f'block {i}')
                b = tf.get_variable('b', [4], initializer=tf.ones_initializer())
        with tf.variable_scope('outer', reuse=True), tf.variable_scope(None, 'reused'):
            self.note_scope('reused')
        return features @ product + b

    def layers(self, hidden):
        def activation(x):
            self.note_scope(f'in the layer of {x.name}')
            return tf.nn.relu(x)

        for _ in range(2):
            hidden = tf.layers.dense(hidden, 4, activation)
            hidden = tf.layers.batch_normalization(hidden, training=True)
        return tf.layers.dense(hidden, 1, activation, name='last')

    def loop(self, output):
        def body(i, x):
            self.note_scope('in a loop')
            self.note('device in a loop', tf.constant(0).device)
            return i + 1, x * tf.get_variable('decay', [], initializer=tf.ones_initializer())

        return tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), output])[1]

    def seeds(self):
        """An op's own follows from how many ops there are before it."""
        for seed in None, 3:
            drawn = tf.random_uniform([2], seed=seed).op
            yield drawn.name, drawn.get_attr('seed'), drawn.get_attr('seed2'), tf.get_seed(seed)

    def optimize(self, loss):
        made = [tf.train.AdamOptimizer(0.1), tf.train.AdamOptimizer(0.2, name='second')]
        for one in made:
            own = one.__class__
            self.note(f'class of {one.get_name()}', own, own.__name__, own.__mro__, own.__bases__)
            assert isinstance(one, tf.train.AdamOptimizer)
        self.note('one class', type(made[0]) is type(made[1]), made[0].__class__(0.1).__class__)
        variables = tf.trainable_variables()
        step = made[0].minimize(loss, tf.train.get_global_step(), variables[:2])
        steps = [step, made[1].minimize(loss, None, variables[2:])]
        self.note('slots', [(v.name, v.device) for one in made for v in one.variables()])
        return tf.group(*steps)


@pytest.mark.parametrize('devices', [None, ['/cpu:0'], 2, 3], ids='devices={}'.format)
def test_a_model_fn_finds_what_it_finds_undecorated(devices, behavior):
    """All but what says by design that we're there, and TensorFlow has no name for.

    That's `type(optimizer)`, a subclass of the optimizer's own and of `TowerOptimizer`; the class
    of the graph's variable store, a subclass as well; and private attributes of the graph. One
    device that is given is as by `tf.device`.
    """
    expected = findings_of(Probe(), device='/cpu:0' if devices == ['/cpu:0'] else None)
    found = findings_of(Probe(), devices=devices)
    assert list(found) == list(expected)
    for what, values in expected.items():
        assert found[what] == values, what
    assert expected['scope at first'][0]['reuse'] is False
    assert len(expected) > 40


def test_what_a_model_fn_raises():
    """As it is, with its traceback."""
    error = KeyError('in the model_fn')

    def model_fn(features, labels, mode, params, config):
        raise error

    with pytest.raises(KeyError) as info:
        findings_of(model_fn, devices=2)
    assert info.value is error and error.__cause__ is None
    assert info.traceback[-1].name == 'model_fn'


def unless_reused(loss_of):
    """A model_fn of a weight that starts at 1; what it does is up to `get_variable_scope().reuse`.

    By the mean of the output, 1, the gradient is 1: 0.9 after a step. `loss_of` gets the weight.
    """

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [1, 1], initializer=tf.ones_initializer())
        return spec_of(mode, loss := loss_of(w, features @ w), sgd(loss))

    model_fn.__name__ = loss_of.__name__
    return model_fn


def weight_decay(w, output):
    """Of 0.5 |w|², whose gradient is w: 0.8 after a step."""
    loss = tf.reduce_mean(output)
    if not tf.get_variable_scope().reuse:
        loss += tf.nn.l2_loss(w)
    return loss


def an_assertion(w, output):
    assert tf.get_variable_scope().reuse is False
    with tf.variable_scope('nested'):
        assert tf.get_variable_scope().reuse is False
    return tf.reduce_mean(output)


def a_layer_collection(w, output):
    """As kfac's: what is reused has to be there."""
    blocks = {}

    def register(key):
        if tf.get_variable_scope().reuse:
            return blocks[key]
        blocks[key] = len(blocks)

    for i in range(2):
        with tf.variable_scope(f'layer{i}'):
            register(i)
    with tf.variable_scope('layer1', reuse=True):
        assert register(1) == 1
    return tf.reduce_mean(output)


def summaries(w, output):
    """As Tensor2Tensor's: of the first shard only."""

    def summarize(name, value):
        if not tf.get_variable_scope().reuse:
            tf.summary.scalar(name, value)

    with tf.variable_scope('body'):
        summarize('first', tf.reduce_sum(w))
        with tf.variable_scope(None, 'attention'):
            summarize('second', tf.reduce_max(w))
    return tf.reduce_mean(output)


def layer_names(w, output):
    """A layer is named by it, and so are the checkpoint's variables."""
    name = 'shared' if tf.get_variable_scope().reuse else 'own'
    return tf.reduce_mean(tf.layers.dense(output, 1, name=name, kernel_initializer='ones'))


class Embedder:
    """As OpenNMT-tf's: it's built anew for each graph, unless its variables are reused."""

    def __init__(self):
        self.embeddings = None

    def __call__(self, features, labels, mode):
        with tf.variable_scope('transformer'):
            if not tf.get_variable_scope().reuse:
                self.embeddings = tf.Variable([[1.0]], name='w_embs')
            if self.embeddings is None:
                raise RuntimeError('There are no embeddings.')
        loss = tf.reduce_mean(features @ self.embeddings)
        return spec_of(mode, loss, sgd(loss))


IDIOMS = [
    *map(unless_reused, [weight_decay, an_assertion, a_layer_collection, summaries, layer_names]),
    Embedder(),
]


@on_devices
@pytest.mark.parametrize('model_fn', IDIOMS, ids=lambda f: getattr(f, '__name__', 'an object'))
def test_what_is_up_to_reuse(model_fn, devices, behavior):
    one, ours = (train(model_fn, [BATCH], n) for n in (0, devices))
    # Not losses: one of a reference variable may be of its value after the step.
    assert_close(ours.values, one.values, 1e-5)
    written = [run.graph.get_collection(tf.GraphKeys.SUMMARIES) for run in (one, ours)]
    assert [t.name for t in written[1]] == [t.name for t in written[0]]


def test_weight_decay_by_hand():
    run = train(IDIOMS[0], [BATCH], 2)
    np.testing.assert_allclose(run.values['w'], [[0.8]], rtol=1e-6)


def test_summaries_are_there():
    run = train(IDIOMS[3], [BATCH], 2)
    assert len(run.graph.get_collection(tf.GraphKeys.SUMMARIES)) == 2
