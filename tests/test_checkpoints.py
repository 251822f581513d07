"""Checkpoints are those of one device: any number of towers goes on where any other stopped."""

import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, predict, step
from towers import assert_close, saved_in

FEATURES, LABELS = batches(60, steps=1)[0]


def model_fn(features, labels, mode):
    output = predict(features)
    loss = tf.reduce_mean(tf.square(output - labels))
    train_op = tf.train.AdamOptimizer(0.05, epsilon=1e-3).minimize(loss, step())
    metrics = {'mse': tf.metrics.mean_squared_error(labels, output)}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


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


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """A checkpoint of step 1, to start from."""
    model_dir = tmp_path_factory.mktemp('start')
    estimator_on(0, model_dir).train(input_fn, max_steps=1)
    return model_dir


def test_on_4_then_1_then_3_then_undecorated_and_back(start, tmp_path):
    for name, schedule in {'one': [0] * 5, 'ours': [4, 1, 3, 0, 4]}.items():
        model_dir = shutil.copytree(start, tmp_path / name)
        for i, towers in enumerate(schedule):
            estimator_on(towers, model_dir).train(input_fn, max_steps=3 + 2 * i)
    one, ours = saved_in(tmp_path / 'one'), saved_in(tmp_path / 'ours')
    assert one['global_step'] == 11
    assert 'net/w/Adam_1' in one
    assert_close(ours, one, 1e-5)


def test_train_and_evaluate_as_on_one_device(tmp_path):
    def stop_early(estimator):
        return tf.estimator.experimental.stop_if_no_decrease_hook(estimator, 'loss', 1000)

    results, tags = {}, {}
    first = estimator_on(0, tmp_path / 'first')
    first.train(input_fn, [stop_early(first)], max_steps=1)  # The hook has a variable.
    for towers in (0, 4):
        model_dir = tmp_path / str(towers)
        shutil.copytree(tmp_path / 'first', model_dir)
        estimator = estimator_on(towers, model_dir)
        in_memory = tf.estimator.experimental.InMemoryEvaluatorHook(
            estimator, eval_input_fn, every_n_iter=3
        )
        results[towers], _ = tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, 8, [stop_early(estimator), in_memory]),
            tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0),
        )
        tags[towers] = event_tags(model_dir)
    assert set(results[0]) == {'loss', 'mse', 'global_step'}
    assert_close(results[4], results[0], 1e-5)
    assert tags[4] == tags[0] and len(tags[0]) == 4


def event_tags(model_dir):
    """The scalars that are told, by directory; none twice in a summary."""
    found = set()
    for path in model_dir.rglob('events.out.tfevents*'):
        for event in tf.train.summary_iterator(str(path)):
            tags = [v.tag for v in event.summary.value if not v.tag.startswith('global_step/sec')]
            assert len({*tags}) == len(tags)
            found |= {(path.parent.relative_to(model_dir), tag) for tag in tags}
    return found


def both(tmp_path, steps, *args, **options):
    """What one device and four come to."""
    for towers in (0, 4):
        estimator_on(towers, tmp_path / str(towers), *args, **options).train(input_fn, steps=steps)
    return saved_in(tmp_path / '0'), saved_in(tmp_path / '4')


def test_warm_start(start, tmp_path):
    settings = tf.estimator.WarmStartSettings(str(start), vars_to_warm_start='net.*')
    one, ours = both(tmp_path, 2, warm_start_from=settings)
    assert_close(ours, one, 1e-5)


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

    one, ours = both(tmp_path, 3, with_scaffold)
    assert len(calls) == 2
    assert ours['own'] == 5.0
    assert_close(ours, one, 1e-5)


def test_replicated_model_fn_in_our_estimator_is_not_replicated_twice(tmp_path):
    fn = estimator_mgpu.replicate(model_fn, devices=2)
    estimator = estimator_mgpu.Estimator(fn, str(tmp_path), run_config())
    assert estimator.config.session_config.device_count['CPU'] == 2
    estimator.train(input_fn, max_steps=1)
    with pytest.raises(ValueError, match='not to both'):
        estimator_mgpu.Estimator(fn, str(tmp_path), devices=3)


def test_session_config_of_the_user_is_kept(tmp_path):
    session = tf.ConfigProto(log_device_placement=True)
    config = run_config(session_config=session, keep_checkpoint_max=2)
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), config, devices=3)
    assert estimator.config.session_config.log_device_placement
    assert estimator.config.session_config.device_count['CPU'] == 3
    assert estimator.config.keep_checkpoint_max == 2
    assert not config.session_config.device_count
    assert isinstance(estimator, tf.estimator.Estimator)


def test_add_metrics(start, tmp_path):
    def metric_fn(labels, features):
        return {'mean_label': tf.metrics.mean(labels), 'x': tf.metrics.mean(features)}

    estimator = tf.estimator.add_metrics(estimator_on(4, start), metric_fn)
    result = estimator.evaluate(eval_input_fn)
    np.testing.assert_allclose(result['mean_label'], LABELS.mean(), rtol=1e-5)
    np.testing.assert_allclose(result['x'], FEATURES.mean(), rtol=1e-4, atol=1e-6)
