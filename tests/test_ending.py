"""How a chief has ended: what it leaves for other tasks, and how these end."""

import pytest

from estimator_mgpu.cluster import ending

pytestmark = pytest.mark.core


def test_ends(caplog):
    with pytest.raises(RuntimeError, match='^The chief has failed: Boo$'):
        ending.Ending('one', 'Boo', 1).end_process('it')
    for status in (0, 3):
        with pytest.raises(SystemExit) as error:
            ending.Ending('one', None, status).end_process('it')
        assert error.value.code == status
    assert caplog.messages == ['The chief has ended with 3, and so does it.']


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
        ending.write(folder, ending.Ending(chief, None, status))
        assert ending.read(folder) == found
    assert [path.name for path in tmp_path.iterdir()] == [ending.FILE]
