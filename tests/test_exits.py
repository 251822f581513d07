"""How this process ends."""

import subprocess
import sys

import pytest

from estimator_mgpu.cluster import exits

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    'argument, error, status',
    [(None, None, 0), (3, None, 3), (-1, None, 255), (True, None, 1), ('Boo', 'Boo', 1)],
)
def test_exits(argument, error, status):
    assert error_and_status(argument) == (error, status)


def error_and_status(argument):
    """How a process ends by `sys.exit(argument)`."""
    noted = exits.NotedExit()
    noted.was_seen = True
    noted.argument = argument
    return noted.error_and_status()


def test_an_error_without_a_message(monkeypatch):
    class Silent(Exception):
        def __str__(self):
            raise ValueError

    for error, text in [
        (Silent(), 'Silent: it has no message, as its str() fails'),
        (KeyError('a'), "KeyError: 'a'"),
        (KeyboardInterrupt(), 'KeyboardInterrupt'),
    ]:
        monkeypatch.setattr(sys, 'last_value', error, raising=False)
        assert exits.NotedExit().error_and_status() == (text, 1)
    assert error_and_status(Silent()) == ('it has no message, as its str() fails', 1)


@pytest.mark.parametrize(
    'end, argument',
    [
        ('pass', None),
        ('sys.exit(3)', 3),
        ('sys.exit("Boo")', 'Boo'),
        ('raise SystemExit(3)', 3),
        ('raise SystemExit', None),
        ('exit(-1)', -1),
        ('try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3', None),
        ('try: sys.exit(3)\nexcept SystemExit as error: error.code = 4; raise', 4),
        ('class Exit(SystemExit): pass\nraise Exit(3)', 3),
        (
            'thread = threading.Thread(target=sys.exit, args=[3])\nthread.start()\nthread.join()',
            None,
        ),
        ('1 / 0', None),
        ('sys.excepthook = lambda *_: sys.exit(5)\n1 / 0', 5),
    ],
)
def test_exits_are_noted(end, argument, tmp_path):
    """By a process that ends in this way, and whose exit status is the noted one."""
    script = tmp_path / 'script.py'
    script.write_text(
        'import atexit, runpy, sys, threading\n'
        f'noted = runpy.run_path({exits.__file__!r})["NotedExit"]()\n'
        'noted.install()\n'
        'how = noted.error_and_status\n'
        f'atexit.register(lambda: print([noted.argument], noted.was_seen, *how()))\n{end}\n'
    )
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=False)
    was_seen = argument is not None or end == 'raise SystemExit'
    error, status = error_and_status(argument)
    if end == '1 / 0':
        error, status = 'ZeroDivisionError: division by zero', 1
    assert done.stdout.decode() == f'{[argument]} {was_seen} {error} {status}\n'
    assert done.returncode == status


def test_a_sys_exit_of_the_program(tmp_path):
    """One that was there before is still called, and gets the same arguments."""
    script = tmp_path / 'script.py'
    script.write_text(
        'import runpy, sys\n'
        'def own_exit(*args, original=sys.exit):\n'
        '    print(args)\n'
        '    original(args[0] + 1)\n'
        'sys.exit = own_exit\n'
        f'runpy.run_path({exits.__file__!r})["NotedExit"]().install()\n'
        'sys.exit(2)\n'
    )
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=False)
    assert (done.stdout.decode(), done.returncode) == ('(2,)\n', 3)
