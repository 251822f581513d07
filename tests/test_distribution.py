"""What is in the wheel and in the source distribution: all that belongs there, and nothing else."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import estimator_mgpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = f'estimator_mgpu-{estimator_mgpu.__version__}'
LEFT_OVER = """
.mypy_cache/a.json build/lib/estimator_mgpu/old.py confusion.png docs/picture.png model/checkpoint
estimator_mgpu/__pycache__/devices.cpython-311.pyc estimator_mgpu/notes.txt samples/benchmark.json
site/index.html tests/__pycache__/models.cpython-311.pyc
"""


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """Both, built by `python -m build` from a copy of the checkout in which things were left."""
    checkout = tmp_path_factory.mktemp('distribution') / 'checkout'
    hidden = shutil.ignore_patterns('.*', 'build', 'dist', 'site', '*.egg-info', '__pycache__')
    shutil.copytree(ROOT, checkout, ignore=hidden)
    shutil.copytree(ROOT / '.ci', checkout / '.ci')
    for name in LEFT_OVER.split():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('left over')
    # Without isolation, which would download setuptools.
    command = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', 'dist']
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / 'dist'


def sources(folder, *patterns):
    found = [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    assert found
    return {str(path.relative_to(ROOT)) for path in found}


def package():
    return sources('estimator_mgpu', '**/*.py') | {'estimator_mgpu/py.typed'}


def test_the_wheel(built):
    with zipfile.ZipFile(built / f'{NAME}-py3-none-any.whl') as wheel:
        names = {name for name in wheel.namelist() if not name.endswith('/')}
    about = f'{NAME}.dist-info'
    # Where a license stands in it is up to setuptools.
    [license] = {f'{about}/LICENSE', f'{about}/licenses/LICENSE'} & names
    metadata = {f'{about}/{name}' for name in ('METADATA', 'RECORD', 'WHEEL', 'top_level.txt')}
    assert names == package() | metadata | {license}


def test_the_source_distribution(built):
    [path] = built.glob('*.tar.gz')  # The name has a hyphen by some versions of setuptools.
    with tarfile.open(path) as archive:
        names = {member.name for member in archive.getmembers() if member.isfile()}
    found = {name.partition('/')[2] for name in names if '.egg-info/' not in name}
    top = 'CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile PKG-INFO README.md mkdocs.yml'
    assert found == {
        *package(),
        *sources('docs', '*.md', '*.py', '*.svg', 'digits.png', 'plan.png', 'tensorboard.png'),
        *sources('samples', '*.py', '*.ipynb'),
        *sources('tests', '*.py'),
        *('.ci/matrix', '.ci/run', *top.split(), 'pyproject.toml', 'setup.cfg', 'setup.py'),
    }
    assert len([*built.iterdir()]) == 2


USER = """
from typing import Any

import estimator_mgpu
from estimator_mgpu import *

def model_fn(features: Any, labels: Any, mode: str, params: dict[str, float]) -> Any:
    return TowerOptimizer(lambda: None).minimize(features)

def input_fn() -> Any: ...

devices = ['/cpu:0', '/cpu:1']
config = estimator.RunConfig(session_config=session_config(devices))
several = Estimator(replicate(devices=2, broadcast=['x'])(model_fn), 'model', config, {'rate': 0.1})
for names in (['x'], ('x',), {'x'}, frozenset('x'), {'x': 1}.keys(), (name for name in 'xy')):
    replicate(model_fn, broadcast=names)
several.train(input_fn, [ProgressHook(steps=3), ThroughputHook(50, batch_size=4)], steps=3)
canned: Estimator = replicate_estimator(estimator.LinearRegressor([]), variables='first')
found = several.explain(input_fn)
with several.predictor({'x': [1.0]}, predict_keys=['y']) as predict:
    y: Any = predict({'x': [2.0]})['y']
reasons: list[str] = [op.why for op in found.once] + [*found.as_dict()]
worst: float = max(d.relative for d in verify(model_fn, input_fn, {}, devices, steps=2).differences)
verify(canned, input_fn)
contrib = replicate_model_fn(model_fn, 'mean', devices)
register_rule('MyOp', lambda op, sizes: 'n... -> n...' if op.get_attr('axis') else None)
types: set[str] = check_rule(abs, [1.0, 2.0, 3.0], towers=2)

# Each of these is an error: a comment that hides none would be one, too.
replicate(varibles='cpu')  # type: ignore[call-overload]
replicate(model_fn, variables='gpu')  # type: ignore[call-overload]
replicate(model_fn)(1)  # type: ignore[call-arg]
replicate(input='machine')(model_fn)(1)  # type: ignore[call-arg]
Estimator(model_fn, batch_norm='global')  # type: ignore[arg-type]
replicate_estimator(canned, varibles='cpu')  # type: ignore[call-arg]
replicate_estimator(canned, 2)  # type: ignore[arg-type]
replicate(model_fn, 2)  # type: ignore[call-overload]
replicate(broadcast='x')  # type: ignore[call-overload]
Estimator(model_fn, broadcast='x')  # type: ignore[arg-type]
estimator_mgpu.verfy(model_fn, input_fn)  # type: ignore[attr-defined]
from estimator_mgpu import verfy  # type: ignore[attr-defined]
"""


# Each of them reports a comment that hides no error.
TYPE_CHECKERS = {
    'mypy': ['mypy', '--strict', '--follow-imports=silent', 'script.py'],
    # It is Pyright, with all that it needs in its wheel.
    'pyright': ['basedpyright', '--pythonpath', sys.executable],
}


@pytest.mark.parametrize('command', TYPE_CHECKERS.values(), ids=TYPE_CHECKERS)
def test_a_users_script_is_typed(command, tmp_path):
    assert all(name in USER for name in estimator_mgpu.__all__)
    (tmp_path / 'script.py').write_text(USER)
    installed = pathlib.Path(estimator_mgpu.__file__).parents[1]
    paths = [str(installed)] if installed == ROOT else []
    config = {
        'include': ['script.py'],
        'extraPaths': paths,
        'typeCheckingMode': 'standard',  # that of Pyright and of editors with it
        'reportUnnecessaryTypeIgnoreComment': 'error',
    }
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, '-m', *command],
        cwd=tmp_path,
        env={**os.environ, 'MYPYPATH': ''.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
