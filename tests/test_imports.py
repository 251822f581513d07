"""Imports run one way: no two modules of the package, and no two of its stages, need each other.

Imports that are only for type checkers count, too: whoever reads a module has to know them.
"""

import ast
import pathlib

import pytest

import estimator_mgpu

PACKAGE = pathlib.Path(estimator_mgpu.__file__).parent

# The stages of dividing a graph, each of which may only use the ones before it.
STAGES = [
    'tf_internals',
    'partition.rewrites',
    'partition.rules',
    'partition.propagation',
    'partition.nodes',
    'partition.messages',
    'partition.micro_batches',
    'partition.towers',
]


def module_name(path):
    """'estimator_mgpu.partition.plan' for the file of that module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix('').parts
    return '.'.join(part for part in parts if part != '__init__')


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob('*.py'))}


def imports_of(module):
    """The modules of the package that a module imports at its top level."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith('estimator_mgpu'):
            for alias in node.names:
                name = f'{node.module}.{alias.name}'
                imported.add(name if name in MODULES else node.module)
    return imported


def test_no_two_modules_need_each_other():
    importers = {name: imports_of(name) for name in MODULES}
    done = set()

    def visit(module, path):
        assert module not in path, 'a circle: ' + ' -> '.join([*path, module])
        if module in done:
            return
        for imported in sorted(importers[module]):
            visit(imported, [*path, module])
        done.add(module)

    for module in MODULES:
        visit(module, [])


@pytest.mark.parametrize('stage', STAGES)
def test_a_stage_does_not_use_a_later_one(stage):
    later = [f'estimator_mgpu.{name}' for name in STAGES[STAGES.index(stage) + 1 :]]
    for module in MODULES:
        if module.startswith(f'estimator_mgpu.{stage}'):
            for imported in imports_of(module):
                assert not imported.startswith(tuple(later)), f'{module} imports {imported}'
