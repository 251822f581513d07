"""samples/benchmark.py: that it runs what it says, and that its figures are the right ratios."""

import json
import sys

import pytest

from test_samples import SAMPLES, run_sample


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(SAMPLES))
    yield __import__('benchmark')
    for name in ('benchmark', 'benchmark_models'):
        del sys.modules[name]


def run_of(setup, towers, number, **measured):
    measures = dict.fromkeys(
        ['build', 'session', 'first_step', 'start_up', 'step', 'examples', 'memory', 'nodes'], 1.0
    )
    run = {'model': 'mlp', 'setup': setup, 'towers': towers, 'round': number}
    return {**run, **measures, **measured}


def test_figures_are_ratios_of_one_round(benchmark):
    """By hand: 3/2, 8/4 and 3/3, whose median isn't the ratio of the medians 3 and 3."""
    results = []
    for number, (one, ours) in enumerate([(2, 3), (4, 8), (3, 3)]):
        results.append(run_of(benchmark.ONE, 1, number, step=one, build=1))
        results.append(run_of(benchmark.REPLICATE, 4, number, step=ours, build=1.6))
    results.append(run_of(benchmark.REPLICATE, 4, 3, step=100))  # Of a round without the other.
    which = {'model': 'mlp', 'setup': benchmark.REPLICATE, 'towers': 4}
    to = {'model': 'mlp', 'setup': benchmark.ONE, 'towers': 1}
    assert benchmark.ratios(results, 'step', which, to) == [1.5, 2.0, 1.0]
    line = benchmark.tables(results).splitlines()[-1]
    assert '1.50 (1.00 to 2.00)' in line
    assert '0.20 (0.20 to 0.20)' in line  # Each of three further towers adds a fifth of a build.


def test_a_short_benchmark(tmp_path):
    flags = ['--models=mlp', '--towers=2', '--rounds=1', '--seconds=0.01', '--variables=cpu']
    last = run_sample('benchmark.py', *flags, f'--output={tmp_path / "found"}')
    assert last.startswith('| mlp | MirroredStrategy | 2 | one device | ')
    runs = json.loads((tmp_path / 'found.json').read_text())['runs']
    assert [(run['setup'], run['towers']) for run in runs] == [
        ('one device', 1),
        ('replicate', 2),
        ('MirroredStrategy', 2),
    ]
    for run in runs:
        assert 0 < run['build'] < run['start_up'] < 100
        parts = run['build'] + run['session'] + run['first_step']
        assert parts == pytest.approx(run['start_up'])
        assert run['examples'] == pytest.approx(256 / run['step'] * 1000)
    assert runs[0]['nodes'] < runs[1]['nodes'] < runs[2]['nodes']
    assert last in (tmp_path / 'found.md').read_text().splitlines()
    assert (tmp_path / 'found.png').read_bytes().startswith(b'\x89PNG')
