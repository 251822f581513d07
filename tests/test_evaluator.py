"""An evaluator, which follows the chief."""

import json
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import ending, evaluator, reach
from models import adam, floats, of_all_modes, predict, regression

pytestmark = pytest.mark.core


@pytest.fixture
def clock(monkeypatch):
    """A list whose entry is the time."""
    now = [100.0]
    monkeypatch.setattr(evaluator.time, 'monotonic', lambda: now[0])
    return now


def test_an_evaluator_ends_after_the_last_checkpoint(tmp_path, monkeypatch):
    """The end of an earlier training isn't this one's."""
    folder, names = str(tmp_path), []
    ending.write(folder, ending.Ending('old', 'Boo', 1))
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    follower = evaluator.Follower(folder, 'c0:1', 10)
    latest = lambda: names[-1] if names else None  # noqa: E731
    for _ in range(3):
        assert follower.follow(latest) is None
    ending.write(folder, ending.Ending('new'))
    names.append('model.ckpt-5')
    for _ in range(3):
        assert follower.follow(latest) == 'model.ckpt-5'
    names.append('model.ckpt-10')
    ending.write(folder, ending.Ending('new', None, 3))
    assert follower.follow(latest) == 'model.ckpt-10'
    with pytest.raises(SystemExit, match='3'):
        follower.follow(latest)


def test_an_evaluator_whose_file_system_has_a_bad_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    follower = evaluator.Follower(str(tmp_path), 'c0:1', 10)
    boo = tf.errors.UnknownError(None, None, 'Stale file handle')
    with monkeypatch.context() as patch:
        patch.setattr(ending, 'read', mock.Mock(side_effect=boo))
        assert follower.follow(lambda: 'model.ckpt-5') == 'model.ckpt-5'
    ending.write(str(tmp_path), ending.Ending('new', None, 3))
    with pytest.raises(SystemExit, match='3'):
        follower.follow(lambda: 'model.ckpt-5')


def test_an_evaluator_that_exports_at_its_end(monkeypatch, tmp_path):
    """As its script may do after train_and_evaluate(), also if the chief has ended."""
    folder = str(tmp_path)
    model_fn = of_all_modes(predict)
    one = estimator_mgpu.Estimator(model_fn, folder)
    one.train(lambda: tf.data.Dataset.from_tensors((floats(8, 3), floats(8, 1))), steps=1)
    task = {'cluster': {'chief': ['c0:1']}, 'task': {'type': 'evaluator', 'index': 0}}
    monkeypatch.setenv('TF_CONFIG', json.dumps(task))
    estimator = estimator_mgpu.Estimator(model_fn, config=tf.estimator.RunConfig(folder))
    assert estimator.latest_checkpoint() == f'{folder}/model.ckpt-1'
    ending.write(folder, ending.Ending('new', None, 0))

    def receive():
        features = tf.placeholder(tf.float32, [None, 3])
        return tf.estimator.export.TensorServingInputReceiver(features, features)

    assert estimator.export_saved_model(f'{folder}/export', receive)
    with pytest.raises(SystemExit):
        estimator.latest_checkpoint()


def test_an_evaluator_whose_chief_has_gone(tmp_path, clock, caplog, monkeypatch):
    """It waits up to the limit, as long as there's no new checkpoint."""
    there, name = [False], ['model.ckpt-5']
    monkeypatch.setattr(reach, 'listens', lambda address: there[0])
    follower = evaluator.Follower(str(tmp_path), 'c0:1', 10)

    def follow(seconds):
        clock[0] += seconds
        return follower.follow(lambda: name[0])

    for seconds in (0, 5, 8):
        follow(seconds)
    name[0] = 'model.ckpt-10'
    for seconds in (8, 8, 8):
        follow(seconds)
    there[0] = True
    follow(8)
    there[0] = False
    for seconds in (8, 8):
        follow(seconds)
    with pytest.raises(TimeoutError, match='^The chief at c0:1: not reached in 10 seconds'):
        follow(8)
    waits = [message for message in caplog.messages if 'c0:1 cannot be reached' in message]
    assert len(waits) == 3


def test_who_follows(monkeypatch, tmp_path):
    def follower(task, **jobs):
        text = f'{{"cluster": {jobs}, "task": {{"type": "{task}", "index": 0}}}}'
        monkeypatch.setenv('TF_CONFIG', text.replace("'", '"'))
        config = tf.estimator.RunConfig(str(tmp_path))
        return estimator_mgpu.Estimator(regression(adam), config=config)

    jobs = {'chief': ['c0:1'], 'worker': ['w0:1']}
    follows = follower('evaluator', **jobs)
    assert follows._follower._address == 'c0:1'
    assert follows.latest_checkpoint() is None
    chief = follower('chief', **jobs)
    assert chief._follower is None and chief.latest_checkpoint() is None
