"""How this process ends."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from estimator_mgpu.cluster import exits

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    'argument, error, status',
    [(None, None, 0), (3, None, 3), (-1, None, 255), (True, None, 1), ('Boo', 'Boo', 1)],
)
def test_exits(argument, error, status):
    assert exits.error_and_status(argument) == (error, status)


def test_an_error_without_a_message():
    class Silent(Exception):
        def __str__(self):
            raise ValueError

    assert exits.error_text(Silent()) == 'Silent: it has no message, as its str() fails'
    assert exits.error_text(KeyError('a')) == "KeyError: 'a'"
    assert exits.error_text(KeyboardInterrupt()) == 'KeyboardInterrupt'


def test_exits_are_noted(monkeypatch):
    monkeypatch.setattr(sys, 'exit', sys.exit)
    noted = exits.NotedExit()
    noted.install()
    with pytest.raises(SystemExit, match='3'):
        sys.exit(3)
    assert noted.argument == 3
    with ThreadPoolExecutor() as pool, pytest.raises(SystemExit, match='4'):
        pool.submit(sys.exit, 4).result()
    assert noted.argument == 3
