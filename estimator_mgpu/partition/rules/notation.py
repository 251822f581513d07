"""How a rule is written: a text with a word for each input and each output of an op.

A word has a mark for each dimension, as in an einsum. Dimensions with one letter are sharded
together: if an input is sharded along one of them, so are all inputs and outputs that have it.

    a lower-case letter   a dimension along which the op can be sharded
                          MatMul: 'mk kn -> mn (sum)'
    _                     a dimension along which it can't: each tower needs all of it
                          InTopK: 'n_ n -> n'
    ...                   any number of dimensions like _
                          MaxPool: 'n... -> n...'
    a capital letter      any number of dimensions along which the op can be sharded
                          Softmax: 'S_ -> S_'
    *                     a tensor of any rank, which each tower needs in full
                          Conv2D: 'n... * -> n...'
    #                     a vector: the sizes of the dimensions that follow
                          Fill: '#S * -> S'
    =                     what another op made on the same tower, such as its batch norm statistics
                          FusedBatchNormGrad, per device: 'n... n... * =+ -> n... *+ (sum)'
    +                     as many inputs or outputs like this as the op has
                          AddN: 'S+ -> S'
    (sum)                 how the towers' results are reduced, if the outputs lack the letter
                          L2Loss: 'S -> * (sum)'

How to write "sum over n": leave n out of the output, and name the reduction: 'n... -> * (sum)'. If
the op is sharded along n, each tower has a partial sum. An output that lacks the letter without a
reduction is not allowed.

A capital's dimensions are matched from the last, as in broadcasting: with 'S S -> S', shapes
[8, 5] and [5] have the labels (S2, S1) and (S1,). Beside `...`, a capital has as many dimensions as
where it stands without: in 'I_ -> I...', `I` is all of the input but for the last dimension, and
`...` what else the output has.

Dimensions with one letter have the same size, or size 1 and are broadcast. An operand with 1 entry
is never sliced, so an operand whose size is known only when the step runs isn't sliced beside a
sharded one, unless its letter is lower-case and TensorFlow demands equal sizes.

An op may be told by an input or an attribute along which axes it works: see `along_axes`.

If a text isn't enough, a rule is a function of the op and of the `Sizes`. It returns a text, or a
`Signature`, which has the labels of all dimensions, or raises `NotSharded`.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import MOMENTS
from estimator_mgpu.partition.plan import Constant, EntriesOf, Form, IndicesOfRows, Label, SizesOf
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE, Size

T = TypeVar('T')

# What a rule says of an input: the labels of its dimensions, or what towers are given.
Operand = Union[tuple[Label, ...], SizesOf, EntriesOf, IndicesOfRows, Form, Constant]


class Signature(NamedTuple):
    """A rule for one op, with the ranks of its tensors: the labels of their dimensions."""

    inputs: Sequence[Operand]  # one for each of the op's inputs
    outputs: Sequence[tuple[Label, ...]]  # the labels of each output's dimensions
    # How outputs without the label are reduced, as `Partial.reduce`; None if they are replicated.
    reduce: str | None = None
    # The outputs' dimensions. None for an output or a dimension whose sizes the labels tell.
    dims: Sequence[Sequence[Size | None] | None] | None = None
    attrs: dict[str, Any] = {}  # attributes that are different on towers
    # Of labels with different sizes on inputs and outputs: whether the op takes the entries to be
    # in blocks, as in `Shard`. For labels that aren't here, any order of the entries will do, as
    # long as all of the op's operands have the same.
    in_blocks: Mapping[Label, bool] = {}
    unused: Sequence[int] = ()  # outputs that no op uses
    # What holds as well, for an op that cannot be sharded as above.
    otherwise: Signature | None = None


# A text, or a function of an op. A user's function may also return None for "not sharded".
Rule = Union[str, Callable[[tf.Operation, Sizes], Union[str, Signature, None]]]


class NotSharded(Exception):
    """Raised where an op has to run once, unsharded; the text, if any, says why."""


class OtherRanks(NotSharded):
    """Raised where a text is for tensors of other ranks than the op has; it says which."""


def require(value: T | None, reason: str = '') -> T:
    """The value; raises NotSharded if it's None, that is, if it's unknown."""
    if value is None:
        raise NotSharded(reason)
    return value


FAMILIES = {  # rules that have a name
    'elementwise': 'S+ -> S',
    'row by row': 'n... -> n...',
    'last dimension': 'S_ -> S_',
    'sum': 'n... -> * (sum)',
    'matmul': 'mk kn -> mn (sum)',
}


# What rules are made of.


def table(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rule of each type of op, given rules of several: 'Softmax LogSoftmax': 'S_ -> S_'."""
    by_type: dict[str, Rule] = {}
    for op_types, rule in rules.items():
        by_type.update(dict.fromkeys(op_types.split(), rule))
    return by_type


