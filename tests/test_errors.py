"""Bad input is a clear error at build time: what was given, what is legal, and the remedy."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import devices, private
from models import predict, regression, spec_of, step
from towers import TRAIN, train

pytestmark = pytest.mark.core


def adam(loss):
    return tf.train.AdamOptimizer(0.05).minimize(loss, step())


def build(model_fn, features=None, labels=None, count=2, config=None, **options):
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features = tf.zeros([4, 3]) if features is None else features()
        labels = tf.zeros([4, 1]) if labels is None else labels()
        options.setdefault('devices', count)
        fn = estimator_mgpu.replicate(model_fn, **options)
        return fn(features=features, labels=labels, mode=TRAIN, config=config)


def apart_from_the_loss(features, labels, mode):
    loss = tf.reduce_mean(predict(features))
    variables = tf.trainable_variables()
    grads = [tf.ones_like(v) for v in variables]
    train_op = tf.train.AdamOptimizer().apply_gradients(zip(grads, variables), step())
    return spec_of(mode, loss, train_op)


def no_variable(features, labels, mode):
    loss = tf.reduce_mean(features)
    tf.get_variable('w', [2])
    grads = tf.gradients(loss, tf.trainable_variables())
    assert grads == [None]
    return spec_of(mode, loss, step().assign_add(1))


@pytest.mark.parametrize('model_fn', [apart_from_the_loss, no_variable], ids=lambda f: f.__name__)
def test_no_gradient_to_reduce(model_fn):
    with pytest.raises(ValueError, match='(?s)2 devices.*nothing to reduce.*minimize.*devices=1'):
        build(model_fn)


def test_optimizer_without_a_trainable_loss():
    def model_fn(features, labels, mode):
        tf.get_variable('w', [2])
        loss = tf.reduce_mean(features)
        return spec_of(mode, loss, adam(loss))

    with pytest.raises(ValueError, match='No gradients provided for any variable'):
        build(model_fn)


def from_an_iterator(features, labels, mode):
    more = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(tf.ones([1, 3]))).get_next()
    loss = tf.reduce_mean(predict(features + more))
    return spec_of(mode, loss, adam(loss))


def from_a_queue(features, labels, mode):
    queue = tf.FIFOQueue(4, tf.float32, [3], name='queue')
    loss = tf.reduce_mean(predict(features + queue.dequeue(name='taken')))
    return spec_of(mode, loss, adam(loss))


ONCE = {from_an_iterator: "'IteratorGetNext' .IteratorGetNext.", from_a_queue: "'taken' .QueueDe"}


@pytest.mark.parametrize('model_fn', ONCE, ids=lambda f: f.__name__)
def test_what_happens_once_cannot_be_each_towers(model_fn):
    with pytest.raises(
        ValueError, match='(?s)' + ONCE[model_fn] + '.*with the rows of a shard.*input_'
    ):
        build(model_fn)
    build(model_fn, count=1)


def test_what_happens_once_may_be_a_term_of_the_loss():
    """Unlabelled data that don't depend on the batch count once."""

    def model_fn(features, labels, mode):
        rows = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(tf.ones([4, 3])))
        loss = tf.reduce_mean(predict(features))
        with tf.variable_scope('', reuse=True):
            loss += tf.reduce_mean(predict(rows.get_next()))
        return spec_of(mode, loss, adam(loss))

    build(model_fn)


def test_a_failure_while_copying_says_what_failed():
    def model_fn(features, labels, mode):
        hidden = tf.identity(predict(features), name='culprit')
        hidden.op._set_device_from_string('/device:NONSENSE:a:b')
        loss = tf.reduce_mean(hidden)
        return spec_of(mode, loss, adam(loss))

    match = "Copying 'culprit' to tower 1 on /device:CPU:1 failed: .*NONSENSE"
    with pytest.raises(RuntimeError, match=match) as info:
        build(model_fn)
    assert isinstance(info.value.__cause__, ValueError)


def test_a_failed_import_says_what_failed(monkeypatch):
    original = tf.import_graph_def

    def broken(graph_def, *args, **kwargs):
        for node in graph_def.node:
            if node.name == 'culprit':
                node.attr['T'].type = tf.string.as_datatype_enum
        return original(graph_def, *args, **kwargs)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.identity(predict(features), name='culprit'))
        return spec_of(mode, loss, adam(loss))

    monkeypatch.setattr(tf, 'import_graph_def', broken)
    with pytest.raises(RuntimeError, match="Copying 'culprit' to tower 1 on .*string") as info:
        build(model_fn)
    assert info.value.__cause__ is not None


