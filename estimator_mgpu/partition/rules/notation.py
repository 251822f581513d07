"""How a rule is written: a text with a word for each input and each output of an op.

As in an einsum, dimensions with one letter go together: whatever has the rows along one of them
has them along all.

    'mk kn -> mn (sum)'      a letter is a dimension; one that no output has is reduced over
    'n_ n -> n'              _ is a dimension along which nothing can be divided
    'n... * -> n...'         ... are any number of those; * is whole on each tower, of any rank
    'S S -> S'               a capital is any number of dimensions, matched from the last
    '* I_ -> I...'           beside ... it's as many as elsewhere
    '#S * -> S'              # is a vector of sizes
    'n_ = -> n_'             = is what the tower's own op made, whatever that comes to as a whole
    'S+ -> S'                + is as many of the same as the op has

Dimensions with one letter are as large, or of size 1 and repeated. An input whose size only a
step knows isn't sliced beside one with rows, unless its letter is lower-case and TensorFlow demands
equal sizes.

Where it takes more to tell, a rule is a function (op, sizes) that returns such a text, or where
dimensions have to be worked out a `Signature`, or None where this op can't be divided.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import Constant, Form, Label, SizesOf
from estimator_mgpu.partition.sizes import ONE, Size

if TYPE_CHECKING:
    from estimator_mgpu.partition.size_inference import Sizes


T = TypeVar('T')
Operand = Union[tuple[Label, ...], SizesOf, Form, Constant]  # labels, or what towers are given


class Signature(NamedTuple):
    """What an op does along which dimensions."""

    inputs: Sequence[Operand]  # one for each of the op's inputs
    outputs: Sequence[tuple[Label, ...]]  # the labels of each output's dimensions
    reduce: str | None = None  # outputs without the label, as `Partial.reduce`; None: all are alike
    dims: Sequence[list[Size] | None] | None = None  # outputs', where labels don't tell them
    attrs: dict[str, Any] = {}  # attributes that towers' ops have otherwise


def labels_of(operand: Operand) -> tuple[Label, ...]:
    """Those of an input's own dimensions."""
    return () if isinstance(operand, (SizesOf, Form, Constant)) else operand


Rule = Union[str, Callable[[tf.Operation, 'Sizes'], Union[str, Signature, None]]]

FAMILIES = {  # rules that have a name
    'elementwise': 'S+ -> S',
    'row by row': 'n... -> n...',
    'last dimension': 'S_ -> S_',
    'sum': 'n... -> * (sum)',
    'matmul': 'mk kn -> mn (sum)',
}
_DIMS = r'(?:[A-Za-z_]|\.\.\.)+'
_INPUT, _OUTPUT = rf'(?:[*=]|#?{_DIMS})\+?', rf'(?:\*|{_DIMS})\+?'
_REDUCE = r'(?: \((sum|mean|max|min|prod|all|any)\))?'
_TEXT = re.compile(f'({_INPUT}(?: {_INPUT})*) -> ({_OUTPUT}(?: {_OUTPUT})*){_REDUCE}')
_PART = re.compile(r'[A-Za-z_]|\.\.\.')


