"""samples/benchmark.py: that it runs what it says, and that its figures are the right ratios."""

import json
import pathlib
import re
import shutil

import pytest
from absl.testing import flagsaver

import estimator_mgpu
from test_samples import SAMPLES, run_python


@pytest.fixture(scope='session')  # Its flags can be defined once.
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SAMPLES))
        return __import__('benchmark')


def run_of(setup, towers, number, **measured):
    measures = ['build', 'session', 'first_step', 'start_up', 'step', 'examples', 'memory', 'nodes']
    run = {'model': 'mlp', 'setup': setup, 'towers': towers, 'round': number}
    return {**run, **dict.fromkeys(measures, 1.0), **measured}


def test_figures_are_ratios_of_one_round(benchmark):
    """By hand: 3/2, 8/4 and 3/3, whose median isn't the ratio of the medians 3 and 3."""
    assert benchmark.tower_devices('GPU:0', 2) == ['/device:GPU:0'] * 2
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
    """Also of another version of the package, whose replicate() knows fewer options."""
    package, older = pathlib.Path(estimator_mgpu.__file__).resolve().parent, tmp_path / 'older'
    shutil.copytree(package, older / 'estimator_mgpu')
    with (older / 'estimator_mgpu' / '__init__.py').open('a') as file:
        file.write(
            "\n__version__ = '0.0.1'\n_replicate = replicate\n"
            'def replicate(model_fn, devices, variables=None):\n'
            '    return _replicate(model_fn, devices=devices)\n'
        )
    flags = ['--models=mlp', '--setups=replicate,MirroredStrategy,other', f'--other={older}']
    flags += ['--towers=2', '--rounds=1', '--seconds=0.01', '--variables=cpu']
    last = run_python('benchmark.py', *flags, f'--output={tmp_path / "found"}')[-1]
    assert last.startswith('| mlp | other | 2 | MirroredStrategy | ')
    table = (tmp_path / 'found.md').read_text()
    assert last in table.splitlines()
    assert '| mlp | replicate | 2 | other | ' in table
    assert '| mlp | other | 2 | other | ' not in table
    assert (tmp_path / 'found.png').read_bytes().startswith(b'\x89PNG')
    runs = json.loads((tmp_path / 'found.json').read_text())['runs']
    here = estimator_mgpu.__version__
    assert [(run['setup'], run['towers'], run['version']) for run in runs] == [
        ('one device', 1, here),
        ('replicate', 2, here),
        ('MirroredStrategy', 2, here),
        ('other', 2, '0.0.1'),
    ]
    for run in runs:
        assert 0 < run['build'] < run['start_up'] < 100
        parts = run['build'] + run['session'] + run['first_step']
        assert parts == pytest.approx(run['start_up'])
        assert run['examples'] == pytest.approx(256 / run['step'] * 1000)
    assert runs[0]['nodes'] < runs[1]['nodes'] < runs[2]['nodes']
    assert not any(run['legacy'] for run in runs)


def test_a_benchmark_of_legacy_behavior(tmp_path):
    flags = ['--models=embed', '--setups=replicate', '--towers=2', '--rounds=1', '--seconds=0.01']
    run_python('benchmark.py', '--legacy', *flags, f'--output={tmp_path / "found"}')
    runs = json.loads((tmp_path / 'found.json').read_text())['runs']
    assert [(run['setup'], run['legacy']) for run in runs] == [
        ('one device', True),
        ('replicate', True),
    ]


def test_a_benchmark_of_machines(tmp_path):
    """Each is a process, and has a part of the batch."""
    flags = ['--models=mlp', '--setups=machines', '--towers=2', '--rounds=1', '--seconds=0.01']
    run_python('benchmark.py', *flags, f'--output={tmp_path / "found"}')
    one, machines = json.loads((tmp_path / 'found.json').read_text())['runs']
    assert (machines['setup'], machines['towers']) == ('machines', 2)
    assert one['nodes'] < machines['nodes'] < 3 * one['nodes']
    assert machines['examples'] == pytest.approx(256 / machines['step'] * 1000)


def test_a_run_of_the_wrong_version(benchmark, tmp_path):
    (tmp_path / 'estimator_mgpu').mkdir()
    package = pathlib.Path(estimator_mgpu.__file__).resolve().parent
    with flagsaver.flagsaver():
        benchmark.FLAGS(['benchmark', f'--other={tmp_path}'])
        told = f'estimator_mgpu was imported from {package}, not from --other={tmp_path}'
        with pytest.raises(SystemExit, match=f'^{re.escape(told)}$'):
            benchmark.measure('mlp', 'other', 2)


def test_a_run_that_fails_is_told_by_the_exit_status(benchmark, monkeypatch, tmp_path):
    """The others' tables are written."""

    def run_first(runs):
        return [{**runs[0], 'round': 0, **dict.fromkeys(benchmark.MEASURES, 1.0)}]

    monkeypatch.setattr(benchmark, 'run_all', run_first)
    flags = ['--models=mlp', '--rounds=1', '--towers=2', f'--output={tmp_path / "new" / "v1.0"}']
    with flagsaver.flagsaver():
        benchmark.FLAGS(['benchmark', *flags])
        with pytest.raises(SystemExit, match='^2 of 3 runs failed; standard error says how.$'):
            benchmark.main([])
    assert '| mlp | one device | 1 |' in (tmp_path / 'new' / 'v1.0.md').read_text()