def test_gradients_inside_a_function():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(predict(features))

        def train():
            with tf.control_dependencies([adam(loss)]):
                return tf.constant(0)

        return spec_of(mode, loss, tf.cond(tf.equal(step(), 0), train, lambda: 0))

    with pytest.raises(ValueError, match='(?s)inside a tf.function, tf.cond.*only apply them'):
        build(model_fn)


def test_gradient_of_a_reduced_gradient():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features)))
        [slope] = tf.gradients(loss, tf.trainable_variables('net/v'))
        penalised = loss + tf.nn.l2_loss(slope)
        return spec_of(mode, loss, adam(penalised))

    with pytest.raises(ValueError, match='(?s)depends on a gradient.*replicate\\(devices=1\\)'):
        build(model_fn)


def test_tape_with_mixed_sources():
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], use_resource=True)
        with tf.GradientTape() as tape:
            tape.watch(features)
            loss = tf.reduce_mean(tf.matmul(features, w))
        tape.gradient(loss, [w, features])

    with pytest.raises(ValueError, match='Ask for them in two calls'):
        build(model_fn)


BATCHES = {
    'rows differ': (
        lambda: {'a': tf.zeros([4, 3]), 'b': tf.zeros([5, 3])},
        r"feature 'a' has 4, feature 'b' has 5, labels has 4.*broadcast",
    ),
    'not per example': (
        lambda: {'a': tf.zeros([4, 3]), 'deep': {'vocabulary': tf.zeros([9])}},
        r"feature 'deep/vocabulary' has 9.*named in replicate\(broadcast",
    ),
    'unknown rank': (
        lambda: {'a': tf.placeholder(tf.float32)},
        r"feature 'a' has an unknown rank.*set_shape",
    ),
    'a dataset': (
        lambda: {'a': tf.data.Dataset.range(3)},
        r"feature 'a' is of .*Dataset.*dense, sparse and ragged",
    ),
}


@pytest.mark.parametrize(('features', 'message'), BATCHES.values(), ids=BATCHES.keys())
def test_batch(features, message):
    with pytest.raises((ValueError, TypeError), match=f'(?s){message}'):
        build(regression(adam), features)


def test_batch_without_rows():
    with pytest.raises(ValueError, match='(?s)no feature and no label has rows.*batch'):
        build(regression(adam), lambda: {'a': tf.constant(1.0)}, lambda: tf.constant(2.0))


def test_broadcast_of_no_such_feature():
    with pytest.raises(ValueError, match=r"'vocab'.*no such feature.*are: a, b, b/c, c"):
        build(
            regression(adam),
            lambda: {'a': tf.zeros([4, 3]), 'b': {'c': tf.zeros([2])}},
            broadcast=['vocab'],
        )


def test_broadcast_of_a_name_rather_than_names():
    with pytest.raises(TypeError, match=r"\['vocabulary'\]"):
        estimator_mgpu.replicate(regression(adam), broadcast='vocabulary')


@pytest.mark.parametrize(
    ('given', 'error', 'message'),
    [
        ([], ValueError, 'is empty'),
        ((), ValueError, 'is empty'),
        (0, ValueError, 'leaves nothing to run on'),
        (-2, ValueError, 'leaves nothing to run on'),
        (True, TypeError, 'not a number of devices'),
        (2.5, TypeError, 'of float'),
        ([0, 1], TypeError, '0 in devices is of int, not a str such as .*GPU:0'),
        (['/gpu:0'], ValueError, 'this machine has no GPU'),
        (['/device:TPU:0'], ValueError, 'names no numbered CPU or GPU'),
        (['cpu'], ValueError, 'names no numbered CPU or GPU|is not a device string'),
        (['/nonsense'], ValueError, 'is not a device string'),
    ],
    ids=repr,
)
def test_devices(given, error, message):
    calls = [lambda: build(regression(adam), devices=given), lambda: devices.resolve(given)]
    if given != ['/gpu:0']:  # Which devices there are is seen as the model_fn is called.
        calls.append(lambda: estimator_mgpu.replicate(devices=given))
    for make in calls:
        with pytest.raises(error, match=message) as raised:
            make()
        assert 'devices is None (every GPU)' in str(raised.value) or 'nvidia-smi' in str(
            raised.value
        )


def test_fewer_gpus_than_asked_for(monkeypatch):
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: ['one', 'two'])
    assert devices.resolve(2) == ['/device:GPU:0', '/device:GPU:1']
    assert devices.resolve(None) == ['/device:GPU:0', '/device:GPU:1']
    with pytest.raises(
        ValueError, match=r'devices=3, but this machine has 2 GPUs.*may stand twice'
    ):
        devices.resolve(3)
    with pytest.raises(ValueError, match="'/gpu:2' in devices is unknown: this machine has 2 GPUs"):
        devices.resolve(['/gpu:0', '/gpu:2'])


