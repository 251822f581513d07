"""Bad input is a clear error at build time: what was given, what is legal, and the remedy."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import devices
from estimator_mgpu.partition import rules
from estimator_mgpu.tf_internals import private
from models import adam, regression, spec_of
from towers import TRAIN

pytestmark = pytest.mark.core


def build(model_fn, features=None, labels=None, devices=2, config=None, **options):
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features = tf.zeros([4, 3]) if features is None else features()
        labels = tf.zeros([4, 1]) if labels is None else labels()
        fn = estimator_mgpu.replicate(model_fn, devices=devices, **options)
        return fn(features=features, labels=labels, mode=TRAIN, config=config)


BATCHES = {
    "feature 'a' has 4, feature 'b' has 5, labels has 4.*broadcast": (
        lambda: {'a': tf.zeros([4, 3]), 'b': tf.zeros([5, 3])},
    ),
    r"feature 'deep/vocabulary' has 9.*named in replicate\(broadcast": (
        lambda: {'a': tf.zeros([4, 3]), 'deep': {'vocabulary': tf.zeros([9])}},
    ),
    "feature 'a' is of .*Dataset.*dense, sparse and ragged": (
        lambda: {'a': tf.data.Dataset.range(3)},
    ),
    'no feature and no label has examples.*batch': (
        lambda: {'a': tf.constant(1.0)},
        {'labels': lambda: tf.constant(2.0)},
    ),
    "'vocab'.*no such feature.*are: a, b, b/c, c": (
        lambda: {'a': tf.zeros([4, 3]), 'b': {'c': tf.zeros([2])}},
        {'broadcast': ['vocab']},
    ),
    r"\['vocab'\]": (None, {'broadcast': 'vocab'}),
    r'broadcast=3 names no features. Give a list of their names': (None, {'broadcast': 3}),
    r"broadcast=\[\['a'\]\] names no features": (None, {'broadcast': [['a']]}),
    r"broadcast=b'a' names no features": (None, {'broadcast': b'a'}),
}


@pytest.mark.parametrize('message', BATCHES)
def test_batch(message):
    features, *options = BATCHES[message]
    with pytest.raises((ValueError, TypeError), match=f'(?s){message}'):
        build(regression(adam), features, **dict(*options))


@pytest.mark.parametrize(
    ('given', 'error', 'message'),
    [
        ([], ValueError, 'is empty'),
        ((), ValueError, 'is empty'),
        (0, ValueError, 'leaves nothing to run on'),
        (-2, ValueError, 'leaves nothing to run on'),
        (True, TypeError, 'of bool'),
        (2.5, TypeError, 'of float'),
        (np.array(2), TypeError, 'of ndarray'),
        (np.int64(0), ValueError, 'leaves nothing to run on'),
        ([0, 1], TypeError, '0 in devices is of int, not a str such as .*GPU:0'),
        (['/gpu:0'], ValueError, 'this machine has no GPU'),
        (['/device:TPU:0'], ValueError, 'names no numbered CPU or GPU'),
        (['cpu'], ValueError, 'names no numbered CPU or GPU'),
        (['/nonsense'], ValueError, 'names no numbered CPU or GPU'),
    ],
    ids=repr,
)
def test_devices(given, error, message):
    calls = [lambda: build(regression(adam), devices=given), lambda: devices.resolve(given)]
    if given != ['/gpu:0']:  # Which devices there are is seen as the model_fn is called.
        calls.append(lambda: estimator_mgpu.replicate(devices=given))
    for make in calls:
        with pytest.raises(error, match=rf'{message}.*(devices is None \(every GPU\)|nvidia-smi)'):
            make()


@pytest.mark.parametrize('make', [estimator_mgpu.replicate, estimator_mgpu.Estimator])
def test_other_types_that_will_do(make):
    """A generator is read once, whatever else is made of it then."""
    two = ['/device:CPU:0', '/device:CPU:1']
    for given in (2, np.int64(2), two, tuple(two), (one for one in two), np.array(two)):
        made = make(regression(adam), devices=given)
        options = getattr(made, '_model_fn', made).replicate_options
        assert devices.resolve(options['devices']) == devices.resolve(options['devices']) == two
    for given, expected in (None, []), ((), []), (['x'], ['x']), ((n for n in 'xy'), ['x', 'y']):
        made = make(regression(adam), devices=2, broadcast=given)
        options = getattr(made, '_model_fn', made).replicate_options
        assert options['broadcast'] == expected


def test_fewer_gpus_than_asked_for(gpus):
    gpus(None, None)
    assert devices.resolve(2) == devices.resolve(None) == ['/device:GPU:0', '/device:GPU:1']
    for given in (3, ['/gpu:0', '/gpu:2']):
        match = "asks for '/device:GPU:2', but this machine has 2 GPUs.*stand twice"
        with pytest.raises(ValueError, match=match):
            devices.resolve(given)


LEGAL = {
    'variables': 'cpu, first, spread',
    'batch_norm': 'batch, device',
    'input': 'chief, machine',
}


@pytest.mark.parametrize('make', [estimator_mgpu.replicate, estimator_mgpu.Estimator])
def test_options_that_there_are_not(make):
    for name, legal in LEGAL.items():
        with pytest.raises(ValueError, match=f"{name}='all' is not known. Legal are {legal}."):
            make(regression(adam), **{name: 'all'})
        with pytest.raises(ValueError, match=f'is not known. Legal are {legal}.'):
            make(regression(adam), **{name: np.zeros(3)})
    with pytest.raises(ValueError, match="broadcast needs input='chief'"):
        make(regression(adam), input='machine', broadcast=['x'])
    for name in ('loss_reduction', 'loss_weight'):
        with pytest.raises(TypeError, match=f'takes no {name}: .*global batch.*Leave it out'):
            make(regression(adam), devices=2, **{name: 'mean'})
    with pytest.raises(TypeError, match='takes no device: its options are devices, broad'):
        make(regression(adam), device=2)
    with pytest.raises(TypeError, match='is of RunConfig, not a tf.ConfigProto'):
        estimator_mgpu.session_config(2, tf.estimator.RunConfig())


def test_a_rule_that_fails_says_what_failed(monkeypatch):
    def broken(op, sizes):
        raise KeyError('no such thing')

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.tanh(features @ tf.get_variable('w', [3, 1]), name='culprit'))
        return spec_of(mode, loss, adam(loss))

    monkeypatch.setitem(rules.RULES, 'Tanh', broken)
    match = r"(?s)'culprit' \(a Tanh\).*KeyError.*no such thing.*replicate\(devices=1\)"
    with pytest.raises(RuntimeError, match=match) as info:
        build(model_fn)
    assert isinstance(info.value.__cause__.__cause__, KeyError)


def test_arguments_of_estimator_and_train():
    with pytest.raises(TypeError, match='config={} is of dict. Give a tf.estimator.RunConfig, or'):
        estimator_mgpu.Estimator(regression(adam), config={})
    with pytest.raises(TypeError, match='base is of dict, not a tf.ConfigProto'):
        estimator_mgpu.session_config(2, {})
    estimator = estimator_mgpu.Estimator(regression(adam), devices=2)
    dataset = tf.data.Dataset.from_tensors((tf.zeros([4, 3]), tf.zeros([4, 1])))
    calls = [
        estimator.train,
        estimator.evaluate,
        lambda given: next(estimator.predict(given)),
        estimator.explain,
        lambda given: estimator_mgpu.verify(regression(adam), given),
        estimator_mgpu.Estimator(regression(adam), devices=2, input='machine').train,
    ]
    for call in calls:
        with pytest.raises(TypeError, match='Give a function that makes the batches: lambda: data'):
            call(dataset)
    hook = estimator_mgpu.ProgressHook()
    with pytest.raises(TypeError, match=r'is one hook. Give a list: hooks=\[hook\]'):
        estimator.train(lambda: dataset, hook)


def untrainable(features, labels, mode):
    tf.get_variable('w', [2])
    loss = tf.reduce_mean(features)
    return spec_of(mode, loss, adam(loss))


def nested(devices):
    replicated = estimator_mgpu.replicate(regression(adam), devices=devices)
    return lambda features, labels, mode: replicated(features, labels, mode)


@pytest.mark.parametrize(
    ('model_fn', 'error', 'message'),
    [
        (untrainable, ValueError, 'No gradients provided for any variable'),
        *[(nested(devices), ValueError, 'Replicate it once') for devices in (None, 1, 2)],
        *[
            (lambda features, labels, mode, it=it: it, TypeError, 'has to return .*EstimatorSpec')
            for it in (None, 3.0, 'loss')
        ],
    ],
)
def test_model_fn(model_fn, error, message):
    with pytest.raises(error, match=message):
        build(model_fn)


def test_train_distribute():
    config = tf.estimator.RunConfig(train_distribute=tf.distribute.MirroredStrategy(['/cpu:0']))
    with pytest.raises(ValueError, match='train_distribute=MirroredStrategy.*Leave out'):
        build(regression(adam), config=config)


@pytest.mark.parametrize(
    ('given', 'error', 'message'),
    [
        (3, TypeError, r'not a function.*replicate\(devices=2\)'),
        (lambda x, y, mode: None, ValueError, r'takes \(x, y, mode\), and no features.*name them'),
        (dict, ValueError, 'no features'),
        (estimator_mgpu.replicate(regression(adam), devices=2), ValueError, 'replicated already'),
    ],
    ids=['no function', 'no features', 'no signature', 'replicated'],
)
def test_what_cannot_be_replicated(given, error, message):
    with pytest.raises(error, match=message):
        estimator_mgpu.replicate(given)


def test_a_private_name_that_is_gone():
    gone = r'no tensorflow\.python\.framework\.ops with .*Operation\.gone'
    with pytest.raises(ImportError, match=gone):
        private._find('framework.ops', 'Operation.gone')
    with pytest.raises(ImportError, match=r'tested with \(2\.15 to 2\.21\)'):
        private._find('gone', 'name')


def test_layers_without_keras_2():
    """What tf.layers raise on TensorFlow 2.16 and later without tf-keras."""

    def model_fn(features, labels, mode):
        raise AttributeError('`dense` is not available with Keras 3.')

    with pytest.raises(RuntimeError, match='pip install "tf-keras~=.*LEGACY_KERAS has') as info:
        build(model_fn)
    assert isinstance(info.value.__cause__, AttributeError)
