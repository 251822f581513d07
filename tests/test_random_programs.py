"""Random programs with state come to the numbers of one device on several, in float64."""

import os

import pytest

import random_programs

COUNT = int(os.environ.get('EXAMPLES', '25'))
AT_ONCE = 5  # programs of a test


@pytest.mark.no_cover
@pytest.mark.core
@pytest.mark.parametrize('first', range(0, COUNT, AT_ONCE))
def test_random_programs(first, behavior):
    """Most programs have to be fit for it: one device comes to the same numbers in each session."""
    failing, left_out = [], []
    for seed in range(first, min(first + AT_ONCE, COUNT)):
        program = random_programs.draw(seed, behavior)
        verdict = random_programs.check(program)
        if verdict.fails:
            failing.append(f'{verdict.kind}, {verdict.text}\n{program}')
        elif verdict.kind == 'left out':
            left_out.append(f'{verdict.text}\n{program}')
    assert not failing, '\n\n'.join(failing)
    assert len(left_out) <= 2, '\n\n'.join(left_out)
