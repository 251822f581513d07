"""What samples say of how memory and time grow with the devices."""

import pytest

from test_samples import SAMPLES, run_python

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import memory


@pytest.mark.parametrize('model', ['cnn', 'lstm'])
def test_no_device_has_the_whole_batch(model):
    """Not for its shape either, which gradients of convolutions ask for along with a kernel's."""
    [one] = memory.peaks(model, 1).values()
    several = memory.peaks(model, 4)
    assert len(several) == 4
    assert max(several.values()) <= 1.15 / 4 * one


def test_growth(tmp_path):
    output = f'--output={tmp_path / "growth.svg"}'
    lines = run_python('growth.py', '--ops=100,200', '--devices=2,3', output)
    assert [line.split()[1] for line in lines[-4:]] == ['8', '8', '2', '3']
    assert (tmp_path / 'growth.svg').stat().st_size > 1000


def test_the_table():
    header, line = run_python('memory.py', '--models=cnn', '--devices=2')[-2:]
    assert header.endswith('the busiest of 2') and line.split()[0] == 'cnn'
