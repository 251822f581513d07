"""Types of ops are named in few places, where others are.

If a module named one elsewhere, such as in `op.type == 'MatMul'`, that would be one more place to
look for what the package does with an op. Other modules use the constants of op_types.py.
"""

import ast
import pathlib

import pytest
from tensorflow.python.framework import op_def_registry

import estimator_mgpu

PACKAGE = pathlib.Path(estimator_mgpu.__file__).parent

PLACES = [
    PACKAGE / 'tf_internals' / 'op_types.py',
    PACKAGE / 'partition' / 'size_inference.py',  # tables of ops whose shapes and values are sizes
    PACKAGE / 'partition' / 'value_functions.py',
    *(PACKAGE / 'partition' / 'rewrites').rglob('*.py'),
    *(PACKAGE / 'partition' / 'rules').rglob('*.py'),
]

# The first argument of these functions is the type of an op that the package makes itself.
MAKES_AN_OP = {'add', '_add', '_binary', 'node_def'}

# Elsewhere, strings that are types of ops, and what else they stand for.
ALLOWED = {
    'reports/explain.py': {'B'},  # bytes
    'reports/pictures.py': {'B'},
    'partition/towers/reduce_and_gather.py': {
        *('Maximum', 'Minimum', 'Mul', 'LogicalAnd', 'LogicalOr'),  # ops that are made of two parts
    },
}


def name_of_function(call):
    """Returns `add` for both `add(...)` and `nodes.add(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ''


def op_types_in(source):
    """Yields the line and the text of each string that is a type of op, but for ops made there."""
    tree = ast.parse(source)

    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and name_of_function(node) in MAKES_AN_OP:
            made.add(node.args[0])

    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in made and op_def_registry.get(node.value):
            yield node.lineno, node.value


def test_op_types_are_named_in_few_places():
    problems = []
    for path in sorted({*PACKAGE.rglob('*.py')} - {*PLACES}):
        name = path.relative_to(PACKAGE).as_posix()
        for line, op_type in op_types_in(path.read_text()):
            if op_type not in ALLOWED.get(name, set()):
                problems.append(f'{name}:{line} names the type {op_type}')

    if problems:
        problems.append('Add a constant to tf_internals/op_types.py, or a rule, and use that.')
        pytest.fail('\n'.join(problems), pytrace=False)


def test_what_the_check_finds():
    """A type that is compared, and not one of an op that is made."""
    source = "if op.type == 'MatMul':\n    nodes.add('AddV2', [x, y])\n"
    assert list(op_types_in(source)) == [(1, 'MatMul')]
