"""An export is that of the undecorated model_fn, whichever Estimator writes it."""

import json
import subprocess
import sys

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
    loss = train_op = None
    metrics = None
    if mode != tf.estimator.ModeKeys.PREDICT:
        loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
        train_op = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        metrics = {'accuracy': tf.metrics.accuracy(labels, tf.argmax(logits, 1))}
    return tf.estimator.EstimatorSpec(
        mode,
        predictions={'logits': logits, 'class': tf.argmax(logits, 1)},
        loss=loss,
        train_op=train_op,
        eval_metric_ops=metrics,
        export_outputs=outputs,
    )


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


def graphs(path):
    """Returns each MetaGraphDef of a SavedModel."""
    saved = saved_model_pb2.SavedModel()
    with open(f'{path}/saved_model.pb', 'rb') as file:
        saved.ParseFromString(file.read())
    return list(saved.meta_graphs)


def assert_same_export(ours, one):
    """The same signatures, and the same nodes: names, ops, inputs and attributes."""
    assert len(ours) == len(one)
    for meta, expected in zip(ours, one):
        assert meta.signature_def == expected.signature_def
        nodes = {node.name: node for node in meta.graph_def.node}
        expected_nodes = {node.name: node for node in expected.graph_def.node}
        assert set(nodes) == set(expected_nodes)
        for name, node in nodes.items():
            assert node.op == expected_nodes[name].op
            assert node.device == expected_nodes[name].device  # of nodes of the saver alone
            assert list(node.input) == list(expected_nodes[name].input)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    model_dir = str(tmp_path_factory.mktemp('model'))
    estimators(model_dir)['ours'].train(input_fn, steps=3)
    return model_dir


@pytest.mark.parametrize('receiver', [serving, parsed, defaulted], ids=lambda f: f.__name__)
def test_export_saved_model(receiver, trained, tmp_path):
    exports = {
        name: graphs(e.export_saved_model(str(tmp_path / name), receiver).decode())
        for name, e in estimators(trained).items()
    }
    assert_same_export(exports['plain'], exports['one'])
    assert_same_export(exports['ours'], exports['one'])


def test_export_of_all_modes(trained, tmp_path):
    modes = tf.estimator.ModeKeys
    receivers = {modes.PREDICT: serving, modes.EVAL: supervised, modes.TRAIN: supervised}
    exports = {
        name: graphs(
            e.experimental_export_all_saved_models(str(tmp_path / name), receivers).decode()
        )
        for name, e in estimators(trained).items()
    }
    assert len(exports['one']) == 3
    assert_same_export(exports['plain'], exports['one'])
    assert_same_export(exports['ours'], exports['one'])


PROGRAM = """
import json, sys
import numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
examples = []
for row in json.loads(sys.argv[2]):
    example = tf.train.Example()
    example.features.feature['x'].float_list.value.extend(row)
    examples.append(example.SerializeToString())
out = {}
for name, signature in model.signatures.items():
    [key] = [k for k in signature.structured_input_signature[1]]
    for output, value in signature(**{key: tf.constant(examples)}).items():
        out[f'{name}/{output}'] = np.vectorize(str)(value.numpy()).tolist()
print(json.dumps(out))
"""


def test_loaded_in_a_fresh_process(trained, tmp_path):
    x = floats(7, 3)  # any batch size
    results = []
    for name, e in estimators(trained).items():
        path = e.export_saved_model(str(tmp_path / name), parsed).decode()
        done = subprocess.run(
            [sys.executable, '-c', PROGRAM, path, json.dumps(x.tolist())],
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert np.array(results[0]['serving_default/classes']).shape == (7, 4)
    assert {key.split('/')[0] for key in results[0]} == {'serving_default', 'regress', 'predict'}
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_exporters_of_train_and_evaluate(tmp_path):
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=3)
    exporters = [
        tf.estimator.BestExporter('best', serving, exports_to_keep=1),
        tf.estimator.LatestExporter('latest', serving),
        tf.estimator.FinalExporter('final', serving),
    ]
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=4),
        tf.estimator.EvalSpec(input_fn, steps=2, exporters=exporters, throttle_secs=0),
    )
    for name in ('best', 'latest', 'final'):
        [path] = (tmp_path / 'export' / name).iterdir()
        [meta] = graphs(path)
        assert not any('tower' in node.name or 'GPU' in node.device for node in meta.graph_def.node)
        model = [n for n in meta.graph_def.node if not n.name.startswith('save')]
        assert model
        assert not any(node.device for node in model)
