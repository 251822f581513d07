"""An evaluator, which follows the chief."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import ending, evaluator, reach
from models import adam, regression

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