def by_attribute(attribute: str, texts: Mapping[Any, str]) -> Rule:
    """A rule with a text for each value of an attribute. With other values an op isn't sharded."""

    def rule(op: tf.Operation, sizes: Sizes) -> str:
        return require(texts.get(op.get_attr(attribute)))

    return rule


def rank(tensor: tf.Tensor, sizes: Sizes) -> int:
    """The number of dimensions; raises NotSharded if it's unknown."""
    return len(_dims(tensor, sizes))


def word(count: int, unsharded: Sequence[int]) -> str:
    """A word with a letter for each of `count` dimensions, but `_` for unsharded ones: 'a_c'."""
    letters = enumerate(string.ascii_lowercase[:count])
    marks = ['_' if axis in unsharded else letter for axis, letter in letters]
    return ''.join(marks) or '*'


def axes_of(op: tf.Operation, source: int | str, sizes: Sizes, count: int) -> list[int]:
    """The axes that an op works along, from 0: -1 is the last of `count`.

    Args:
      source: which input or which attribute has them; one or several.
      count: the number of dimensions.

    Raises:
      NotSharded: if they aren't known before the step runs.
    """
    if isinstance(source, str):
        attr = op.node_def.attr[source]  # It takes a third of the time of `get_attr`, or less.
        numbers = attr.list.i if attr.HasField('list') else attr.i
    else:
        numbers = require(sizes.numbers(op.inputs[source]))
    if not count:
        return []
    return sorted({number % count for number in np.ravel(numbers).tolist()})


def along_axes(source: int | str, text: str) -> Rule:
    """A rule for ops that can be sharded along all dimensions but the axes that they work along.

    For example, `Cumsum` has `along_axes(1, 'all * -> all')`: its axis is input 1, and with axis 1
    of a matrix, that is 'a_ * -> a_'. `ExpandDims` has `along_axes(1, 'left * -> all')`: the output
    has a dimension more, so with axis 1 it's 'ac * -> a_c'.

    Args:
      source: which input or which attribute has the axes.
      text: with `all` for a word with all dimensions, the axes among them, and `left` for a word
        without the axes.
    """
    # The first of these words is that of an input, which tells the number of dimensions.
    names = [one.strip('+') for one in text.split()]
    index = min(names.index(name) for name in ('all', 'left') if name in names)

    def rule(op: tf.Operation, sizes: Sizes) -> Signature:
        count = rank(op.inputs[index], sizes)
        if names[index] == 'left':
            count += 1
        every = word(count, axes_of(op, source, sizes, count))
        left = every.replace('_', '') or '*'
        signature = parse(text.replace('all', every).replace('left', left)).signature(op, sizes)
        if names[index] == names[-1] == 'all':  # The output has the shape of the input.
            signature = signature._replace(dims=[sizes.dims(op.inputs[index])])
        return signature

    return rule


# What others ask of rules.


def signature_of(rule: Rule | None, op: tf.Operation, sizes: Sizes) -> Signature:
    """The signature that a rule has for an op.

    Args:
      rule: the one for the op's type; None if there is none.

    Raises:
      NotSharded: if there is no rule, or if it says so.
      TypeError: if the rule is a function that returns something else.
      ValueError: if the rule is for another number of inputs or outputs, or isn't well-formed.
    """
    statement = rule(op, sizes) if callable(rule) else rule
    if statement is None:
        raise NotSharded
    if isinstance(statement, str):
        return parse(statement).signature(op, sizes)
    if not isinstance(statement, Signature):
        raise TypeError(
            f'the rule for {op.type} returned {statement!r}. A rule returns a text, such as '
            "'n_ -> n_', or None if the op cannot be sharded"
        )
    return statement


def labels_of(operand: Operand) -> tuple[Label, ...]:
    """The labels of an input's own dimensions."""
    if isinstance(operand, IndicesOfRows):
        return operand.labels
    return () if isinstance(operand, (SizesOf, EntriesOf, Form, Constant)) else operand


def failure(op: tf.Operation, error: Exception) -> RuntimeError:
    """The error for a rule that fails, rather than says "not sharded"."""
    return RuntimeError(f'{op.name!r} (a {op.type}): {type(error).__name__}: {error}')


