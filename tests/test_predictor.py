"""`Estimator.predictor()`: what `predict()` gives for the same batches, from one graph."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.steps import of_graph
from models import floats
from towers import assert_close

MODES = tf.estimator.ModeKeys


def model_fn(features, labels, mode, params):
    """Some predictions are per example, one needs all of them, and some are of the scaffold."""
    with tf.variable_scope('net'):
        hidden = tf.tanh(features['x'] @ tf.get_variable('w', [3, 4])) * features['scale']
    if mode == MODES.TRAIN:
        loss = tf.reduce_mean(tf.square(hidden - 1.0))
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    local = tf.get_local_variable('local', initializer=0.0)
    prices = tf.lookup.KeyValueTensorInitializer(['apple', 'pear'], [2.0, 3.0])
    fruit = tf.nest.flatten(features['fruit'])[0]
    predictions = {
        'hidden': hidden + local,
        'softmax': tf.nn.softmax(tf.reduce_sum(hidden, 1), 0),
        'price': tf.lookup.StaticHashTable(prices, -1.0).lookup(fruit),
        'fruit': fruit,
    }
    only = predictions[params['only']] if params else predictions
    ready = tf.group(tf.tables_initializer(), local.assign(1.0))
    scaffold = tf.train.Scaffold(local_init_op=ready)
    return tf.estimator.EstimatorSpec(mode, predictions=only, scaffold=scaffold)


def batch_of(examples):
    names = np.array(['apple', 'kiwi', 'pear'] * examples, object)[:examples]
    return {'x': floats(examples, 3), 'scale': np.float32(2), 'fruit': (names, names)}


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory):
    """A model_dir with checkpoints of steps 1 and 2."""
    path = str(tmp_path_factory.mktemp('trained'))
    config = tf.estimator.RunConfig(tf_random_seed=1, save_checkpoints_steps=1)
    batch = batch_of(4)
    del batch['fruit']
    tf.estimator.Estimator(model_fn, path, config).train(
        lambda: tf.data.Dataset.from_tensors(batch).repeat(2)
    )
    return path


def estimator_in(model_dir, model_fn=model_fn, devices=3, params=None, **options):
    """One whose session fails if a device is missing."""
    session = tf.ConfigProto(allow_soft_placement=False)
    config = tf.estimator.RunConfig(session_config=session, tf_random_seed=1)
    return estimator_mgpu.Estimator(model_fn, model_dir, config, params, devices=devices, **options)


def counted(model_fn, calls):
    def counting(features, labels, mode, params):
        calls.append(mode)
        return model_fn(features, labels, mode, params)

    return counting


def expected_of(model_dir, batches, params=None, **options):
    """What one device predicts, undecorated."""
    expected = []
    plain = tf.estimator.Estimator(model_fn, model_dir, params=params)
    for batch in batches:
        one = lambda: tf.data.Dataset.from_tensors(batch)  # noqa: B023, E731
        expected += plain.predict(one, yield_single_examples=False, **options)
    return expected


class Built(tf.train.SessionRunHook):
    """Knows how the graph was divided, and counts the steps."""

    def begin(self):
        self.step = of_graph(tf.get_default_graph())
        self.count = 0

    def after_run(self, run_context, run_values):
        self.count += 1


def test_predictions(model_dir, behavior):
    """On fewer examples than devices, too, and on none."""
    calls, hook = [], Built()
    estimator = estimator_in(model_dir, counted(model_fn, calls))
    batches = [batch_of(size) for size in (7, 1, 2, 0, 3, 7)]
    with estimator.predictor(hooks=[hook]) as predict:
        assert not calls
        found = [predict(batch) for batch in batches]
    assert calls == [MODES.PREDICT]
    assert_close(found, expected_of(model_dir, batches), 1e-6)
    assert 'net/Tanh' in hook.step.plan.ops and len(hook.step.devices) == 3 and hook.count == 6


@pytest.mark.parametrize('devices', [1, 3])
def test_one_tensor(model_dir, devices):
    estimator = estimator_in(model_dir, devices=devices, params={'only': 'price'})
    np.testing.assert_array_equal(estimator.predictor()(batch_of(3)), [2.0, -1.0, 3.0])


def test_arguments_of_predict(model_dir):
    options = {'predict_keys': ['softmax'], 'checkpoint_path': f'{model_dir}/model.ckpt-1'}
    batches = [batch_of(7)]
    [expected] = expected_of(model_dir, batches, **options)
    assert_close(estimator_in(model_dir).predictor(**options)(batches[0]), expected, 1e-6)
    [last] = expected_of(model_dir, batches, predict_keys=['softmax'])
    assert not np.allclose(last['softmax'], expected['softmax'])


def test_threads(model_dir):
    """Those of the first calls wait for the one that builds the graph."""
    calls = []
    predict = estimator_in(model_dir, counted(model_fn, calls)).predictor()
    batches = [batch_of(size) for size in (1, 2, 5, 8)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(predict, batches * 5))
    assert len(calls) == 1
    assert_close(found, expected_of(model_dir, batches) * 5, 1e-6)


class Alone(tf.train.SessionRunHook):
    """Fails if a step begins before the last one has ended."""

    def __init__(self):
        self.runs = threading.Lock()

    def before_run(self, run_context):
        assert self.runs.acquire(blocking=False)

    def after_run(self, run_context, run_values):
        self.runs.release()


def test_threads_with_a_hook(model_dir):
    with estimator_in(model_dir).predictor(batch_of(2), hooks=[Alone()]) as predict:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            found = list(threads.map(predict, [batch_of(2)] * 20))
    assert_close(found, found[:1] * 20, 0)


def test_features_that_are_like_arrays(model_dir):
    estimator = estimator_in(model_dir)
    expected = batch_of(2)
    names = expected['fruit'][0]
    lists = {'x': expected['x'].tolist(), 'scale': 2, 'fruit': (names.tolist(), names.astype(str))}
    eager = tf.nest.map_structure(tf.constant, expected)
    given = [expected, lists, eager]
    with estimator.predictor() as predict:
        found = [predict(features) for features in given]
    assert_close(found, expected_of(model_dir, [expected]) * 3, 1e-6)

    first = {**lists, 'scale': 2.0}
    assert_close(estimator.predictor()(first), found[0], 1e-6)  # Floats of Python are float32.


def sums(features, labels, mode):
    """A model of sequences that may have any length."""
    tf.get_variable('unused', [])
    return tf.estimator.EstimatorSpec(mode, predictions=tf.reduce_sum(features, 1))


def test_an_example_of_a_batch():
    """Batches are like it, but for the number of examples."""
    with estimator_in(None, sums).predictor(np.ones([4, 5])) as predict:
        np.testing.assert_array_equal(predict(np.ones([2, 5])), [5, 5])
        assert predict([[1, 2, 3, 4, 6]]).tolist() == [16]
        with pytest.raises(ValueError, match=r'of shape \[7, 2\].*takes .* \[None, 5\]'):
            predict(np.ones([7, 2]))


def test_a_spec_says_what_varies():
    with estimator_in(None, sums).predictor(tf.TensorSpec([None, None], tf.float64)) as predict:
        np.testing.assert_array_equal(predict(np.ones([4, 5])), [5] * 4)
        np.testing.assert_array_equal(predict(np.ones([1, 2])), [2])


def with_vocabulary(features, labels, mode):
    tf.get_variable('unused', [])
    chosen = tf.gather(features['vocabulary'], features['ids'])
    return tf.estimator.EstimatorSpec(mode, predictions=chosen)


def test_broadcast_features():
    estimator = estimator_in(None, with_vocabulary, broadcast=['vocabulary'])
    vocabulary = np.array([5.0, 6.0])
    with estimator.predictor() as predict:
        for ids in ([0, 1, 1, 0], [1]):
            found = predict({'ids': ids, 'vocabulary': vocabulary})
            np.testing.assert_array_equal(found, vocabulary[ids])
        with pytest.raises(
            ValueError, match=r"'vocabulary' is float64 of shape \[3\].*shape \[2\]"
        ):
            predict({'ids': ids, 'vocabulary': np.zeros(3)})
        told = '= 2 is not in (.|\\n)* ran in tower 1, .* in with_vocabulary$'
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            predict({'ids': [0, 2], 'vocabulary': vocabulary})
        assert predict({'ids': [1], 'vocabulary': vocabulary}).tolist() == [6.0]


def tags(features, labels, mode):
    tf.get_variable('unused', [])
    sums = tf.sparse.reduce_sum(features['sparse'], 1) + tf.reduce_sum(features['ragged'], 1)
    return tf.estimator.EstimatorSpec(mode, predictions=tf.reshape(sums, [-1]))


def test_sparse_and_ragged_features(behavior):
    """As eager tensors, and as a session gives them."""
    sparse = tf.SparseTensorValue([[0, 0], [1, 3]], [1.0, 2.0], [2, 4])
    wide = tf.SparseTensorValue([[2, 6]], [4.0], [3, 7])
    ragged = [tf.ragged.constant(rows) for rows in ([[1.0, 2.0], []], [[], [3.0], []])]
    values = [
        tf.ragged.constant_value([[1.0, 2.0], []], dtype=np.float32, row_splits_dtype='int64')
    ]
    values.append(tf.ragged.constant_value([[], [3.0], []], np.float32, row_splits_dtype='int64'))
    with estimator_in(None, tags).predictor() as predict:
        for of_two, of_three in (ragged, values):
            two = predict({'sparse': sparse, 'ragged': of_two})
            np.testing.assert_array_equal(two, [4.0, 2.0])
            three = {'sparse': tf.SparseTensor(*wide), 'ragged': of_three}
            np.testing.assert_array_equal(predict(three), [0.0, 3.0, 4.0])
        with pytest.raises(ValueError, match="'ragged' is float32 of .*takes ragged float32 of"):
            predict({'sparse': sparse, 'ragged': np.zeros([2, 1], np.float32)})


def test_a_serving_input_receiver_fn(model_dir):
    def parsed():
        records = tf.placeholder(tf.string, [None])
        scale = tf.placeholder_with_default(tf.constant(2.0), [])
        columns = {'x': tf.FixedLenFeature([3], tf.float32)}
        columns['fruit'] = tf.FixedLenFeature([], tf.string)
        features = tf.parse_example(records, columns)
        features['scale'] = scale
        receivers = {'examples': records, 'scale': scale}
        return tf.estimator.export.ServingInputReceiver(features, receivers)

    def record(x, fruit):
        example = tf.train.Example()
        example.features.feature['x'].float_list.value.extend(x)
        example.features.feature['fruit'].bytes_list.value.append(fruit.encode())
        return example.SerializeToString()

    hook = Built()
    batch = batch_of(5)
    records = [record(*one) for one in zip(batch['x'], batch['fruit'][0])]
    predict = estimator_in(model_dir).predictor(serving_input_receiver_fn=parsed, hooks=[hook])
    assert_close(predict({'examples': records}), expected_of(model_dir, [batch])[0], 1e-6)
    assert 'net/Tanh' in hook.step.plan.ops
    doubled = predict({'examples': records, 'scale': np.float32(4)})['hidden'] - 1
    np.testing.assert_allclose(doubled, 2 * predict({'examples': records})['hidden'] - 2, 1e-5)
    with pytest.raises(ValueError, match=r"lacks feature 'examples' and has feature 'x'\. This"):
        predict({'x': records})


LIKE_ALL = (
    r"takes feature 'x' \(float32 of shape \[None, 3\]\), feature 'scale' \(float32 of shape "
)
WRONG = {
    'missing': ({'x': None}, ValueError, "The batch lacks feature 'x'. This predictor " + LIKE_ALL),
    'unknown': ({'y': 1}, ValueError, "The batch has feature 'y'. This predictor " + LIKE_ALL),
    'dtype': (
        {'x': np.zeros([2, 3])},
        ValueError,
        r"feature 'x' is float64 of shape \[2, 3\]. This predictor takes float32 of shape \[None,",
    ),
    'shape': ({'x': floats(2, 4)}, ValueError, r'of shape \[2, 4\]. This .* of shape \[None, 3\]'),
    'rank': ({'x': floats(2)}, ValueError, r'of shape \[2\]. This .* of shape \[None, 3\]'),
    'sizes': ({'x': floats(3, 3)}, ValueError, "differ: feature 'x' has 3, feature 'fruit/0' has"),
    'structure': ({'fruit': 'kiwi'}, ValueError, "lacks feature 'fruit/0', .* has feature 'fruit'"),
    'nothing to take': (
        {'x': (), 'fruit': ()},
        ValueError,
        "lacks feature 'x', feature 'fruit/0',",
    ),
    'list': ({'x': [['a']]}, TypeError, "feature 'x' is a list that makes no array of float32 of"),
    'no array': ({'scale': object()}, TypeError, "'scale' is a object that makes no array of"),
    'nothing': ({'scale': ...}, TypeError, "'scale' is a ellipsis that makes no array of"),
}


@pytest.fixture(scope='module')
def opened(model_dir):
    """A predictor that has its graph before the first call."""
    calls = []
    estimator = estimator_in(model_dir, counted(model_fn, calls))
    with estimator.predictor(batch_of(2)) as predict:
        assert calls == [MODES.PREDICT]
        yield predict
    assert calls == [MODES.PREDICT]


@pytest.mark.parametrize('changes, error, message', WRONG.values(), ids=WRONG)
def test_wrong_features(opened, changes, error, message):
    features = {
        name: value for name, value in {**batch_of(2), **changes}.items() if value is not None
    }
    with pytest.raises(error, match=message) as info:
        opened(features)
    assert '.. ' not in str(info.value)
    assert len(opened(batch_of(2))['hidden']) == 2


def test_features_without_names(opened):
    with pytest.raises(
        ValueError, match="lacks feature 'x', .* and has an array without a name. Th"
    ):
        opened(floats(2, 3))
    with estimator_in(None, sums).predictor(np.ones([4, 5])) as predict:
        with pytest.raises(ValueError, match=r"lacks an array without .* has feature 'x'\. This"):
            predict({'x': np.ones([4, 5])})


def test_a_tensor_of_a_graph(opened):
    with tf.Graph().as_default(), pytest.raises(TypeError, match="'x' is .* which is of a graph"):
        opened({**batch_of(2), 'x': tf.zeros([2, 3])})


def test_wrong_arguments(model_dir):
    estimator = estimator_in(model_dir)
    with pytest.raises(ValueError, match='features and a serving_input_receiver_fn. Give one of'):
        estimator.predictor(batch_of(2), serving_input_receiver_fn=lambda: None)
    for features in (lambda: None, tf.compat.v2.data.Dataset.range(3)):
        for called in (estimator.predictor, estimator.predictor()):
            with pytest.raises(
                TypeError, match='a batch of arrays, rather than a dataset or an in'
            ):
                called(features)
    with pytest.raises(TypeError, match='=3 is no function'):
        estimator.predictor(serving_input_receiver_fn=3)
    with pytest.raises(TypeError, match='returned None. It has to return a'):
        estimator.predictor(serving_input_receiver_fn=lambda: None)
    with pytest.raises(TypeError, match='is one hook. Give a list'):
        estimator.predictor(hooks=Built())
    with pytest.raises(TypeError, match='hooks=3 is no list of hooks. Give a list'):
        estimator.predictor(hooks=3)
    with pytest.raises(TypeError, match='checkpoint_path=3 is no path. Give that of a'):
        estimator.predictor(checkpoint_path=3)
    with pytest.raises(ValueError, match='is a directory. Give a checkpoint in it'):
        estimator.predictor(batch_of(2), checkpoint_path=model_dir)


def test_a_first_batch_that_fails(model_dir):
    """The next one may be right."""
    predict = estimator_in(model_dir).predictor()
    with pytest.raises(KeyError):
        predict({'x': floats(2, 3)})
    assert len(predict(batch_of(2))['hidden']) == 2


def test_closed(model_dir):
    with estimator_in(model_dir).predictor() as predict:
        predict(batch_of(2))
        session = predict._model.session
        assert not session.should_stop()
    assert session.should_stop()
    for _ in range(2):
        with pytest.raises(RuntimeError, match='This predictor is closed. Open another one'):
            predict(batch_of(2))
        predict.close()


def test_closed_while_it_predicts():
    """The call that is running comes to its end."""
    running, released = threading.Event(), threading.Event()

    def wait(x):
        if x.size:
            running.set()
            assert released.wait(60)
        return x

    def model_fn(features, labels, mode):
        tf.get_variable('unused', [])
        x = tf.numpy_function(wait, [features], tf.float64)
        return tf.estimator.EstimatorSpec(mode, predictions=tf.identity(x))

    predict = estimator_in(None, model_fn).predictor(tf.TensorSpec([None], tf.float64))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        call = threads.submit(predict, np.ones(2))
        assert running.wait(60)
        closing = threads.submit(predict.close)
        with pytest.raises(RuntimeError, match='This predictor is closed'):
            while True:
                predict(np.ones(0))
        assert not closing.done()
        released.set()
        np.testing.assert_array_equal(call.result(), [1, 1])
        closing.result()


def test_without_a_checkpoint(tmp_path, caplog):
    with estimator_in(str(tmp_path)).predictor() as predict:
        assert len(predict(batch_of(2))['hidden']) == 2
    assert (
        f'There is no checkpoint in {tmp_path}, so predictions are those of initial' in caplog.text
    )
