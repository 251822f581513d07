"""How a chief has ended, and the evaluator that follows it."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import ending
from models import adam, regression


@pytest.mark.core
@pytest.mark.parametrize(
    'argument, error, status',
    [(None, None, 0), (3, None, 3), (-1, None, 255), (True, None, 1), ('Boo', 'Boo', 1)],
)
def test_exits(argument, error, status):
    assert ending.of_exit(argument) == (error, status)


@pytest.mark.core
def test_ends(caplog):
    with pytest.raises(RuntimeError, match='^The chief has failed: Boo$'):
        ending.Ending('one', 'Boo', 1).end('it')
    for status in (0, 3):
        with pytest.raises(SystemExit) as error:
            ending.Ending('one', None, status).end('it')
        assert error.value.code == status
    assert caplog.messages == ['The chief has ended with 3, and so does it.']


@pytest.mark.core
def test_the_file(tmp_path):
    """A chief that was replaced doesn't write over the other's; one that begins does."""
    folder = str(tmp_path)
    assert ending.read(folder) is None
    for chief, status, found in [
        ('old', None, ('old', None, None)),
        ('old', 3, ('old', None, 3)),
        ('new', None, ('new', None, None)),
        ('old', 3, ('new', None, None)),
        ('new', 0, ('new', None, 0)),
    ]:
        ending.leave(folder, ending.Ending(chief, None, status))
        assert ending.read(folder) == found
    assert [path.name for path in tmp_path.iterdir()] == [ending.FILE]


@pytest.fixture
def clock(monkeypatch):
    """A list whose entry is the time."""
    now = [100.0]
    monkeypatch.setattr(ending.time, 'monotonic', lambda: now[0])
    return now


@pytest.mark.core
def test_an_evaluator_ends_after_the_last_checkpoint(tmp_path):
    """The end of an earlier training isn't this one's."""
    folder, names = str(tmp_path), []
    ending.leave(folder, ending.Ending('old', 'Boo', 1))
    follower = ending.Follower(folder, 'c0:1', 10, lambda address: True)
    latest = lambda: names[-1] if names else None  # noqa: E731
    for _ in range(3):
        assert follower.follow(latest) is None
    ending.leave(folder, ending.Ending('new'))
    names.append('model.ckpt-5')
    for _ in range(3):
        assert follower.follow(latest) == 'model.ckpt-5'
    names.append('model.ckpt-10')
    ending.leave(folder, ending.Ending('new', None, 3))
    assert follower.follow(latest) == 'model.ckpt-10'
    with pytest.raises(SystemExit, match='3'):
        follower.follow(latest)


@pytest.mark.core
def test_an_evaluator_whose_chief_has_gone(tmp_path, clock, caplog):
    """It waits up to the limit, as long as there's no new checkpoint."""
    there, name = [False], ['model.ckpt-5']
    follower = ending.Follower(str(tmp_path), 'c0:1', 10, lambda address: there[0])

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


@pytest.mark.core
def test_who_follows(monkeypatch, tmp_path):
    def follower(task, **jobs):
        text = f'{{"cluster": {jobs}, "task": {{"type": "{task}", "index": 0}}}}'
        monkeypatch.setenv('TF_CONFIG', text.replace("'", '"'))
        config = tf.estimator.RunConfig(str(tmp_path))
        return estimator_mgpu.Estimator(regression(adam), config=config)

    jobs = {'chief': ['c0:1'], 'worker': ['w0:1']}
    evaluator = follower('evaluator', **jobs)
    assert evaluator._follower._address == 'c0:1'
    assert evaluator.latest_checkpoint() is None
    chief = follower('chief', **jobs)
    assert chief._follower is None and chief.latest_checkpoint() is None