@pytest.mark.parametrize('given', [None, 3.0, 'loss'], ids=repr)
def test_model_fn_returns_no_spec(given):
    with pytest.raises(TypeError, match='has to return a tf.estimator.EstimatorSpec'):
        build(lambda features, labels, mode: given)


def test_train_distribute():
    config = tf.estimator.RunConfig(train_distribute=tf.distribute.MirroredStrategy(['/cpu:0']))
    with pytest.raises(ValueError, match='train_distribute=MirroredStrategy.*Leave out'):
        build(regression(adam), config=config)


def test_replicated_twice():
    fn = estimator_mgpu.replicate(regression(adam), devices=2)
    with pytest.raises(ValueError, match='replicated already'):
        estimator_mgpu.replicate(fn)


@pytest.mark.parametrize('inner', [None, 1, 2])
def test_replicated_inside_of_another(inner):
    replicated = estimator_mgpu.replicate(regression(adam), devices=inner)
    outer = lambda features, labels, mode: replicated(features, labels, mode)  # noqa: E731
    with pytest.raises(ValueError, match='Replicate it once'):
        build(outer, devices=2)


def test_not_a_model_fn():
    with pytest.raises(TypeError, match=r'not a function.*replicate\(devices=2\)'):
        estimator_mgpu.replicate(3)


def test_a_model_fn_without_features():
    with pytest.raises(ValueError, match=r'takes \(x, y, mode\), and no features.*name them so'):
        estimator_mgpu.replicate(lambda x, y, mode: None)


@pytest.mark.parametrize(
    'given', [3, lambda: 3, tf.keras.optimizers.SGD], ids=['3', '-> 3', 'keras']
)
def test_tower_optimizer_of_no_optimizer(given):
    with pytest.raises(TypeError, match='It takes a tf.train.Optimizer'):
        estimator_mgpu.TowerOptimizer(given)


def test_a_private_name_that_is_gone():
    with pytest.raises(ImportError, match=r'no tensorflow\.python\.ops\.gradients_util\.gone'):
        private._module('tensorflow.python.ops.gradients_util', 'gone')
    with pytest.raises(ImportError, match=r'tested with \(2\.15 to 2\.21\)'):
        private._module('tensorflow.python.gone', 'name')


def test_private_names_do_what_they_are_for():
    with tf.Graph().as_default() as graph:
        two = tf.constant(1) + tf.constant(1)
        assert private.constant_value(two) == 2
        assert private.constant_value(tf.placeholder(tf.int32, [])) is None
        first, second = tf.no_op(), tf.no_op()
        private.add_control_inputs(second, [first])
        assert second.control_inputs == [first]
        copy = tf.identity(tf.placeholder(tf.int32, []))
        private.set_input(copy.op, 0, two)
        assert copy.op.inputs[0] is two
        assert not private.in_control_flow(two.op)
        assert private.op_def('AddV2').name == 'AddV2'
        assert private.op_def('NoSuchOp') is None
        assert private.outermost(graph) is graph
        inner = []
        tf.function(lambda: inner.append(tf.get_default_graph())).get_concrete_function()
        assert inner[0] is not graph
        assert private.outermost(inner[0]) is graph
        with tf.Session() as sess:
            assert sess.run(copy) == 2


def test_layers_without_keras_2():
    """What tf.layers raise on TensorFlow 2.16 and later without tf-keras."""

    def model_fn(features, labels, mode):
        raise AttributeError('`dense` is not available with Keras 3.')

    with pytest.raises(
        RuntimeError, match='pip install "tf-keras~=.*TF_USE_LEGACY_KERAS=1'
    ) as info:
        build(model_fn)
    assert isinstance(info.value.__cause__, AttributeError)


def test_sums_whose_shape_goes_by_the_shard():
    """Sequences are cut to the longest of their shard, then averaged step by step."""

    def model_fn(features, labels, mode):
        length = tf.cast(tf.exp(tf.reduce_max(features[:, 0])), tf.int32)
        steps = tf.matmul(features, tf.get_variable('w', [3, 5]))[:, :length]
        loss = tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(steps), 0) + 1.0))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    features = np.ones([6, 3], np.float32)
    train(model_fn, [(features, None)], 2)
    features[4, 0] = 3.0
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match='(?s)Square:0.{1,3}was taken to.*differs from shard.*devices=1',
    ):
        train(model_fn, [(features, None)], 2)