def table(rows: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules by types of ops, of rows such as 'Softmax LogSoftmax': 'S_ -> S_'."""
    return {name: rule for names, rule in rows.items() for name in names.split()}


def by(attribute: str, texts: Mapping[Any, str]) -> Rule:
    """A rule for each value of an attribute; with other values an op isn't divided."""
    return lambda op, sizes: texts.get(op.get_attr(attribute))


def signature_of(rule: Rule | None, op: tf.Operation, sizes: Sizes) -> Signature | None:
    """What a rule says of an op; None if there is none, or if it says that it can't be divided."""
    found = rule(op, sizes) if callable(rule) else rule
    return parse(found)(op, sizes) if isinstance(found, str) else found


@functools.cache
def parse(text: str) -> Callable[[tf.Operation, Sizes], Signature | None]:
    """The rule that a text says; raises ValueError if it's malformed."""
    found = _TEXT.fullmatch(FAMILIES.get(text, text))
    problem = _problem(*found.groups()) if found else 'it has another form'
    if not found or problem:
        raise ValueError(
            f"{text!r} isn't a rule: {problem}. Rules are {', '.join(FAMILIES)}, or such as "
            "'n... * -> n...' or 'mk kn -> mn (sum)': a word for each input, '->', a word for each "
            'output, and the reduction, if any: sum, mean, max, min, prod, all or any. A word is '
            "'*', or has a letter, '_' or '...' for each dimension."
        )
    return functools.partial(_signature, found[1].split(), found[2].split(), found[3])


def _problem(given: str, made: str, reduce: str | None) -> str | None:
    """What is wrong with the words of a text; None if nothing is."""
    letters, results = (set(filter(str.isalpha, words)) for words in (given, made))
    alone = [_capitals(word) for word in given.split() if '...' not in word]
    twice = [p for w in f'{given} {made}'.split() for p in [*letters, '...'] if w.count(p) > 1]
    problems = {
        "a word has a letter or '...' twice": twice,
        'a word has two capitals': any(len(capitals) > 1 for capitals in alone),
        "a capital only stands beside '...'": set(_capitals(given)) - set(''.join(alone)),
        "two words have a '+'": max(given.count('+'), made.count('+')) > 1,
        'an output has a letter that no input has': results - letters,
        'no output has a letter, and nothing reduces it': letters - results and not reduce,
    }
    return next((problem for problem, holds in problems.items() if holds), None)


def _signature(
    given: Sequence[str], made: Sequence[str], reduce: str | None, op: tf.Operation, sizes: Sizes
) -> Signature | None:
    """What a text says of an op; None if the op's tensors are of other ranks."""
    given, made = _repeated(given, len(op.inputs)), _repeated(made, len(op.outputs))
    shapes = [_shape(tensor, sizes, word) for word, tensor in zip(given, op.inputs)]
    lengths: dict[str, int] = {}  # of capitals
    for word, shape in zip(given, shapes):
        for capital in _capitals(word) if '...' not in word else '':
            lengths[capital] = max(len(shape) - len(word.strip('#')) + 1, lengths.get(capital, 0))
    inputs = [_labels(word, len(shape), lengths) for word, shape in zip(given, shapes)]
    outputs: list[tuple[Label, ...]] = []
    for word, tensor in zip(made, op.outputs):
        if word == '*':
            outputs.append((None,) * (tensor.shape.rank or 0))
        else:
            count = rank(tensor, sizes) if '...' in word else sum(lengths.get(p, 1) for p in word)
            outputs.append(_labels(word, count, lengths))
    ranks = [*map(len, shapes), *(t.shape.rank for t in op.outputs)]
    if any(n not in (None, len(own)) for own, n in zip([*inputs, *outputs], ranks)):
        return None
    wide = {i for pair in zip(inputs, shapes) for i, size in zip(*pair) if size != ONE}
    operands: list[Operand] = []
    for word, own, shape in zip(given, inputs, shapes):
        repeats = tuple(None if n == ONE and i in wide else i for i, n in zip(own, shape))
        operands.append(Form.LOCAL if word == '=' else SizesOf(own) if '#' in word else repeats)
    dims = {own: shape for word, own, shape in zip(given, inputs, shapes) if '#' in word}
    return Signature(operands, outputs, reduce, [dims.get(own) for own in outputs])


def _repeated(words: Sequence[str], count: int) -> list[str]:
    """A word for each tensor; that with a + for as many as there are."""
    more = count - len(words)
    result = [word.strip('+') for word in words for _ in range(1 + more * ('+' in word))]
    if len(result) != count:
        raise ValueError(f'the rule has {len(words)} words for {count} tensors')
    return result


def _labels(word: str, count: int, lengths: Mapping[str, int]) -> tuple[Label, ...]:
    """A label for each of so many dimensions, if there can be as many."""
    parts = _PART.findall(word)
    free = '...' if '...' in parts else _capitals(word)[:1]
    left = count - sum(lengths.get(part, 1) for part in parts if part != free)
    result: list[Label] = []
    for part in parts:
        for i in range(left if part == free else lengths.get(part, 1), 0, -1):
            named = f'{part}{i}' if part.isupper() else part
            result.append(None if part in ('_', '...') else named)
    return tuple(result)


def _capitals(words: str) -> str:
    return ''.join(filter(str.isupper, words))


class NotSharded(Exception):
    """An op can't be divided, and why."""


def failure(op: tf.Operation, error: Exception) -> RuntimeError:
    """Says of which op a rule fails, rather than says no."""
    return RuntimeError(f'{op.name!r} (a {op.type}): {type(error).__name__}: {error}')


def require(found: T | None, reason: str = '') -> T:
    """What was found of an op; raises Undivided if nothing was, by default as it needs all rows."""
    if found is None:
        raise NotSharded(reason)
    return found


def _shape(tensor: tf.Tensor, sizes: Sizes, word: str = '') -> list[Size]:
    """The dimensions that a word is about."""
    if word in ('*', '='):
        return []
    found = sizes.entries(tensor) if '#' in word else sizes.dims(tensor)
    return require(found, f'the rank of {tensor.name} is unknown')


def rank(tensor: tf.Tensor, sizes: Sizes) -> int:
    """The number of dimensions; raises Undivided if it's unknown."""
    return len(_shape(tensor, sizes))


def letters(count: int, whole: Sequence[int] = ()) -> str:
    """A word with a letter for each of so many dimensions, but `_` for some."""
    named = enumerate(string.ascii_lowercase[:count])
    return ''.join('_' if i in whole else letter for i, letter in named) or '*'
