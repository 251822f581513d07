"""Runs the code in the docs: in docstrings, the README and each page of docs/."""

import ast
import contextlib
import doctest
import functools
import importlib
import io
import logging
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf
import tf_slim
import yaml

import estimator_mgpu
from forks import output_of

MODULES = sorted(
    m.name.partition('.')[2]
    for m in pkgutil.walk_packages(estimator_mgpu.__path__, 'estimator_mgpu.')
    if '__main__' not in m.name
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ['README.md', 'CONTRIBUTING.md', *(f'docs/{p.name}' for p in ROOT.glob('docs/*.md'))]
FENCE = re.compile(r'^```(\S*)\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize('name', MODULES)
def test_docstrings(name):
    module = importlib.import_module(f'estimator_mgpu.{name}')
    with tf.Graph().as_default():
        assert doctest.testmod(module).failed == 0


def test_every_public_name_has_an_example_and_is_in_the_api_page():
    page = (ROOT / 'docs' / 'api.md').read_text()
    found = re.findall(r'^(?:::: estimator_mgpu\..*\.|## )(\w+)$', page, re.MULTILINE)
    assert set(found) >= set(estimator_mgpu.__all__)
    for name in {*estimator_mgpu.__all__} - {'estimator'}:  # TensorFlow's own
        assert '>>>' in getattr(estimator_mgpu, name).__doc__, name


@pytest.mark.parametrize('name', sorted(PAGES))
def test_page(name, tmp_path, monkeypatch, caplog):
    """Runs the blocks of a page one after another, those in Python in one namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', [name])  # `tf.app.run()` reads it,
    root = logging.getLogger()
    monkeypatch.setattr(root, 'handlers', [*root.handlers])  # and adds a handler.
    Page(ROOT / name, caplog).run()


def blocks_of(path):
    """Returns each block's language and text, padded so that line numbers are the page's."""
    text = path.read_text()
    found = list(FENCE.finditer(text))
    assert len(re.findall('^ *(```|~~~)', text, re.MULTILINE)) == 2 * len(found), 'an odd fence'
    unknown = {block[1] for block in found} - {'python', 'diff', 'sh', 'text', 'bash', 'yaml'}
    assert not unknown, f'Nothing runs blocks in {unknown}.'
    return [(block[1], '\n' * text[: block.start(2)].count('\n') + block[2]) for block in found]


class Page:
    """Runs a page's blocks: a method for each language."""

    def __init__(self, path, caplog):
        self.path = path
        self._caplog = caplog
        self._namespace = {'__name__': '__main__'}
        self._printed = ''

    def run(self):
        for language, block in blocks_of(self.path):
            getattr(self, language)(block)

    def python(self, block):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                exec(compile(block, str(self.path), 'exec'), self._namespace)
            except SystemExit as end:  # as `tf.app.run()` ends
                assert not end.code, end
        self._printed = printed.getvalue()

    def diff(self, block):
        """Runs the new side. The old side has to parse, and has to be different."""
        lines = block.splitlines()
        assert all(line[:1] in ('', ' ', '+', '-') for line in lines), block
        new, old = (
            '\n'.join(line[1:] for line in lines if line[:1] != left_out) for left_out in '-+'
        )
        assert new != old
        ast.parse(old)
        self.python(new)

    def text(self, block):
        """Checks what the block before it printed or logged; '...' matches anything."""
        pattern = '.*'.join(map(re.escape, block.strip().split('...')))
        told = '\n'.join([self._printed, *self._caplog.messages])
        assert re.search(pattern, told, re.DOTALL), told

    def bash(self, block):
        """Checks the syntax: the script is for other machines."""
        subprocess.run(['bash', '-n'], input=block, text=True, check=True)

    def yaml(self, block):
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(block))

    def sh(self, block):
        for line in block.splitlines():
            command = shlex.split(line, comments=True)
            if command:
                self._printed = run(command)


def run(command):
    """Runs a command if it's cheap, and returns its output. Otherwise checks what it names."""
    if command[0] == 'make':
        return done(['make', '-n', *command[1:]], ROOT).stdout
    if command == ['python', '-m', 'estimator_mgpu']:
        return environment_report()
    if command[:4] == ['python', '-m', 'estimator_mgpu', 'explain']:
        known = (ROOT / 'estimator_mgpu' / '__main__.py').read_text()
        flags = [part.partition('=')[0] for part in command if part.startswith('--')]
        assert all(f"'{flag}'" in known for flag in flags)
        return ''
    if command[0] in ('export', 'sudo') or command == ['python', 'train.py']:
        return ''  # of several machines: tests/test_machines_docs.py
    if command[0] in ('git', 'cd'):
        assert command in (['git', 'clone', 'ADDRESS', 'estimator_mgpu'], ['cd', 'estimator_mgpu'])
        return ''
    if command[:2] == ['pip', 'install']:
        config = (ROOT / 'setup.cfg').read_text()
        wheel = f'estimator_mgpu-{estimator_mgpu.__version__}-py3-none-any.whl'
        for each in command[2:]:
            package, _, extra = each.rstrip(']').partition('[')
            assert package in ('.', wheel, 'tf-keras'), each
            assert not extra or f'\n{extra} =\n' in config, each
    elif command[0] == 'python':
        sources = [(ROOT / path).read_text() for path in (command[1], 'samples/common.py')]
        for flag in command[2:]:
            name = re.fullmatch(r'--(\w+)(=\S+)?', flag)[1]
            assert re.search(rf"DEFINE_\w+\(\s*'{name}'", ''.join(sources)), flag
    else:
        assert command in (['.ci/run'], ['.ci/matrix'])
        assert os.access(ROOT / command[0], os.X_OK)
    return ''


@functools.cache
def environment_report():
    """Returns what the command prints; tests/test_environment.py checks the contents."""
    found = done([sys.executable, '-m', 'estimator_mgpu'], None)
    if sys.version_info >= (3, 10):
        assert not found.stderr  # TensorFlow's log
    return found.stdout


def done(command, directory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(('MAKE', 'TF_CPP'))}
    environment.update(CUDA_VISIBLE_DEVICES='-1', PYTHONPATH=os.pathsep.join(sys.path))
    found = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found


def test_links():
    """The navigation lists all pages; links of the pages outside of docs/ work on GitHub."""
    listed = re.findall(r': (\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob('docs/*.md'))
    for name in ('README.md', 'CONTRIBUTING.md'):
        links = re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', (ROOT / name).read_text())
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_own_errors_are_quoted_as_they_are():
    """For each message in docs/errors.md, one string of the code contains all its parts."""
    page = (ROOT / 'docs' / 'errors.md').read_text()
    own = page.partition('## From estimator_mgpu')[2]
    quotes = re.findall(r'^- `` ?(.+?) ?``', own, re.MULTILINE)
    assert len(quotes) > 20
    texts = [text for path in ROOT.rglob('estimator_mgpu/**/*.py') for text in texts_of(path)]
    for quote in quotes:
        parts = [part.strip() for part in quote.split('...') if part.strip()]
        assert any(all(part in text for part in parts) for text in texts), quote


def test_what_replaces_contrib_exists():
    page = (ROOT / 'docs' / 'tensorflow-1.md').read_text()
    rows = re.findall(r'^\| `tf.contrib.*?\|(.*)\|$', page, re.MULTILINE)
    names = re.findall(r'`((?:tf|tf_slim|estimator_mgpu)\.[\w.]+)', ''.join(rows))
    assert len(names) > 20
    namespace = {'tf': tf, 'tf_slim': tf_slim, 'estimator_mgpu': estimator_mgpu}
    for name in names:
        assert eval(name, namespace), name


def test_speed_is_quoted_as_it_was_measured():
    """The README, the FAQ and docs/speed.md itself say the ranges of its tables."""
    page = (ROOT / 'docs' / 'speed.md').read_text()
    step, start_up = 'step on 2, 4, 8', 'start-up on 2, 8'
    steps = columns(page, step, f'with: {step}', f'without: {step}')
    start_ups = columns(page, f'{start_up} devices', f'with: {start_up}', f'without: {start_up}')
    mirrored = columns(page, 'MirroredStrategy: start-up on 8')
    quotes = {
        range_of([cell[0] for cell in steps]): ['README.md', 'docs/speed.md'],
        range_of([cell[-1] for cell in start_ups]): ['README.md', 'docs/faq.md', 'docs/speed.md'],
        range_of([cell[0] for cell in mirrored]): ['docs/speed.md'],
    }
    for quote, pages in quotes.items():
        for name in pages:
            assert f'{quote} times' in ' '.join((ROOT / name).read_text().split()), (quote, name)


def columns(page, *titles):
    """The numbers in each cell of a page's columns, which have these titles."""
    found = []
    for table in re.findall(r'(?:^\|.*\n)+', page, re.MULTILINE):
        header, _, *rows = (re.split(r' *\| *', line) for line in table.splitlines())
        for title in set(titles).intersection(header):
            found += [row[header.index(title)].split(', ') for row in rows]
    assert len(found) >= 7 * len(titles)
    return found


def range_of(numbers):
    low, high = min(numbers, key=float), max(numbers, key=float)
    return f'{low} to {high}'


def texts_of(path):
    """Yields the strings in a module. In an f-string, `...` stands for each value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield ''.join(v.value if isinstance(v, ast.Constant) else '...' for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_picture_is_of_a_graph_as_it_is_now():
    drawn = output_of([ROOT / 'docs' / 'draw_graph.py', '-'])
    assert drawn == (ROOT / 'docs' / 'how-it-works.svg').read_text(), (
        'Run python docs/draw_graph.py'
    )


@pytest.mark.parametrize(
    'text',
    [
        '~python\nassert 1 == 2\n~',
        '~diff\n-x = 1\n+x = y\n~',
        '~diff\n-x = = 1\n+x = 1\n~',
        '~python\nprint(12)\n~\n~text\n...13...\n~',
        '~sh\nmake coffee\n~',
        '~sh\npython samples/gan.py --towers=2\n~',
        '~sh\npython samples/none.py\n~',
        "~sh\npip install '.[none]'\n~",
        '~sh\nrm -rf build\n~',
        '~yaml\n- a: b\n~',
        '~\na: b\n~',
        '- a list:\n\n  ~python\n  assert 0\n  ~',
    ],
)
def test_a_page_can_be_wrong(text, tmp_path, caplog):
    page = Page(tmp_path / 'page.md', caplog)
    page.path.write_text(text.replace('~', '```') + '\n')
    with pytest.raises((AssertionError, FileNotFoundError, NameError, SyntaxError)):
        page.run()