def check_reduction(reduction: str, dtype: tf.DType) -> None:
    """Raises ValueError if partial results of a type can't be reduced: numbers by `all`, say.

    Means of integers are found out by `check_rule`, as TensorFlow has no kernel for them.
    """
    legal: Sequence[str] = ()
    if dtype.is_bool:
        legal = ('all', 'any')
    elif dtype.is_complex:
        legal = ('sum', 'mean', 'prod')
    elif dtype.is_floating or dtype.is_integer:
        legal = ('sum', 'mean', 'prod', 'max', 'min')
    # Moments are of floats only, and no user's rule has them.
    if reduction not in (*legal, MOMENTS):
        raise ValueError(
            f'its rule reduces {dtype.base_dtype.name} by {reduction!r}. Legal is '
            f'{" or ".join(legal) or "no reduction"}.'
        )


# Texts.

_DIMS = r'(?:[A-Za-z_]|\.\.\.)+'
_INPUT = rf'(?:[*=]|#?{_DIMS})\+?'
_OUTPUT = rf'(?:\*|{_DIMS})\+?'
_REDUCE = r'(?: \((sum|mean|max|min|prod|all|any)\))?'
_TEXT = re.compile(f'({_INPUT}(?: {_INPUT})*) -> ({_OUTPUT}(?: {_OUTPUT})*){_REDUCE}')
_MARK = re.compile(r'[A-Za-z_]|\.\.\.')


@functools.cache
def parse(text: str) -> TextRule:
    """The words of a text, or of the family that it names; raises ValueError if it's malformed."""
    match = _TEXT.fullmatch(FAMILIES.get(text, text))
    if match is None:
        raise _malformed(text, 'it has another form')
    rule = TextRule(match[1].split(), match[2].split(), match[3])
    problem = _problem(rule)
    if problem:
        raise _malformed(text, problem)
    return rule


def _malformed(text: str, problem: str) -> ValueError:
    return ValueError(
        f"{text!r} isn't a rule: {problem}. Rules are {', '.join(FAMILIES)}, or such as "
        "'n... * -> n...' or 'mk kn -> mn (sum)': a word for each input, '->', a word for each "
        'output, and the reduction, if any: sum, mean, max, min, prod, all or any. A word is '
        "'*', or has a letter, '_' or '...' for each dimension."
    )


def _problem(rule: TextRule) -> str | None:
    """What is wrong with the words of a text; None if nothing is."""
    input_letters = _letters(rule.inputs)
    output_letters = _letters(rule.outputs)
    for one in (*rule.inputs, *rule.outputs):
        if any(one.count(mark) > 1 for mark in (*input_letters, '...')):
            return "a word has a letter or '...' twice"

    # These say how many dimensions a capital has.
    without_ellipsis = [one for one in rule.inputs if '...' not in one]
    if any(len(_capitals(one)) > 1 for one in without_ellipsis):
        return 'a word has two capitals'
    if set(_capitals(''.join(rule.inputs))) - set(''.join(without_ellipsis)):
        return "a capital only stands beside '...'"

    for words in (rule.inputs, rule.outputs):
        if ''.join(words).count('+') > 1:
            return "two words have a '+'"
    if output_letters - input_letters:
        return 'an output has a letter that no input has'
    if input_letters - output_letters and not rule.reduce:
        return 'no output has a letter, and nothing reduces it'
    return None


def _letters(words: Sequence[str]) -> set[str]:
    return {mark for mark in ''.join(words) if mark.isalpha()}


def _capitals(one: str) -> str:
    return ''.join(mark for mark in one if mark.isupper())


class TextRule(NamedTuple):
    """A text: 'S S_ -> * (sum)' has the inputs 'S' and 'S_' and the output '*'."""

    inputs: list[str]
    outputs: list[str]
    reduce: str | None

    def signature(self, op: tf.Operation, sizes: Sizes) -> Signature:
        """The labels of an op's dimensions.

        Raises:
          OtherRanks: if the op's tensors are of other ranks.
          NotSharded: if the rank of a tensor is unknown.
          ValueError: if the op has another number of inputs or outputs.
        """
        input_words = word_for_each(self.inputs, len(op.inputs), 'inputs')
        output_words = word_for_each(self.outputs, len(op.outputs), 'outputs')
        input_dims = [_dims(tensor, sizes, one) for one, tensor in zip(input_words, op.inputs)]

        lengths = _lengths_of_capitals(input_words, input_dims)
        input_labels = [
            _labels(one, len(dims), tuple(lengths.items()))
            for one, dims in zip(input_words, input_dims)
        ]
        output_labels = [
            _output_labels(one, tensor, sizes, lengths)
            for one, tensor in zip(output_words, op.outputs)
        ]
        for index, (one, labels, dims) in enumerate(zip(input_words, input_labels, input_dims)):
            if len(labels) != len(dims):
                raise _other_ranks(op, one, len(labels), f'input {index}', len(dims))
        for index, (one, labels, tensor) in enumerate(zip(output_words, output_labels, op.outputs)):
            if tensor.shape.rank not in (None, len(labels)):
                count = tensor.shape.rank
                raise _other_ranks(op, one, len(labels), f'output {index}', count)

        operands = _operands(input_words, input_labels, input_dims)
        shapes = {
            labels: dims
            for one, labels, dims in zip(input_words, input_labels, input_dims)
            if '#' in one
        }
        output_dims = [shapes.get(labels) for labels in output_labels]
        return Signature(operands, output_labels, self.reduce, output_dims)


