"""Models that somebody else built, unchanged, and canned estimators: several devices do as one."""

import shutil

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import estimator_mgpu
import libraries
from models import floats, of_all_modes, predict
from towers import assert_close, assert_same, evaluate, train

fc = tf.feature_column


@pytest.mark.no_cover
def test_bert():
    """Biases start away from 0: the gradients of some are 0 up to rounding."""
    batches = libraries.sentences()
    values = train(libraries.bert, batches, 0, steps=0).values
    values = {n: v + 0.1 if n.endswith('/bias') else v for n, v in values.items()}
    runs = [train(libraries.bert, batches, n, values=values) for n in (4, 0)]
    for run in runs:  # The gradient of the keys' biases is 0: a softmax ignores what they add.
        for name in [n for n in run.values if '/key/bias/' in n]:
            np.testing.assert_allclose(run.values.pop(name), 0.0, atol=1e-9)
    assert_same(*runs)
    found, expected = (evaluate(libraries.bert, batches, n, values=values) for n in (4, 0))
    assert_close(found, expected, 1e-5)


def compare_estimators(make, inputs, path, towers, replicate=estimator_mgpu.replicate_estimator):
    """Trains, evaluates and predicts by `make(model_dir)`, and replicated, from one checkpoint."""
    start, one, ours = (str(path / name) for name in ('start', 'one', 'ours'))
    make(start).train(inputs[0], max_steps=1)
    shutil.copytree(start, one)
    shutil.copytree(start, ours)
    results = []
    for estimator in (make(one), replicate(make(ours), devices=towers)):
        estimator.train(inputs[0], max_steps=5)
        values = {n: estimator.get_variable_value(n) for n in estimator.get_variable_names()}
        predicted = list(estimator.predict(inputs[2], yield_single_examples=False))
        results.append([values, estimator.evaluate(inputs[1], steps=3), predicted])
    assert results[0][0]['global_step'] == 5
    assert_close(results[1], results[0], 1e-5)


@pytest.mark.no_cover
@pytest.mark.parametrize('towers, rows', [(3, 12), (4, 10)])
def test_gan(towers, rows, tmp_path):
    """Hooks run the train_ops, of two networks in turn, each on a batch of its own."""
    noise, data = floats(25, 2), (floats(120, 2), floats(120, 3, seed=1) + 1)
    fed = lambda: tf.data.Dataset.from_tensor_slices(data).repeat().batch(rows, rows == 12)  # noqa: E731
    inputs = (fed, fed, lambda: tf.data.Dataset.from_tensor_slices(noise).batch(rows))
    compare_estimators(libraries.gan, inputs, tmp_path, towers)


ROWS = 50
X = np.random.RandomState(0).randn(ROWS, 2).astype(np.float32)
WORDS = np.array(['a', 'b', 'c', 'd', 'e'])[np.random.RandomState(1).randint(5, size=ROWS)]
CLASSES = np.random.RandomState(2).randint(3, size=ROWS)
VALUES = X[:, 0] * 2 + 1


def data(labels, batch):
    features = {'x': X[:, :1], 'word': WORDS}
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ('name', 'namespace'),
    [
        ('DNNRegressor', tf.estimator),
        ('DNNLinearCombinedClassifier', tf.estimator),
        ('DNNLinearCombinedClassifier', tf2.estimator),
    ],
    ids=['DNNRegressor-v1', 'DNNLinearCombinedClassifier-v1', 'DNNLinearCombinedClassifier-v2'],
)
def test_canned(name, namespace, tmp_path):
    """v1 heads sum over the batch, v2 heads average."""
    words = fc.categorical_column_with_vocabulary_list('word', ['a', 'b', 'c', 'd'])
    crossed = fc.crossed_column(['word', fc.bucketized_column(fc.numeric_column('x'), [0.0])], 10)
    wide, deep = [words, crossed], [fc.numeric_column('x', 1), fc.embedding_column(words, 3)]
    if name == 'DNNRegressor':
        labels, options = VALUES, {'feature_columns': deep, 'hidden_units': [4]}
    else:
        labels, options = CLASSES, {'n_classes': 3, 'dnn_hidden_units': [4]}
        options.update(linear_feature_columns=wide, dnn_feature_columns=deep)

    def make(model_dir):
        config = tf.estimator.RunConfig(model_dir, tf_random_seed=3)
        return getattr(namespace, name)(config=config, **options)

    inputs = [lambda: data(labels, 9).repeat(), lambda: data(labels, 8), lambda: data(labels, 7)]
    compare_estimators(make, inputs, tmp_path, 4)


def test_a_spec_for_tpus(tmp_path):
    """What a TPUEstimator without TPUs, as BERT's code has it, is given."""
    tpu = estimator_mgpu.estimator.tpu

    def model_fn(features, labels, mode, params):
        spec = of_all_modes(predict)(features, labels, mode)
        if mode != 'eval':
            return tpu.TPUEstimatorSpec(mode, spec.predictions, spec.loss, spec.train_op)

        def metrics(labels, output):
            return {'error': tf.metrics.mean_absolute_error(labels, output)}

        given = (metrics, [labels, spec.predictions['output']])
        return tpu.TPUEstimatorSpec(mode, loss=spec.loss, eval_metrics=given)

    def input_fn(params):
        rows = tf.data.Dataset.from_tensor_slices((floats(50, 3), floats(50, 1)))
        return rows.batch(params['batch_size'], drop_remainder=True)

    def make(model_dir, fn=model_fn):
        config = tpu.RunConfig(model_dir=model_dir, session_config=estimator_mgpu.session_config(3))
        sizes = {f'{mode}_batch_size': 10 for mode in ('train', 'eval', 'predict')}
        return tpu.TPUEstimator(use_tpu=False, model_fn=fn, config=config, **sizes)

    def replicate(built, devices):
        return make(built.model_dir, estimator_mgpu.replicate(model_fn, devices=devices))

    compare_estimators(make, [input_fn] * 3, tmp_path, 3, replicate)
