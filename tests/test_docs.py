"""The examples in the docs run."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu

MODULES = sorted(m.name for m in pkgutil.iter_modules(estimator_mgpu.__path__))
README = pathlib.Path(__file__).resolve().parent.parent / 'README.md'


@pytest.mark.parametrize('name', MODULES)
def test_docstrings(name):
    module = importlib.import_module(f'estimator_mgpu.{name}')
    with tf.Graph().as_default():
        assert doctest.testmod(module).failed == 0


def test_every_public_name_has_an_example():
    for name in estimator_mgpu.__all__:
        thing = getattr(estimator_mgpu, name)
        if name != 'estimator':  # TensorFlow's own
            assert '>>>' in thing.__doc__, name


def test_readme(tmp_path, monkeypatch):
    """The Python blocks of the README, one after another in one namespace."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r'^```python\n(.*?)^```', README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), 'exec'), namespace)
    assert namespace['result']['accuracy'] > 0.9
    assert len(namespace['predictions']) == 100
