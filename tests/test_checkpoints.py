"""Checkpoints are those of one device: any number of towers goes on where any other stopped."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, predict, step

FEATURES, LABELS = batches(60, steps=1)[0]


def model_fn(features, labels, mode):
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    optimizer = tf.train.AdamOptimizer(0.05, epsilon=1e-3)
    metrics = {'mse': tf.metrics.mean_squared_error(labels, predict_again(features))}
    train_op = optimizer.minimize(loss, step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def predict_again(features):
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        return predict(features)


def input_fn():
    """Batches of 7 rows; the step says which, so that a run goes on where another stopped."""
    return tf.data.Dataset.from_tensors((FEATURES[:7], LABELS[:7])).repeat()


def eval_input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(7)


def run_config(**options):
    return tf.estimator.RunConfig(tf_random_seed=1, **options)


def estimator_on(towers, model_dir, fn=model_fn, **options):
    """An estimator on `towers` devices; on 0, the undecorated model_fn under tf.estimator."""
    if not towers:
        return tf.estimator.Estimator(fn, str(model_dir), run_config(), **options)
    return estimator_mgpu.Estimator(fn, str(model_dir), run_config(), devices=towers, **options)


def values(model_dir):
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_close(ours, one):
    assert set(ours) == set(one)
    for name, expected in one.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """A checkpoint of step 1, to start from."""
    model_dir = tmp_path_factory.mktemp('start')
    estimator_on(0, model_dir).train(input_fn, max_steps=1)
    return model_dir


def copy_of(start, to):
    shutil.copytree(start, to)
    return to


def test_on_4_then_1_then_3_then_undecorated_and_back(start, tmp_path):
    for name, schedule in {'one': [0] * 5, 'ours': [4, 1, 3, 0, 4]}.items():
        model_dir = copy_of(start, tmp_path / name)
        for i, towers in enumerate(schedule):
            estimator_on(towers, model_dir).train(input_fn, max_steps=3 + 2 * i)
    one, ours = values(tmp_path / 'one'), values(tmp_path / 'ours')
    assert one['global_step'] == 11
    assert 'net/w/Adam_1' in one
    assert_close(ours, one)


def test_train_and_evaluate_as_on_one_device(tmp_path):
    def stop_early(estimator):
        return tf.estimator.experimental.stop_if_no_decrease_hook(estimator, 'loss', 1000)

    first = estimator_on(0, tmp_path / 'first')
    first.train(input_fn, max_steps=1, hooks=[stop_early(first)])
    results = {}
    for towers in (0, 4):
        model_dir = copy_of(tmp_path / 'first', tmp_path / str(towers))
        estimator = estimator_on(towers, model_dir)
        stop = stop_early(estimator)
        in_memory = tf.estimator.experimental.InMemoryEvaluatorHook(
            estimator, eval_input_fn, every_n_iter=3
        )
        result, _ = tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, max_steps=8, hooks=[stop, in_memory]),
            tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0),
        )
        results[towers] = result
    assert set(results[4]) == set(results[0]) == {'loss', 'mse', 'global_step'}
    for key in results[0]:
        np.testing.assert_allclose(results[4][key], results[0][key], rtol=1e-5)
    tags = {towers: event_tags(tmp_path / str(towers)) for towers in (0, 4)}
    assert tags[4] == tags[0]
    assert max(tags[4].values()) == 1


def event_tags(model_dir):
    """How often each scalar's tag stands in one summary, at the most, of each directory."""
    counts = {}
    for file in sorted(pathlib.Path(model_dir).rglob('events.out.tfevents*')):
        for event in tf.train.summary_iterator(str(file)):
            tags = [value.tag for value in event.summary.value]
            for tag in set(tags):
                assert 'tower_' not in tag
                if not tag.startswith('global_step/sec'):
                    key = (file.parent.relative_to(model_dir), tag)
                    counts[key] = max(counts.get(key, 0), tags.count(tag))
    return counts


def test_warm_start(start, tmp_path):
    runs = {}
    for towers in (0, 3):
        settings = tf.estimator.WarmStartSettings(str(start), vars_to_warm_start='net.*')
        estimator = estimator_on(towers, tmp_path / str(towers), warm_start_from=settings)
        estimator.train(input_fn, max_steps=2)
        runs[towers] = values(tmp_path / str(towers))
    assert_close(runs[3], runs[0])


