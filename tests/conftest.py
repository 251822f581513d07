"""What all tests share."""

import os
import random
import time

import hypothesis
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order import facts
from forks import forks
from towers import behavior_of, free_addresses

_every_run = {'deadline': None, 'database': None, 'suppress_health_check': hypothesis.HealthCheck}
hypothesis.settings.register_profile('suite', max_examples=25, derandomize=True, **_every_run)
# Other examples in each run; how many is up to the environment variable EXAMPLES.
hypothesis.settings.register_profile(
    'long', max_examples=int(os.environ.get('EXAMPLES', '300')), print_blob=True, **_every_run
)
hypothesis.settings.load_profile('suite')


def pytest_addoption(parser):
    parser.addoption('--gpus', type=int, help='run on so many GPUs; a single one is split')


def pytest_configure(config):
    if count := config.getoption('gpus'):
        gpus = tf.config.list_physical_devices('GPU')
        if not gpus:
            raise pytest.UsageError('--gpus: TensorFlow finds no GPU.')
        if len(gpus) == 1:
            parts = [tf.config.LogicalDeviceConfiguration(memory_limit=1024)] * count
            tf.config.set_logical_device_configuration(gpus[0], parts)
        # It would round what is multiplied, by other amounts on other numbers of devices.
        tf.config.experimental.enable_tensor_float_32_execution(False)


@pytest.fixture(params=['v2', 'v1'])
def behavior(request):
    """TensorFlow 2's loops, variables and shapes, or those of `tf.disable_v2_behavior()`."""
    with behavior_of(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded():
    """Keras takes the seeds of initial values from Python's random."""
    random.seed(7)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Each graph that is changed has to touch state in the order that it had."""
    monkeypatch.setenv(facts.VARIABLE, '1')


@pytest.fixture(autouse=True)
def logged():
    """TensorFlow's log down to INFO, for caplog."""
    tf.logging.set_verbosity(tf.logging.INFO)


@pytest.fixture(scope='session', autouse=True)
def forks_end():
    yield
    forks.close()


@pytest.fixture
def clock(monkeypatch):
    """A list whose entry is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    return now


@pytest.fixture
def gpus(monkeypatch):
    """Called with each GPU's parts, or None, it makes a machine of such GPUs."""
    real = tf.config.list_physical_devices

    def pretend(*parts):
        found = dict(zip(map('/physical_device:GPU:{}'.format, range(len(parts))), parts))
        listed = lambda kind=None: list(found) if kind == 'GPU' else real(kind)  # noqa: E731
        monkeypatch.setattr(tf.config, 'list_physical_devices', listed)
        monkeypatch.setattr(tf.config, 'get_logical_device_configuration', found.get)

    return pretend


@pytest.fixture(scope='session')
def three_machines():
    """The target of a session whose chief and two workers have two devices each."""
    chief, *workers = free_addresses(3)
    jobs, config = {'chief': [chief], 'worker': workers}, tf.ConfigProto(device_count={'CPU': 2})
    tasks = [('chief', 0), ('worker', 0), ('worker', 1)]
    return [tf.train.Server(jobs, *task, config=config) for task in tasks][0].target


WAITING = ('test_cluster.py', 'test_samples.py', 'test_benchmark.py', 'test_watch.py')


def pytest_collection_modifyitems(items):
    """Puts the tests first that mostly wait for other processes: others run beside them."""
    items.sort(key=lambda item: item.path.name not in WAITING)
