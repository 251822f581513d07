"""`replicate_estimator`: what an estimator's class adds does on several devices as on one."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow_estimator.python.estimator.canned.saved_model_estimator import SavedModelEstimator

import estimator_mgpu
from models import adam, floats, of_all_modes, predict
from towers import assert_close, behavior_of

KMeans = tf.estimator.experimental.KMeans
ROWS = floats(40, 2)


def rows_of_9():
    return tf.data.Dataset.from_tensor_slices(ROWS).batch(9)


def three(make):
    """What `make()` gives, as it is, and on one device and on three."""
    return [make(), *(estimator_mgpu.replicate_estimator(make(), devices=n) for n in (1, 3))]


@pytest.mark.parametrize(('initial', 'version'), [('random', 'v1'), ('kmeans_plus_plus', 'v2')])
def test_kmeans(initial, version):
    """Not in mini-batches, where a run on one device differs from the next."""

    def make():
        config = tf.estimator.RunConfig(tf_random_seed=1)
        return KMeans(3, seed=1, initial_clusters=initial, use_mini_batch=False, config=config)

    def results_of(estimator):
        estimator.train(lambda: rows_of_9().repeat(), steps=7)
        distances = np.array(list(estimator.transform(rows_of_9)))
        clusters = np.array(list(estimator.predict_cluster_index(rows_of_9)))
        np.testing.assert_array_equal(distances.argmin(1), clusters)
        return [estimator.cluster_centers(), estimator.score(rows_of_9), distances, clusters]

    with behavior_of(version):
        estimators = three(make)
        assert all(isinstance(estimator, KMeans) for estimator in estimators)
        found = [results_of(estimator) for estimator in estimators]
    for ours in found[1:]:
        assert_close(ours, found[0], 1e-5)


def test_a_saved_model(tmp_path):
    """It brings its own global step, and its own variables to begin with."""
    experimental = tf.estimator.experimental

    def model_fn(features, labels, mode):
        spec = of_all_modes(predict)(features['x'], labels, mode)
        serving = {'serving_default': tf.estimator.export.PredictOutput(spec.predictions)}
        return spec._replace(export_outputs=serving) if mode == 'infer' else spec

    def supervised():
        x, y = (tf.placeholder(tf.float32, [None, n]) for n in (3, 1))
        return experimental.build_raw_supervised_input_receiver_fn({'x': x}, y)()

    def serving():
        x = tf.placeholder(tf.float32, [None, 3])
        return tf.estimator.export.ServingInputReceiver({'x': x}, {'x': x})

    def input_fn():
        rows = tf.data.Dataset.from_tensor_slices(({'x': floats(23, 3)}, {'label': floats(23, 1)}))
        return rows.batch(9)

    plain = tf.estimator.Estimator(model_fn, config=tf.estimator.RunConfig(tf_random_seed=1))
    plain.train(lambda: input_fn().map(lambda x, y: (x, y['label'])))
    receivers = {'train': supervised, 'eval': supervised, 'infer': serving}
    saved = plain.experimental_export_all_saved_models(str(tmp_path), receivers).decode()
    found = []
    for estimator in three(lambda: SavedModelEstimator(saved)):
        assert estimator.latest_checkpoint().startswith(saved)
        estimator.train(input_fn)
        assert estimator.latest_checkpoint().startswith(estimator.model_dir)
        values = {n: estimator.get_variable_value(n) for n in estimator.get_variable_names()}
        predicted = list(estimator.predict(input_fn, yield_single_examples=False))
        found.append([values, estimator.evaluate(input_fn), predicted])
    assert found[0][0]['global_step'] == 6
    for ours in found[1:]:
        assert_close(ours, found[0], 1e-5)
    assert estimator.explain(input_fn).sharded


class Scaled(tf.estimator.Estimator):
    """A user's own, with an attribute that its model_fn looks at, and what may be overridden."""

    def __init__(self, scale):
        self.scale = scale
        super().__init__(self._build, config=tf.estimator.RunConfig(tf_random_seed=1))

    def _build(self, features, labels, mode):
        return of_all_modes(lambda x: self.scale * predict(x), adam)(features, labels, mode)

    def model_fn(self, features):
        return 'overridden'

    def trained(self, input_fn):
        return self.train(input_fn).get_variable_value('net/w')


def input_fn():
    return tf.data.Dataset.from_tensor_slices((floats(23, 3), floats(23, 1))).batch(9)


def test_a_users_class(tmp_path):
    found = []
    for estimator in three(lambda: Scaled(3.0)):
        estimator.scale = 2.0  # Its model_fn is bound to it.
        assert estimator.model_fn(None) == 'overridden'
        found.append(estimator.trained(input_fn))
    assert_close(found[1:], found[:1] * 2, 1e-5)
    assert type(estimator).__name__ == 'Scaled' and type(estimator).__mro__[1] is Scaled
    assert isinstance(estimator, estimator_mgpu.Estimator)
    assert estimator.config.session_config.device_count['CPU'] == 3
    assert estimator.explain(input_fn).sharded
    assert estimator.train(input_fn).get_variable_value('global_step') == 6
    copied = copy.deepcopy(estimator)
    assert type(copied) is type(estimator) and copied.scale == 2.0


def test_pickle():
    """As far as the attributes go."""
    made = type(estimator_mgpu.replicate_estimator(Scaled(3.0), devices=2))
    empty = made.__new__(made)
    empty.scale = 5.0
    found = pickle.loads(pickle.dumps(empty))
    assert type(found) is made and vars(found) == {'scale': 5.0}