def test_init_from_checkpoint_and_scaffold(start, tmp_path):
    """init_fn, a saver, local_init_op and ready_op of the user's are used, once each."""
    calls = []

    def with_scaffold(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        tf.train.init_from_checkpoint(str(start), {'net/': 'net/'})
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step())
        own = tf.get_variable('own', [], initializer=tf.zeros_initializer(), trainable=False)
        local = tf.get_local_variable('local', [], initializer=tf.zeros_initializer())
        scaffold = tf.train.Scaffold(
            init_fn=lambda scaffold, sess: calls.append(1) or own.load(5.0, sess),
            local_init_op=tf.group(tf.local_variables_initializer(), name='my_local_init'),
            ready_op=tf.report_uninitialized_variables(),
            saver=tf.train.Saver(max_to_keep=2, sharded=False),
        )
        with tf.control_dependencies([train_op]):
            train_op = local.assign_add(1.0)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)

    runs = {}
    for towers in (0, 4):
        estimator = estimator_on(towers, tmp_path / str(towers), with_scaffold)
        estimator.train(input_fn, max_steps=3)
        runs[towers] = values(tmp_path / str(towers))
    assert len(calls) == 2
    assert runs[4]['own'] == 5.0
    assert_close(runs[4], runs[0])


def test_keep_checkpoint_max(tmp_path):
    config = run_config(save_checkpoints_steps=1, keep_checkpoint_max=2)
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), config, devices=2)
    estimator.train(input_fn, max_steps=5)
    kept = sorted(path.stem for path in tmp_path.glob('*.index'))
    assert kept == ['model.ckpt-4', 'model.ckpt-5']


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import test_checkpoints as t
config = t.run_config(save_checkpoints_steps=1)
estimator = t.estimator_mgpu.Estimator(t.model_fn, sys.argv[2], config, devices=3)
estimator.train(t.input_fn, max_steps=100000)
"""


def test_killed_while_saving(tmp_path):
    """SIGKILL while a checkpoint is saved at every step: half-written, if that is seen in 10 s."""
    here = str(pathlib.Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, '-c', PROGRAM, here, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (tmp_path / 'model.ckpt-3.index').exists():
        time.sleep(0.01)
    deadline = time.time() + 10
    while time.time() < deadline and process.poll() is None:
        if list(tmp_path.glob('*_temp*')) + list(tmp_path.glob('*.tempstate*')):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    last = tf.train.latest_checkpoint(str(tmp_path))
    saved = values(last)
    reached = int(saved['global_step'])
    # The file named checkpoint, which says which is the last, is written after the index of 3.
    assert reached >= 2
    # On another number of towers, against one device from the same checkpoint.
    one = copy_of(tmp_path, tmp_path.parent / 'one')
    estimator_on(2, tmp_path).train(input_fn, max_steps=reached + 2)
    estimator_on(0, one).train(input_fn, max_steps=reached + 2)
    assert_close(values(tmp_path), values(one))
    assert values(tmp_path)['global_step'] == reached + 2


def test_replicated_model_fn_in_our_estimator_is_not_replicated_twice(tmp_path):
    fn = estimator_mgpu.replicate(model_fn, devices=2)
    estimator = estimator_mgpu.Estimator(fn, str(tmp_path), run_config())
    assert estimator.config.session_config.device_count['CPU'] == 2
    estimator.train(input_fn, max_steps=1)
    with pytest.raises(ValueError, match='not to both'):
        estimator_mgpu.Estimator(fn, str(tmp_path), devices=3)


def test_session_config_of_the_user_is_kept(tmp_path):
    config = run_config(session_config=tf.ConfigProto(log_device_placement=True))
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), config, devices=3)
    assert estimator.config.session_config.log_device_placement
    assert estimator.config.session_config.device_count['CPU'] == 3
    assert not config.session_config.device_count
    assert isinstance(estimator, tf.estimator.Estimator)


def test_add_metrics(start, tmp_path):
    def metric_fn(labels, features):
        return {'mean_label': tf.metrics.mean(labels), 'x': tf.metrics.mean(features)}

    estimator = tf.estimator.add_metrics(estimator_on(4, start), metric_fn)
    result = estimator.evaluate(eval_input_fn)
    np.testing.assert_allclose(result['mean_label'], LABELS.mean(), rtol=1e-5)
    np.testing.assert_allclose(result['x'], FEATURES.mean(), rtol=1e-4, atol=1e-6)