def _other_ranks(op: tf.Operation, one: str, marks: int, tensor: str, rank: int) -> OtherRanks:
    """The error for a word that has marks for other dimensions than the tensor has."""
    return OtherRanks(
        f'{one!r} in the rule for {op.type} is for {marks} dimensions, and its {tensor} has {rank}'
    )


def word_for_each(words: Sequence[str], count: int, kind: str) -> list[str]:
    """A word for each of `count` tensors: ['n', 'S+'] for three is ['n', 'S', 'S'].

    Raises:
      ValueError: if the words can't be for as many.
    """
    repeats = 1 + count - len(words)  # of the word with a '+'
    result: list[str] = []
    for one in words:
        if '+' in one:
            result += [one.strip('+')] * repeats
        else:
            result.append(one)
    if len(result) != count:
        text = ' '.join(words)
        raise ValueError(f'the rule is for the {kind} {text!r}, and the op has {count}')
    return result


def _dims(tensor: tf.Tensor, sizes: Sizes, one: str = '') -> list[Size]:
    """The dimensions that a word is about: those of the input, or those whose sizes it has."""
    if one in ('*', '='):
        return []
    dims = sizes.entries(tensor) if '#' in one else sizes.dims(tensor)
    return require(dims, f'the rank of {tensor.name} is unknown')


def _lengths_of_capitals(
    words: Sequence[str], input_dims: Sequence[Sequence[Size]]
) -> dict[str, int]:
    """How many dimensions each capital stands for: the most that an input leaves it.

    With 'S_ S -> S' and inputs of ranks 3 and 1, S stands for 2 dimensions, or for 1.
    """
    lengths: dict[str, int] = {}
    for one, dims in zip(words, input_dims):
        if '...' in one:
            continue
        for capital in _capitals(one):
            others = len(one.strip('#')) - 1
            lengths[capital] = max(len(dims) - others, lengths.get(capital, 0))
    return lengths


@functools.cache
def _labels(
    one: str, count: int, lengths_of_capitals: tuple[tuple[str, int], ...]
) -> tuple[Label, ...]:
    """A label for each of `count` dimensions, if the word can have as many.

    'nS' of 3 dimensions is ('n', 'S2', 'S1'): a capital is counted from the last, so that inputs of
    fewer dimensions have the same labels as those that they are broadcast to.
    """
    lengths = dict(lengths_of_capitals)
    marks = _MARK.findall(one)
    # The mark that stands for what others leave: an ellipsis, otherwise a capital.
    flexible = '...' if '...' in marks else _capitals(one)[:1]
    left = count - sum(lengths.get(mark, 1) for mark in marks if mark != flexible)

    labels: list[Label] = []
    for mark in marks:
        length = left if mark == flexible else lengths.get(mark, 1)
        if mark in ('_', '...'):
            labels += [None] * length
        elif mark.isupper():
            labels += [f'{mark}{i}' for i in range(length, 0, -1)]
        else:
            labels.append(mark)
    return tuple(labels)


def _output_labels(
    one: str, tensor: tf.Tensor, sizes: Sizes, lengths: Mapping[str, int]
) -> tuple[Label, ...]:
    if one == '*':
        return (None,) * (tensor.shape.rank or 0)
    if '...' in one:
        return _labels(one, rank(tensor, sizes), tuple(lengths.items()))
    return _labels(one, sum(lengths.get(mark, 1) for mark in one), tuple(lengths.items()))


def _operands(
    words: Sequence[str],
    input_labels: Sequence[tuple[Label, ...]],
    input_dims: Sequence[Sequence[Size]],
) -> list[Operand]:
    """The operands; dimensions of size 1 that the op broadcasts lose their label."""
    wide: set[Label] = set()  # labels of dimensions that have, or may have, more entries
    for labels, dims in zip(input_labels, input_dims):
        wide |= {label for label, size in zip(labels, dims) if size != ONE}

    operands: list[Operand] = []
    for one, labels, dims in zip(words, input_labels, input_dims):
        if one == '=':
            operands.append(Form.LOCAL)
        elif '#' in one:
            operands.append(SizesOf(labels))
        else:
            operands.append(
                tuple(
                    None if size == ONE and label in wide else label
                    for label, size in zip(labels, dims)
                )
            )
    return operands
