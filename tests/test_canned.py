"""Estimators that somebody else built, on several devices: canned ones of TensorFlow 1 and 2."""

import shutil

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import estimator_mgpu

ROWS = 50
X = np.random.RandomState(0).randn(ROWS, 2).astype(np.float32)
WORDS = np.array(['a', 'b', 'c', 'd', 'e'])[np.random.RandomState(1).randint(5, size=ROWS)]
CLASSES = np.random.RandomState(2).randint(3, size=ROWS)
VALUES = X[:, 0] * 2 + 1

fc = tf.feature_column


def columns():
    words = fc.categorical_column_with_vocabulary_list('word', ['a', 'b', 'c', 'd'])
    crossed = fc.crossed_column(['word', fc.bucketized_column(fc.numeric_column('x'), [0.0])], 10)
    wide = [words, crossed]
    deep = [fc.numeric_column('x', 1), fc.embedding_column(words, 3)]
    return wide, deep


def data(labels, batch):
    features = {'x': X[:, :1], 'word': WORDS}
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch)


def build(name, version, config):
    """Returns a canned estimator with optimizers that slots tell of."""
    wide, deep = columns()
    namespace = tf.estimator if version == 1 else tf2.estimator
    make = getattr(namespace, name)
    options = {'n_classes': 3} if 'Classifier' in name else {}
    if name.startswith('Linear'):
        return make(feature_columns=wide, config=config, **options)
    if name.startswith('DNNLinear'):
        return make(
            linear_feature_columns=wide,
            dnn_feature_columns=deep,
            dnn_hidden_units=[4],
            config=config,
            **options,
        )
    return make(feature_columns=deep, hidden_units=[4], config=config, **options)


NAMES = ['LinearClassifier', 'DNNRegressor', 'DNNLinearCombinedClassifier']


@pytest.mark.parametrize('version', [1, 2], ids='v{}'.format)
@pytest.mark.parametrize('name', NAMES)
def test_canned(name, version, tmp_path):
    """v1 heads sum over the batch, v2 heads average; both train and evaluate as on one device."""
    labels = CLASSES if 'Classifier' in name else VALUES
    start, one_dir, our_dir = (str(tmp_path / d) for d in ('start', 'one', 'ours'))

    def config(model_dir):
        return tf.estimator.RunConfig(model_dir, tf_random_seed=3)

    train = lambda: data(labels, 9).repeat()  # noqa: E731
    build(name, version, config(start)).train(train, max_steps=1)
    shutil.copytree(start, one_dir)
    shutil.copytree(start, our_dir)
    one = build(name, version, config(one_dir))
    ours = estimator_mgpu.replicate_estimator(build(name, version, config(our_dir)), devices=4)
    evaluations, variables = [], []
    for estimator in (one, ours):
        estimator.train(train, max_steps=8)
        evaluations.append(estimator.evaluate(lambda: data(labels, 8)))
        variables.append(
            {n: estimator.get_variable_value(n) for n in estimator.get_variable_names()}
        )
    assert set(variables[0]) == set(variables[1])
    for key, expected in variables[0].items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            variables[1][key], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=key
        )
    assert set(evaluations[0]) == set(evaluations[1])
    for key, expected in evaluations[0].items():
        np.testing.assert_allclose(evaluations[1][key], expected, rtol=1e-5, err_msg=key)
    predictions = [list(e.predict(lambda: data(labels, 7))) for e in (one, ours)]
    assert len(predictions[0]) == len(predictions[1]) == ROWS
    key = 'predictions' if 'Regressor' in name else 'probabilities'
    for expected, got in zip(*predictions):
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-4, atol=1e-6)


def test_an_estimator_that_is_replicated_already():
    canned = tf.estimator.LinearRegressor([tf.feature_column.numeric_column('x')])
    once = estimator_mgpu.replicate_estimator(canned, devices=2)
    twice = estimator_mgpu.replicate_estimator(once, devices=2)
    with pytest.raises(ValueError, match='Replicate it once'):
        twice.train(lambda: data(X[:, 0], 8), steps=1)


def test_not_an_estimator():
    with pytest.raises(TypeError, match='a model_fn goes to replicate'):
        estimator_mgpu.replicate_estimator(lambda features, labels: None)


def test_a_spec_for_tpus(tmp_path):
    """What a TPUEstimator without TPUs, as BERT's code has it, is given."""
    tpu = estimator_mgpu.estimator.tpu

    def model_fn(features, labels, mode, params):
        scores = tf.layers.dense(features['x'], 3, kernel_initializer=tf.zeros_initializer())
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=features['y'], logits=scores)
        loss = tf.reduce_mean(losses)
        if mode == 'infer':
            return tpu.TPUEstimatorSpec(mode, predictions={'scores': scores})
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_global_step()) if mode == 'train' else None

        def metrics(labels, scores):
            return {'right': tf.metrics.accuracy(labels, tf.argmax(scores, -1))}

        given = (metrics, [features['y'], scores])
        return tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op, eval_metrics=given)

    def input_fn(params):
        rows = tf.data.Dataset.from_tensor_slices({'x': X, 'y': CLASSES})
        return rows.batch(params['batch_size'], drop_remainder=True)

    found = []
    for towers in (0, 3):
        config = tpu.RunConfig(
            model_dir=str(tmp_path / str(towers)),
            tf_random_seed=5,
            session_config=estimator_mgpu.session_config(3),
        )
        fn = estimator_mgpu.replicate(model_fn, devices=towers) if towers else model_fn
        built = tpu.TPUEstimator(
            use_tpu=False,
            model_fn=fn,
            config=config,
            train_batch_size=10,
            eval_batch_size=10,
            predict_batch_size=10,
        )
        built.train(input_fn, max_steps=4)
        scores = [row['scores'] for row in built.predict(input_fn)]
        found.append((built.evaluate(input_fn, steps=5), np.array(scores)))
    (one, scores), (ours, our_scores) = found
    assert one.keys() == ours.keys() >= {'right', 'loss'}
    for name, value in one.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5)
    np.testing.assert_allclose(our_scores, scores, rtol=1e-4, atol=1e-5)