def test_a_plain_estimator_has_the_class_of_ours():
    plain = tf.estimator.Estimator(of_all_modes(predict))
    assert type(estimator_mgpu.replicate_estimator(plain, devices=2)) is estimator_mgpu.Estimator


def test_a_class_that_can_have_no_other():
    class Last(tf.estimator.Estimator):
        def __init_subclass__(cls):
            raise TypeError('there is none after it')

    match = 'both Last and an Estimator .*there is none after it.*plain tf.estimator.Estimator of'
    with pytest.raises(TypeError, match=match):
        estimator_mgpu.replicate_estimator(Last(of_all_modes(predict)), devices=2)


def tpu_model_fn(features, labels, mode, params):
    """Reads the batch size of the mode, as most TPU code does."""
    spec = of_all_modes(lambda x: predict(x) * params['batch_size'])(features, labels, mode)
    return tf.estimator.tpu.TPUEstimatorSpec(mode, spec.predictions, spec.loss, spec.train_op)


def tpu_input_fn(params):
    rows = tf.data.Dataset.from_tensor_slices((floats(23, 3), floats(23, 1)))
    return rows.batch(params['batch_size'])


def test_a_tpu_estimator(tmp_path):
    """Without TPUs. It gives its model_fn and its input_fn the batch size of each mode."""
    tpu = estimator_mgpu.estimator.tpu

    def make():
        config = tpu.RunConfig(tf_random_seed=1)
        sizes = dict(train_batch_size=9, eval_batch_size=6, predict_batch_size=4)
        return tpu.TPUEstimator(use_tpu=False, model_fn=tpu_model_fn, config=config, **sizes)

    found = []
    for estimator in three(make):
        estimator.train(tpu_input_fn)
        loss = estimator.evaluate(tpu_input_fn)['loss']
        predictions = [row['output'] for row in estimator.predict(tpu_input_fn)]
        found.append([estimator.get_variable_value('net/w'), loss, np.stack(predictions)])
    for ours in found[1:]:
        assert_close(ours, found[0], 1e-5)

    assert estimator.explain(tpu_input_fn).sharded
    with estimator.predictor() as predict_batch:
        assert_close(predict_batch(floats(23, 3))['output'], found[0][-1], 1e-5)


def metrics(labels, output):
    return {'error': tf.metrics.mean_absolute_error(labels, output)}


def tpu_model_fn_with_calls(features, labels, mode, params):
    """Its metrics, and what the host does, are functions of tensors that a TPU would send."""
    spec = tpu_model_fn(features, labels, mode, params)
    calls = {}
    if mode == 'eval':
        calls['eval_metrics'] = (metrics, [labels, spec.predictions['output']])
    if mode == 'train':
        calls['host_call'] = (lambda loss: [tf.print(loss)], [spec.loss[None]])
    results = spec.predictions, spec.loss, spec.train_op
    return tf.estimator.tpu.TPUEstimatorSpec(mode, *results, **calls)


@pytest.mark.parametrize('model_fn', [tpu_model_fn, tpu_model_fn_with_calls])
def test_what_is_for_tpus_is_verified(model_fn):
    params = {'batch_size': 9}
    of_spec = estimator_mgpu.verify(model_fn, tpu_input_fn, params, devices=3)

    tpu = estimator_mgpu.estimator.tpu
    sizes = dict(train_batch_size=9, eval_batch_size=6, predict_batch_size=4)
    estimator = tpu.TPUEstimator(model_fn, use_tpu=False, config=tpu.RunConfig(), **sizes)
    of_estimator = estimator_mgpu.verify(estimator, tpu_input_fn, devices=3)
    several = estimator_mgpu.replicate_estimator(estimator, devices=2)
    for result in of_spec, of_estimator, estimator_mgpu.verify(several, tpu_input_fn):
        assert result.exact and {d.mode for d in result.differences} == {'train', 'eval', 'infer'}
        compared = {d.what for d in result.differences if d.mode == 'eval'}
        assert ('error' in compared) == (model_fn is tpu_model_fn_with_calls)
    assert several.explain(tpu_input_fn).sharded


def test_a_model_fn_that_asks_its_estimator():
    """It's a function that was defined in a method, with a variable that is filled in later."""

    class Asking(tf.estimator.Estimator):
        def __init__(self):
            def model_fn(features, labels, mode, *, scale=2.0):
                return of_all_modes(lambda x: later * scale * predict(x) + self.shift)(
                    features, labels, mode
                )

            self.shift = 0.0
            super().__init__(model_fn, config=tf.estimator.RunConfig(tf_random_seed=1))
            later = 3.0

    found = []
    for estimator in three(Asking):
        estimator.shift = 5.0
        estimator.train(input_fn)
        found.append(list(estimator.predict(input_fn, yield_single_examples=False)))
    for ours in found[1:]:
        assert_close(ours, found[0], 1e-5)


def test_what_is_replicated_already():
    once = estimator_mgpu.replicate_estimator(tf.estimator.LinearRegressor([]), devices=2)
    replicated = estimator_mgpu.replicate(of_all_modes(predict), devices=2)
    for estimator in (once, tf.estimator.Estimator(replicated)):
        with pytest.raises(ValueError, match='replicated already'):
            estimator_mgpu.replicate_estimator(estimator, devices=2)


def test_not_an_estimator():
    with pytest.raises(TypeError, match='a model_fn goes to replicate'):
        estimator_mgpu.replicate_estimator(lambda features, labels: None)
    with pytest.raises(TypeError, match='a model_fn goes to replicate'):
        estimator_mgpu.replicate_estimator(tf.estimator.LinearRegressor)
