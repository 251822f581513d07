"""What samples say of how memory and time grow with the devices."""

from test_samples import run_python


def test_no_device_has_the_whole_batch():
    """Not for its shape either, which gradients of convolutions ask for along with a kernel's."""
    header, line = run_python('memory.py', '--models=cnn', '--devices=4')[-2:]
    assert header.endswith('the busiest of 4') and line.startswith('cnn')
    assert 20 <= int(line.split()[-1].rstrip('%')) <= 100 / 4 * 1.15


def test_growth(tmp_path):
    output = f'--output={tmp_path / "growth.svg"}'
    lines = run_python('growth.py', '--ops=100,200', '--devices=2,3', output)
    assert [line.split()[1] for line in lines[-4:]] == ['8', '8', '2', '3']
    assert (tmp_path / 'growth.svg').stat().st_size > 1000
