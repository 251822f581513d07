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
def saved(monkeypatch):
    """A list of the checkpoints so far."""
    names = []
    monkeypatch.setattr(tf.train, 'latest_checkpoint', lambda _: names[-1] if names else None)
    return names


def test_an_evaluator_ends_after_the_last_checkpoint(tmp_path, saved, monkeypatch):
    """The end of an earlier training isn't this one's."""
    folder = str(tmp_path)
    ending.write(folder, ending.Ending('old', 'Boo', 1))
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    follower = evaluator.Follower(folder, 'c0:1', 10)
    for _ in range(3):
        follower.follow()
    ending.write(folder, ending.Ending('new'))
    saved.append('model.ckpt-5')
    for _ in range(3):
        follower.follow()
    saved.append('model.ckpt-10')
    ending.write(folder, ending.Ending('new', None, 3))
    follower.follow()
    with pytest.raises(SystemExit, match='3'):
        follower.follow()


def test_an_evaluator_whose_file_system_has_a_bad_moment(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    follower = evaluator.Follower(str(tmp_path), 'c0:1', 10)
    boo = tf.errors.UnknownError(None, None, 'Stale file handle')
    saved.append('model.ckpt-5')
    with monkeypatch.context() as patch:
        patch.setattr(ending, 'read', mock.Mock(side_effect=boo))
        for _ in range(2):
            follower.follow()
    ending.write(str(tmp_path), ending.Ending('new', None, 3))
    with pytest.raises(SystemExit, match='3'):
        follower.follow()


class ExportsTheLatest(tf.estimator.Exporter):
    """A user's, which asks for the latest checkpoint, rather than export the one that it's given.

    In the first export, the chief saves once more, and ends.
    """

    name = 'latest'

    def __init__(self, folder, save):
        self.folder = folder
        self.save = save
        self.exported = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        def receive():
            features = tf.placeholder(tf.float32, [None, 3])
            return tf.estimator.export.TensorServingInputReceiver(features, features)

        if not self.exported:
            self.save()
            ending.write(self.folder, ending.Ending('new', None, 3))
        estimator.export_saved_model(export_path, receive)
        self.exported.append((checkpoint_path, estimator.latest_checkpoint()))


def test_an_exporter_that_asks_for_the_latest_checkpoint(monkeypatch, tmp_path):
    """All checkpoints are evaluated and exported nevertheless."""
    folder, model_fn = str(tmp_path), of_all_modes(predict)
    data = lambda: tf.data.Dataset.from_tensors((floats(8, 3), floats(8, 1)))  # noqa: E731
    train = lambda: estimator_mgpu.Estimator(model_fn, folder).train(data)  # noqa: E731
    train()
    task = {'cluster': {'chief': ['c0:1']}, 'task': {'type': 'evaluator', 'index': 0}}
    with monkeypatch.context() as patch:
        patch.setenv('TF_CONFIG', json.dumps(task))
        config = tf.estimator.RunConfig(folder)
        estimator = estimator_mgpu.Estimator(model_fn, config=config)
    exporter = ExportsTheLatest(folder, train)
    evaluation = tf.estimator.EvalSpec(
        data, exporters=exporter, start_delay_secs=0, throttle_secs=0
    )
    with pytest.raises(SystemExit, match='3'):
        tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(data), evaluation)
    first, last = f'{folder}/model.ckpt-1', f'{folder}/model.ckpt-2'
    assert exporter.exported == [(first, last), (last, last)]


@pytest.mark.parametrize('ended', [True, False])
def test_an_evaluator_whose_chief_has_gone(ended, tmp_path, clock, saved, caplog, monkeypatch):
    """It waits up to the limit, as long as there's no new checkpoint."""
    there = [False]
    saved.append('model.ckpt-5')
    if ended:
        ending.write(str(tmp_path), ending.Ending('old', None, 0))
    monkeypatch.setattr(reach, 'listens', lambda address: there[0])
    follower = evaluator.Follower(str(tmp_path), 'c0:1', 10)

    def follow(seconds):
        clock[0] += seconds
        follower.follow()

    for seconds in (0, 5, 8):
        follow(seconds)
    saved.append('model.ckpt-10')
    for seconds in (8, 8, 8):
        follow(seconds)
    there[0] = True
    follow(8)
    there[0] = False
    for seconds in (8, 8):
        follow(seconds)
    match = '^The chief at c0:1: not reached in 10 seconds'
    if ended:
        match += '.* A chief had ended with 0 before this evaluator began: if it was'
    with pytest.raises(TimeoutError, match=match):
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
    chief = follower('chief', **jobs)
    assert chief._follower is None
