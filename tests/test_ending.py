"""How a chief has ended: what it leaves for other tasks, and how these end."""

import pytest

from estimator_mgpu.cluster import ending

pytestmark = pytest.mark.core


def test_ends(caplog):
    with pytest.raises(RuntimeError, match='^The chief has failed: Boo$'):
        ending.Ending('one', 'Boo', 1).end_as_chief_did('it')
    for status in (0, 3):
        with pytest.raises(SystemExit) as error:
            ending.Ending('one', None, status).end_as_chief_did('it')
        assert error.value.code == status
    assert caplog.messages == ['The chief has ended with 3, and so does it.']


def test_who_has_missed_it(monkeypatch):
    """A task that couldn't be told, if the chief has ended with 0, and lately."""
    monkeypatch.setattr(ending.time, 'time', lambda: 1000.0)
    zero = ending.Ending('one', None, 0, at=950.0, untold=('w0:1', 'p0:1'))
    assert zero.was_missed('w0:1', 100)
    assert ending.Ending.from_text(zero.text()) == zero
    assert not zero.was_missed('w0:1', 40)
    assert not zero.was_missed('w1:1', 100)
    assert not zero._replace(status=3).was_missed('w0:1', 100)
    assert not zero._replace(at=1200.0).was_missed('w0:1', 100)


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
        assert ending.read(folder)[:3] == found
    assert [path.name for path in tmp_path.iterdir()] == [ending.FILE]


DAMAGED = {
    'empty': b'',
    'a number': b'7',
    'cut off': b'["old", nu',
    'other JSON': b'{"chief": "old"}',
    'of other types': b'["old", null, "0"]',
    'too few': b'["old"]',
    'too many': b'["old", null, 0, 0, [], 7]',
    'of a wrong time': b'["old", null, 0, "0", []]',
    'untold by name': b'["old", null, 0, 0, "w0:1"]',
    'deep': 100_000 * b'[',
    'no text': b'\xff\x00',
}


@pytest.mark.parametrize('damaged', DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_counts_as_none(damaged, tmp_path, caplog):
    """A chief writes it anew, also as it ends."""
    path = tmp_path / ending.FILE
    path.write_bytes(damaged)
    assert ending.read(str(tmp_path)) is None
    (said,) = caplog.messages
    assert said.startswith(f'{path}, which says how the chief has ended, is damaged and counts as')
    ending.write(str(tmp_path), ending.Ending('new', None, 3))
    assert ending.read(str(tmp_path)) == ending.Ending('new', None, 3)


def test_the_file_of_version_0_2():
    assert ending.Ending.from_text('["old", null, 3]') == ending.Ending('old', None, 3)
