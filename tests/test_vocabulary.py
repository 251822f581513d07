"""Documentation, messages and comments use the words of docs/glossary.md, and not those given up.

A reader who meets two words looks for two things. Each pattern below is a wording that was once
used for a term of the glossary. The tests say where it is used, and what to write instead.
"""

import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What to say instead, by pattern. Case doesn't matter, and a line may be broken at each space. No
# file is exempt: a pattern that is right in one place and wrong in another is too wide.
GIVEN_UP = {
    r'\bruns? whole\b': 'runs once',
    r'\b(made|makes?|becomes?|became) whole\b': 'gathered, reduced; the full value',
    r'\b(goes?|go) whole\b': 'is replicated',
    r'\bwhole values?\b': 'full value',
    r'\bundivided\b': 'unsharded; runs once',
    r'\bin towers\b': 'on every device, on every tower; sharded',
    r'\bdivided (ops?|tensors?|loops?|dimensions?)\b': 'sharded',
    r"\b(op|tensor|loop|branch) (is|isn't) divided\b": 'is sharded, runs once',
    r"\b(ops|tensors|loops|branches) (are|aren't) divided\b": 'are sharded, run once',
    r"\bwhat (is|isn't|can't be|cannot be) divided\b": 'what is sharded, what runs once',
    r'\b(is|are) divided (again|by itself|by themselves|by rows)\b': 'is sharded',
    r'\bnothing is divided\b': 'nothing is sharded',
    r'\b(goes?|going|went) by rows\b': 'is sharded along the examples',
    r'\b(goes?|going) row by row\b': 'is sharded along the examples',
    r"(?<!['\"`])\brow by row\b(?!['\"`])": "for each example (`'row by row'` is a name of a rule)",
    r'\bits rows come to\b': 'partial sum, partial value',
    r"\bthe batch's rows\b": "the batch's examples",
    r'\brows of (the|a|its|each|every) (global )?batch\b': 'examples of the batch',
    r'\b(needs|on|until) all rows\b': 'all examples; the whole batch',
    r'\bfewer rows than (devices|towers)\b': 'fewer examples than devices',
    r'\brows? (a|per|each|of each) (tower|device)\b': 'examples per device',
    r'\bwhat is otherwise\b': 'differences',
    r"\b(weren't|wasn't) at hand\b": 'not available',
    r'\bwith the numbers of one\b': 'with the results that one device would give',
}

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(ROOT.glob('docs/*.md'))]
MODULES = sorted([*ROOT.glob('estimator_mgpu/**/*.py'), *ROOT.glob('samples/*.py')])


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize('path', PAGES, ids=name_of)
def test_page(path):
    assert_vocabulary(path, path.read_text())


def test_changes_since_the_last_release():
    path = ROOT / 'CHANGELOG.md'
    unreleased = re.search(r'^## Unreleased\n.*?(?=^## \[)', path.read_text(), re.DOTALL | re.M)
    if unreleased:  # There is none in a release.
        assert_vocabulary(path, unreleased[0])


@pytest.mark.parametrize('path', MODULES, ids=name_of)
def test_module(path):
    """Its docstrings, other strings, and comments: names in code are free."""
    assert_vocabulary(path, prose_of(path.read_text()))


def prose_of(source):
    """Returns the strings and the comments of a module, in the lines where they are."""
    prose = [''] * (source.count('\n') + 1)
    kinds = {tokenize.STRING, tokenize.COMMENT}
    kinds.add(getattr(tokenize, 'FSTRING_MIDDLE', tokenize.STRING))  # since Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in kinds:
            continue
        text = re.sub(r"^(#|[A-Za-z]*['\"]+)", ' ', token.string)  # without the opening quotes
        for offset, line in enumerate(text.split('\n')):
            prose[token.start[0] - 1 + offset] += f'{line} '
    return '\n'.join(prose)


def assert_vocabulary(path, text):
    """Fails with each wording that was given up: where it is, and what to say instead."""
    problems = problems_in(text)
    assert not problems, f'{name_of(path)}:\n' + '\n'.join(problems)


def problems_in(text):
    """Returns a line for each wording in a text that was given up."""
    # Joins the lines of a paragraph. The length stays, so that a match tells its line.
    joined = re.sub(r"[ '\"]*\n(?! *\n) *", lambda edge: ' ' * len(edge[0]), text)
    problems = []
    for pattern, instead in GIVEN_UP.items():
        for match in re.finditer(pattern.replace(' ', ' +'), joined, re.IGNORECASE):
            line = text.count('\n', 0, match.start()) + 1
            wording = ' '.join(match[0].split())
            problems.append(f'  line {line}: {wording!r}. Say instead: {instead}')
    return problems


@pytest.mark.parametrize(
    'text, count',
    [
        ('This op runs whole.', 1),
        ('An op that runs\n  whole, and one that goes by\nrows.', 2),
        ('An op that runs\n\nWhole batches are gathered.', 0),
        ("An op that runs once. The rule 'row by row'.", 0),
        ('The graph is divided over devices. The rows of a matrix.', 0),
    ],
)
def test_what_is_found_in_a_text(text, count):
    assert len(problems_in(text)) == count


@pytest.mark.parametrize(
    'source, lines',
    [
        ("print(f'{count} ops run in '\n    f'towers')", [1]),
        ('x = 1  # This\n# runs\n# whole.', [2]),
        ('# It runs\nwhole = 1', []),
        ('def in_towers():\n    """An op.\n\n    It runs whole.\n    """', [4]),
    ],
)
def test_what_is_found_in_a_module(source, lines):
    problems = problems_in(prose_of(source))
    assert len(problems) == len(lines)
    assert all(f'line {line}:' in problem for line, problem in zip(lines, problems))
