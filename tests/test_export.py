"""An export is that of the undecorated model_fn, whichever Estimator writes it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import saved_model_pb2

import estimator_mgpu
from models import floats


def model_fn(features, labels, mode):
    x = features['x']
    w = tf.get_variable('w', [3, 4])
    logits = tf.matmul(x, w)
    scores = tf.nn.softmax(logits)
    classes = tf.tile(tf.constant([['a', 'b', 'c', 'd']]), [tf.shape(x)[0], 1])
    export = tf.estimator.export
    outputs = {
        'serving_default': export.ClassificationOutput(scores, classes),
        'regress': export.RegressionOutput(logits[:, 0]),
        'predict': export.PredictOutput({'logits': logits}),
    }
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, {'logits': logits}, export_outputs=outputs)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    metrics = {'accuracy': tf.metrics.accuracy(labels, tf.argmax(logits, 1))}
    return tf.estimator.EstimatorSpec(mode, {'logits': logits}, loss, train_op, metrics, outputs)


def input_fn():
    x = floats(10, 3)
    labels = (np.abs(x).sum(1) * 10).astype(np.int64) % 4
    return tf.data.Dataset.from_tensor_slices(({'x': x}, labels)).repeat().batch(5)


def serving():
    x = tf.placeholder(tf.float32, [None, 3], 'x')
    return tf.estimator.export.ServingInputReceiver({'x': x}, x)


def defaulted():
    """Somebody's receiver that may be left unfed."""
    x = tf.placeholder_with_default(tf.zeros([1, 3]), [None, 3], 'x')
    return tf.estimator.export.ServingInputReceiver({'x': x}, x)


def parsed():
    examples = tf.placeholder(tf.string, [None], 'examples')
    features = tf.io.parse_example(examples, {'x': tf.io.FixedLenFeature([3], tf.float32)})
    return tf.estimator.export.ServingInputReceiver(features, {'examples': examples})


def supervised():
    x = tf.placeholder(tf.float32, [None, 3], 'x')
    y = tf.placeholder(tf.int64, [None], 'y')
    receiver = tf.estimator.experimental.build_raw_supervised_input_receiver_fn({'x': x}, y)
    return receiver()


def estimators(model_dir):
    """The undecorated one, and replicated ones of both kinds, on one checkpoint."""
    config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(4))
    return {
        'one': tf.estimator.Estimator(model_fn, model_dir, config),
        'plain': tf.estimator.Estimator(
            estimator_mgpu.replicate(model_fn, devices=4), model_dir, config
        ),
        'ours': estimator_mgpu.Estimator(model_fn, model_dir, devices=4),
    }


def assert_same_exports(model_dir, export):
    """The same signatures, and the same nodes, on the same devices: those of the saver."""
    found = {}
    for name, estimator in estimators(model_dir).items():
        saved = saved_model_pb2.SavedModel()
        with open(f'{export(estimator).decode()}/saved_model.pb', 'rb') as file:
            saved.ParseFromString(file.read())
        found[name] = [
            (
                dict(meta.signature_def),
                {n.name: (n.op, n.device, list(n.input)) for n in meta.graph_def.node},
            )
            for meta in saved.meta_graphs
        ]
    assert found['plain'] == found['one'] and found['ours'] == found['one']
    return found['one']


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    model_dir = str(tmp_path_factory.mktemp('model'))
    estimators(model_dir)['ours'].train(input_fn, steps=3)
    return model_dir


@pytest.mark.parametrize('receiver', [serving, parsed, defaulted], ids=lambda f: f.__name__)
def test_export_saved_model(receiver, trained, tmp_path):
    """Of strings there is each signature, of others that for predictions."""
    export = lambda e: e.export_saved_model(str(tmp_path), receiver)  # noqa: E731
    [(signatures, _)] = assert_same_exports(trained, export)
    assert 'predict' in signatures
    assert ('serving_default' in signatures) == (receiver is parsed)


def test_export_of_all_modes(trained, tmp_path):
    modes = tf.estimator.ModeKeys
    receivers = {modes.PREDICT: serving, modes.EVAL: supervised, modes.TRAIN: supervised}
    export = lambda e: e.experimental_export_all_saved_models(str(tmp_path), receivers)  # noqa: E731
    assert len(assert_same_exports(trained, export)) == 3
