"""Which devices are meant: those of several machines."""

import pytest

import estimator_mgpu
from estimator_mgpu import devices
from models import adam, regression

pytestmark = pytest.mark.core

CHIEF, WORKER, PS = '/job:chief/task:0', '/job:worker/task:0', '/job:ps/task:0'


def has(*names):
    return {task: [f'{task}/device:{name}' for name in some.split()] for task, some in names}


GPUS = has((CHIEF, 'CPU:0 GPU:0'), (WORKER, 'CPU:0 GPU:0 GPU:1'), (PS, 'CPU:0 GPU:0'))
CPUS = has((CHIEF, 'CPU:0 CPU:1'), (WORKER, 'CPU:0 CPU:1'), (PS, 'CPU:0'))


@pytest.mark.parametrize(
    'given, machines, chief, worker',
    [
        (None, GPUS, 'GPU:0', 'GPU:0 GPU:1'),
        (1, GPUS, 'GPU:0', 'GPU:0'),
        ('cpu:0', GPUS, 'CPU:0', 'CPU:0'),
        (None, CPUS, 'CPU:0', 'CPU:0'),
        (2, CPUS, 'CPU:0 CPU:1', 'CPU:0 CPU:1'),
    ],
)
def test_devices_of_machines(given, machines, chief, worker):
    """Those of each machine, in the order of tasks, and none of a ps."""
    expected = has((CHIEF, chief), (WORKER, worker))
    assert devices.resolve(given, machines) == expected[CHIEF] + expected[WORKER]


def test_devices_that_a_machine_lacks():
    lacks = f"'{CHIEF}/device:GPU:1', but that machine has {CHIEF}/device"
    with pytest.raises(ValueError, match=lacks):
        devices.resolve(2, GPUS)
    with pytest.raises(ValueError, match="are those of each machine, without its job: .'/device"):
        estimator_mgpu.Estimator(regression(adam), devices='/job:worker/task:7/cpu:0')


def test_relay():
    """As on the home's machine, if there is such a device, and else the first."""
    both = CPUS[CHIEF] + CPUS[WORKER]
    assert devices.relay(both, both[2], both[1]) == both[3]
    assert devices.relay(both[:3], both[2], both[1]) == both[2]
