"""Bad input is a clear error at build time: what was given, what is legal, and the remedy."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.distribute.distribute_config import DistributeConfig

import estimator_mgpu
from estimator_mgpu import devices
from estimator_mgpu.partition import rules
from estimator_mgpu.tf_internals import function_calls, private
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


def with_other_sizes():
    return {'a': tf.zeros([4, 3]), 'b': tf.zeros([5, 3])}


def with_a_vocabulary():
    return {'a': tf.zeros([4, 3]), 'deep': {'vocabulary': tf.zeros([9])}}


def with_a_dataset():
    return {'a': tf.data.Dataset.range(3)}


def with_nested_names():
    return {'a': tf.zeros([4, 3]), 'b': {'c': tf.zeros([2])}}


def scalar():
    return tf.constant(2.0)


def a_scalar():
    return {'a': scalar()}


ERRORS_OF_BATCHES = {
    # what is given: (features, options), (error, what its message says)
    'other sizes': (
        (with_other_sizes, {}),
        (ValueError, "feature 'a' has 4, feature 'b' has 5, labels has 4.*broadcast"),
    ),
    'no batch dimension': (
        (with_a_vocabulary, {}),
        (ValueError, r"feature 'deep/vocabulary' has 9.*named in replicate\(broadcast"),
    ),
    'a dataset': (
        (with_a_dataset, {}),
        (TypeError, "feature 'a' is of .*Dataset.*dense, sparse and ragged"),
    ),
    'scalars only': (
        (a_scalar, {'labels': scalar}),
        (ValueError, 'no feature and no label has examples.*batch'),
    ),
    'broadcast of no feature': (
        (with_nested_names, {'broadcast': ['vocab']}),
        (ValueError, "'vocab'.*no such feature.*are: a, b, b/c, c"),
    ),
    'broadcast is a text': (
        (None, {'broadcast': 'vocab'}),
        (TypeError, r"\['vocab'\]"),
    ),
    'broadcast is a number': (
        (None, {'broadcast': 3}),
        (TypeError, 'broadcast=3 names no features. Give a list of their names'),
    ),
    'broadcast is nested': (
        (None, {'broadcast': [['a']]}),
        (TypeError, r"broadcast=\[\['a'\]\] names no features"),
    ),
    'broadcast is bytes': (
        (None, {'broadcast': b'a'}),
        (TypeError, "broadcast=b'a' names no features"),
    ),
}


@pytest.mark.parametrize(('given', 'expected'), ERRORS_OF_BATCHES.values(), ids=ERRORS_OF_BATCHES)
def test_batch(given, expected):
    features, options = given
    error, message = expected
    with pytest.raises(error, match=f'(?s){message}'):
        build(regression(adam), features, **options)


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
        (b'/cpu:0', TypeError, "b'/cpu:0' in devices is of bytes, not a str such as .*GPU:0"),
        (['/cpu:0', '/cpu:-1'], ValueError, 'names no numbered CPU or GPU'),
        ([0, 1], TypeError, '0 in devices is of int, not a str such as .*GPU:0'),
        (['/gpu:0'], ValueError, 'this machine has no GPU'),
        (['/device:TPU:0'], ValueError, 'names no numbered CPU or GPU'),
        (['cpu'], ValueError, 'names no numbered CPU or GPU'),
        (['/nonsense'], ValueError, 'names no numbered CPU or GPU'),
    ],
    ids=repr,
)
def test_devices(given, error, message, gpus):
    gpus()  # a machine that has none
    calls = [lambda: build(regression(adam), devices=given), lambda: devices.resolve(given)]
    if given != ['/gpu:0']:  # Which devices there are is seen as the model_fn is called.
        calls.append(lambda: estimator_mgpu.replicate(devices=given))
    for make in calls:
        with pytest.raises(error, match=rf'{message}.*(devices is None \(every GPU\)|nvidia-smi)'):
            make()


@pytest.mark.parametrize('make', [estimator_mgpu.replicate, estimator_mgpu.Estimator])
def test_other_types_that_will_do(make):
    """A generator is read once, whatever else is made of it then."""
    two = devices.resolve(2)
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
    two = ['/device:GPU:0', '/device:GPU:1']
    assert devices.resolve(2) == devices.resolve(None) == devices.resolve() == two
    for given in (3, ['/gpu:0', '/gpu:2']):
        match = "asks for '/device:GPU:2', but this machine has 2 GPUs.*List a device twice"
        with pytest.raises(ValueError, match=match):
            devices.resolve(given)


BOTH = [estimator_mgpu.replicate, estimator_mgpu.Estimator]


@pytest.mark.parametrize('make', BOTH)
@pytest.mark.parametrize('value', ['all', np.zeros(3)], ids=['text', 'array'])
@pytest.mark.parametrize(
    ('name', 'legal'),
    [
        ('variables', 'cpu, first, spread'),
        ('batch_norm', 'batch, device'),
        ('input', 'chief, machine'),
    ],
)
def test_unknown_value_of_an_option(name, legal, value, make):
    with pytest.raises(ValueError, match=f'is not known. Legal are {legal}.') as error:
        make(regression(adam), **{name: value})
    if isinstance(value, str):
        assert f'{name}={value!r} is not known' in str(error.value)


@pytest.mark.parametrize('make', BOTH)
@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        ({'input': 'machine', 'broadcast': ['x']}, ValueError, "broadcast needs input='chief'"),
        (
            {'devices': 2, 'loss_reduction': 'mean'},
            TypeError,
            'takes no loss_reduction: .*global batch.*Leave it out',
        ),
        (
            {'devices': 2, 'loss_weight': 'mean'},
            TypeError,
            'takes no loss_weight: .*global batch.*Leave it out',
        ),
        ({'device': 2}, TypeError, 'takes no device: its options are devices, broad'),
    ],
    ids=['broadcast of machines', 'loss_reduction', 'loss_weight', 'device'],
)
def test_options_that_there_are_not(options, error, message, make):
    with pytest.raises(error, match=message):
        make(regression(adam), **options)


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


def a_dataset():
    return tf.data.Dataset.from_tensors((tf.zeros([4, 3]), tf.zeros([4, 1])))


def estimator(**options):
    return estimator_mgpu.Estimator(regression(adam), devices=2, **options)


DATASET = 'Give a function that makes the batches: lambda: data'


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: estimator_mgpu.Estimator(regression(adam), config={}),
            'config={} is of dict. Give a tf.estimator.RunConfig, or',
        ),
        (
            lambda: estimator_mgpu.session_config(2, {}),
            'base is of dict, not a tf.ConfigProto',
        ),
        (
            lambda: estimator_mgpu.session_config(2, tf.estimator.RunConfig()),
            'is of RunConfig, not a tf.ConfigProto',
        ),
        (lambda: estimator().train(a_dataset()), DATASET),
        (lambda: estimator(input='machine').train(a_dataset()), DATASET),
        (lambda: estimator().evaluate(a_dataset()), DATASET),
        (lambda: next(estimator().predict(a_dataset())), DATASET),
        (lambda: estimator().explain(a_dataset()), DATASET),
        (lambda: estimator_mgpu.verify(regression(adam), a_dataset()), DATASET),
        (
            lambda: estimator().train(a_dataset, estimator_mgpu.ProgressHook()),
            r'is one hook. Give a list: hooks=\[hook\]',
        ),
        (lambda: estimator().train(a_dataset, steps='3'), "steps='3' is no number of steps. Give"),
        (lambda: estimator().evaluate(a_dataset, steps='3'), "steps='3' is no number of steps"),
    ],
    ids=[
        'config is a dict',
        'base is a dict',
        'base is a RunConfig',
        'train on a dataset',
        'train on machines on a dataset',
        'evaluate a dataset',
        'predict a dataset',
        'explain a dataset',
        'verify on a dataset',
        'one hook',
        'train for a text of steps',
        'evaluate a text of steps',
    ],
)
def test_arguments_of_another_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: estimator_mgpu.replicate(regression(adam), 2),
            r'2 was given without a name.*replicate\(model_fn, devices=2\)',
        ),
        (
            lambda: estimator_mgpu.replicate_estimator(tf.estimator.LinearRegressor([]), 2, 'cpu'),
            r"2, 'cpu' was given without.*replicate_estimator\(estimator, devices=2\)",
        ),
        (
            lambda: estimator_mgpu.Estimator(regression(adam), 2),
            r'model_dir=2 is of int, which is no path.*Estimator\(model_fn, devices=2\)',
        ),
        (
            lambda: estimator_mgpu.Estimator(regression(adam), ['/cpu:0']),
            r'model_dir=.* is of list, which is no path',
        ),
    ],
    ids=['replicate', 'replicate_estimator', 'Estimator', 'Estimator of a list'],
)
def test_devices_without_a_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_partial_of_a_replicated_model_fn():
    partial = functools.partial(estimator_mgpu.replicate(regression(adam), devices=2))
    for make in (estimator_mgpu.replicate, estimator_mgpu.Estimator):
        with pytest.raises(ValueError, match=r'partial of one .*replicate\(functools.partial\('):
            make(partial, devices=2)


def test_estimators_that_are_missing():
    gone = "no attribute 'BoostedTreesClassifier': tensorflow-estimator 2.15 has no boosted trees"
    for module in (tf.estimator, tf.compat.v2.estimator, estimator_mgpu.estimator.experimental):
        with pytest.raises(AttributeError, match=gone):
            module.BoostedTreesClassifier  # noqa: B018
        assert not hasattr(module, 'nothing')
    elsewhere = "no attribute 'RNNClassifier'; it is tf.compat.v2.estimator.experimental.RNN"
    with pytest.raises(AttributeError, match=elsewhere):
        tf.estimator.RNNClassifier  # noqa: B018


def untrainable(features, labels, mode):
    tf.get_variable('w', [2])
    loss = tf.reduce_mean(features)
    return spec_of(mode, loss, adam(loss))


def nested(devices):
    replicated = estimator_mgpu.replicate(regression(adam), devices=devices)
    return lambda features, labels, mode: replicated(features, labels, mode)


def returning(value):
    return lambda features, labels, mode: value


NO_SPEC = 'has to return .*EstimatorSpec'
TWICE = 'Replicate it once'


@pytest.mark.parametrize(
    ('model_fn', 'error', 'message'),
    [
        (untrainable, ValueError, 'No gradients provided for any variable'),
        (nested(devices=None), ValueError, TWICE),
        (nested(devices=1), ValueError, TWICE),
        (nested(devices=2), ValueError, TWICE),
        (returning(None), TypeError, NO_SPEC),
        (returning(3.0), TypeError, NO_SPEC),
        (returning('loss'), TypeError, NO_SPEC),
    ],
    ids=[
        'no gradients',
        'replicated twice',
        'replicated twice, for one device',
        'replicated twice, for two devices',
        'returns nothing',
        'returns a number',
        'returns a text',
    ],
)
def test_model_fn(model_fn, error, message):
    with pytest.raises(error, match=message):
        build(model_fn)


def test_a_call_outside_of_a_graph():
    model_fn = estimator_mgpu.replicate(regression(adam), devices=2)
    with pytest.raises(RuntimeError, match='builds a graph. Let an Estimator call it'):
        model_fn(np.zeros([4, 3], np.float32), np.zeros([4, 1], np.float32), TRAIN)


@pytest.mark.parametrize('devices', [1, 2])
def test_a_call_in_a_function(devices):
    model_fn = estimator_mgpu.replicate(regression(adam), devices=devices)
    with pytest.raises(RuntimeError, match='rather than eagerly or in a function of TensorFlow'):
        tf.wrap_function(
            lambda: model_fn(tf.zeros([4, 3]), tf.zeros([4, 1]), TRAIN).loss, signature=[]
        )


def test_a_replicated_model_fn_in_a_function_of_another_one():
    inner = estimator_mgpu.replicate(regression(adam), devices=2)

    def outer(features, labels, mode):
        return tf.function(lambda x: inner(x, labels, mode).loss)(features)

    with pytest.raises(ValueError, match='is called by another one'):
        build(outer)


def arguments_with_strategies():
    """Arguments of RunConfig that put a model_fn on several devices."""
    strategy = tf.distribute.MirroredStrategy(['/cpu:0'])
    yield {'train_distribute': strategy}
    yield {'eval_distribute': strategy}
    if tf.version.VERSION.startswith('2.15'):  # Later ones refuse it as a RunConfig is made.
        yield {'experimental_distribute': DistributeConfig(eval_distribute=strategy)}
        machines = dict(train_distribute=strategy, remote_cluster={'worker': ['a:1']})
        yield {'experimental_distribute': DistributeConfig(**machines)}


def test_strategies_of_a_run_config():
    """They are refused at once, by the name under which they were given."""
    canned = tf.estimator.LinearRegressor([])
    for arguments in arguments_with_strategies():
        [name] = arguments
        config = tf.estimator.RunConfig(**arguments)
        match = f'has {name}=(Mirrored|DistributeConfig).*Leave out {name}: '
        with pytest.raises(ValueError, match=match):
            build(regression(adam), config=config)
        with pytest.raises(ValueError, match=match):
            estimator_mgpu.Estimator(regression(adam), config=config)
        canned._config = config
        with pytest.raises(ValueError, match=match):
            estimator_mgpu.replicate_estimator(canned, devices=2)


@pytest.mark.skipif(tf.version.VERSION.startswith('2.15'), reason='It has what is needed.')
def test_strategies_that_tensorflow_removed():
    given = DistributeConfig(eval_distribute=tf.distribute.MirroredStrategy(['/cpu:0']))
    with pytest.raises(NotImplementedError, match='What experimental_distribute needs was removed'):
        tf.estimator.RunConfig(experimental_distribute=given)


def test_the_scope_of_a_strategy():
    model_fn = estimator_mgpu.replicate(lambda features: None, devices=2)
    with tf.Graph().as_default(), tf.distribute.OneDeviceStrategy('/cpu:0').scope():
        with pytest.raises(ValueError, match='called in the scope of OneDeviceStrategy, .*Leave'):
            model_fn(tf.zeros([4, 3]))


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


def test_a_function_whose_nodes_have_another_order():
    """In a later TensorFlow, say: then they aren't taken for each other."""
    scalar = tf.TensorSpec([], tf.float32)
    sine, cosine = (tf.function(f).get_concrete_function(scalar) for f in (tf.sin, tf.cos))
    with pytest.raises(RuntimeError, match='not in the order of its graph in TensorFlow.*report'):
        function_calls.function_ops(sine.function_def, cosine.graph)


def test_layers_without_keras_2():
    """What tf.layers raise on TensorFlow 2.16 and later without tf-keras."""

    def model_fn(features, labels, mode):
        raise AttributeError('`dense` is not available with Keras 3.')

    with pytest.raises(RuntimeError, match='pip install "tf-keras~=.*LEGACY_KERAS has') as info:
        build(model_fn)
    assert isinstance(info.value.__cause__, AttributeError)
