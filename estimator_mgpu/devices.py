"""Which devices there are, and the session that has them.

In: what a user gives as `devices=`. Out: a device for each tower, such as '/device:GPU:0', and a
`ConfigProto` for the session.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.argument_checks import is_positive_integer
from estimator_mgpu.tf_internals.tf_estimator import get_default_session_config

Devices = Union[None, int, str, Iterable[str]]
CHIEF = '/job:chief/task:0'  # the task that devices without one are of
HOST = '/device:CPU:0'  # where a batch is that has no device: else TensorFlow would take a GPU

# Passes of TensorFlow's graph optimizer that go over the ops of all towers, and make no step
# shorter. The others are worth it on GPUs: layout and remapping.
_USELESS_PASSES = (
    'arithmetic_optimization',
    'common_subgraph_elimination',
    'constant_folding',
    'dependency_optimization',
    'loop_optimization',
    'shape_optimization',
)
_MOST_MICROBATCHES = 1000  # Then the graph of two small layers has 84,000 ops.
_LEGAL = (
    'devices is None (every GPU), a positive int (that many GPUs, or logical CPU devices where '
    "there is no GPU), or a list of device strings such as ['/device:GPU:0', '/device:GPU:1']"
)


def resolve(devices: Devices = None, machines: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the devices meant by `devices`, one a tower, in canonical form; initializes no GPU.

    >>> resolve(['/cpu:0', 'CPU:1'])
    ['/device:CPU:0', '/device:CPU:1']

    Args:
      devices: as for `replicate()`. On several machines, these are those of each machine.
      machines: the devices that each task has, by the task's name; None on one machine.
    """
    devices = checked(devices)
    if not machines:
        gpus = sum(len(parts) or 1 for parts in _gpus())
        towers = _towers_of_machine(devices, gpus, uses_gpus=gpus > 0)
        _check_gpus(devices, towers, gpus)
        return towers

    gpus_of_tasks = {}
    for task, its_devices in machines.items():
        if device_spec(task).job != 'ps':  # That has variables, and no tower.
            gpus_of_tasks[task] = sum('GPU' in device for device in its_devices)
    uses_gpus = any(gpus_of_tasks.values())

    towers = []
    for task, gpus in gpus_of_tasks.items():
        towers += [task + device for device in _towers_of_machine(devices, gpus, uses_gpus)]
    _check_there(devices, towers, machines)
    return towers


def _towers_of_machine(devices: int | list[str] | None, gpus: int, uses_gpus: bool) -> list[str]:
    """The devices of one machine, one a tower, in canonical form.

    Args:
      devices: the checked argument: a list, how many devices, or None for every GPU.
      gpus: how many GPUs the machine has.
      uses_gpus: whether a GPU is meant, as this machine or another one has some.
    """
    if isinstance(devices, list):
        return [_canonical(device) for device in devices]
    kind = 'GPU' if uses_gpus else 'CPU'
    count = devices
    if count is None:
        count = gpus if uses_gpus else 1
    return [f'/device:{kind}:{index}' for index in range(count)]


def _check_there(devices: Any, towers: Sequence[str], machines: Mapping[str, Any]) -> None:
    """Raises ValueError if a machine hasn't all the devices that are for towers.

    Args:
      devices: the user's argument, for the error.
      towers: a device for each tower.
      machines: the devices that each task has, by the task's name.
    """
    for tower in towers:
        existing = machines[machine_of(tower)]
        if tower not in existing:
            raise ValueError(
                f'devices={devices!r} asks for {tower!r}, but that machine has '
                f'{", ".join(existing)}. devices= are those of each machine; None stands for every '
                'GPU there is.'
            )


def _check_gpus(devices: Any, towers: Sequence[str], gpus: int) -> None:
    """Raises ValueError if this machine hasn't all the GPUs that are for towers.

    Args:
      devices: the user's argument, for the error.
      towers: a device for each tower. Those of another task aren't checked.
      gpus: how many GPUs this machine has.
    """
    for tower in towers:
        spec = device_spec(tower)
        if spec.device_type == 'GPU' and spec.job is None and spec.device_index >= gpus:
            has = {0: 'no GPU', 1: '1 GPU'}.get(gpus, f'{gpus} GPUs')
            raise ValueError(
                f'devices={devices!r} asks for {tower!r}, but this machine has {has}. Ask for '
                'those of `nvidia-smi -L`. List a device twice to run two towers on it: '
                "['/device:GPU:0', '/device:GPU:0']."
            )


def _gpus() -> list[list[Any]]:
    """The parts that each of this machine's GPUs is split into; none for one that isn't split."""
    parts_of = tf.config.get_logical_device_configuration
    return [parts_of(gpu) or [] for gpu in tf.config.list_physical_devices('GPU')]


def checked(devices: Any) -> int | list[str] | None:
    """Checks a user's `devices`, without a look at the machine; reads a generator into a list.

    Returns:
      How many devices, a list of device strings, or None for every GPU.
    """
    if devices is None:
        return None
    if isinstance(devices, (int, np.integer)) and not isinstance(devices, bool):
        if devices < 1:
            raise ValueError(f'devices={devices} leaves nothing to run on: {_LEGAL}.')
        return int(devices)
    try:
        one = isinstance(devices, (str, bytes))
        listed: list[Any] = [devices] if one else list(devices)
    except TypeError as error:
        raise TypeError(f'devices={devices!r} is of {type(devices).__name__}: {_LEGAL}.') from error
    if not listed:
        raise ValueError(f'devices={devices!r} is empty: {_LEGAL}.')
    for device in listed:
        _canonical(device)
    return listed


def device_spec(device: str) -> tf.DeviceSpec:
    """Parses a device string; `/gpu:0`, `GPU:0` and `/device:GPU:0` are the same device."""
    return tf.DeviceSpec.from_string(device if device.startswith('/') else f'/{device}')


@functools.cache
def machine_of(device: str) -> str:
    """The task that a device is of, such as '/job:worker/task:0'; the chief, if it names none."""
    spec = device_spec(device)
    return f'/job:{spec.job}/task:{spec.task or 0}' if spec.job else CHIEF


@functools.cache
def memory_of(device: str) -> str:
    """What has a device's memory: itself, or its machine, as logical CPU devices share theirs.

    What one of these has, all have: nothing is sent from one to another.
    """
    return machine_of(device) if device_spec(device).device_type == 'CPU' else device


def relay(devices: Sequence[str], device: str, home: str) -> str | None:
    """Returns the device that exchanges a value with another machine, for all of its machine.

    So a variable's value is sent to each other machine only once.

    Args:
      devices: those of all towers.
      device: one whose machine needs a value of another one, or has a part of it.
      home: where the value is.

    Returns:
      A device of the machine of `device`: the one with the type and index of `home` if there is
      one, and otherwise the first one. None if both devices are of one machine.
    """
    machine = machine_of(device)
    if machine == machine_of(home):
        return None
    counterpart = machine + device_spec(home).replace(job=None, task=None).to_string()
    if counterpart in devices:
        return counterpart
    return next(other for other in devices if machine_of(other) == machine)


@functools.cache
def host_of(device: str) -> str:
    """Returns the first CPU of a device's machine."""
    return device_spec(device).replace(device_type='CPU', device_index=0).to_string()


def _canonical(device: str) -> str:
    if not isinstance(device, str):
        raise TypeError(
            f'{device!r} in devices is of {type(device).__name__}, not a str such as '
            f"'/device:GPU:0': {_LEGAL}."
        )
    with contextlib.suppress(ValueError):
        spec = device_spec(device)
        index = spec.device_index
        if spec.device_type in ('CPU', 'GPU') and index is not None and index >= 0:
            return spec.to_string()
    raise ValueError(
        f'{device!r} in devices is unknown: it names no numbered CPU or GPU. {_LEGAL}.'
    )


def checked_microbatches(microbatches: Any) -> int:
    """Checks the argument `microbatches` of `replicate()` and `session_config()`."""
    if isinstance(microbatches, str) and microbatches == 'auto':
        raise ValueError(
            "microbatches='auto' is for estimator_mgpu.Estimator and replicate_estimator(), which "
            'can try again if memory is too small: Estimator(model_fn, devices=2, '
            "microbatches='auto'), of a model_fn that isn't replicated. Here, give a number."
        )
    if not is_positive_integer(microbatches):
        raise ValueError(
            f'microbatches={microbatches!r} is no number of micro-batches. Give 1 or more: that '
            "many parts of each device's examples run one after another. Estimator and "
            "replicate_estimator() take 'auto', too."
        )
    if microbatches > _MOST_MICROBATCHES:
        raise ValueError(
            f'microbatches={microbatches} is too many, as the graph has a copy of each sharded op '
            f'for each of them. Give {_MOST_MICROBATCHES} at most, and no more than a device has '
            'examples.'
        )
    return int(microbatches)


def session_config(
    devices: Devices = None, base: tf.ConfigProto | None = None, microbatches: int = 1
) -> tf.ConfigProto:
    """Returns a new `ConfigProto`, for `RunConfig`, whose session has `devices`.

    A session has one CPU device unless told otherwise, and with soft placement, Estimator's
    default, what is meant for `/device:CPU:1` runs on `/device:CPU:0` without a word. GPUs that
    `tf.config.set_logical_device_configuration` has split are so in the session, too.

    Examples:
      >>> session_config(4).device_count['CPU']
      4

    Args:
      devices: as for `replicate()`.
      base: the config to start from, which is left as it is but for the devices. By default it's
        Estimator's own; for several towers without those of TensorFlow's graph optimizers that take
        long to start and make no step shorter.
      microbatches: as for `replicate()`.
    """
    microbatches = checked_microbatches(microbatches)
    config = copy.deepcopy(get_default_session_config() if base is None else base)
    towers = resolve(devices)
    if not isinstance(config, tf.ConfigProto):
        raise TypeError(
            f'base is of {type(base).__name__}, not a tf.ConfigProto: give what a RunConfig has as '
            'its session_config, rather than a RunConfig.'
        )

    count = config.device_count
    count['CPU'] = max(_cpus_needed(towers), count.get('CPU', 1))

    gpus = _gpus()
    virtual_devices = config.gpu_options.experimental.virtual_devices
    if not virtual_devices and any(gpus):
        for parts in gpus:
            virtual_devices.add(memory_limit_mb=[part.memory_limit or 0 for part in parts])

    if base is None and len(towers) * microbatches > 1:
        rewriting = config.graph_options.rewrite_options
        kinds = {device_spec(tower).device_type for tower in towers}
        if kinds == {'CPU'}:
            rewriting.disable_meta_optimizer = True  # all passes; Estimator logs the config
        else:
            for name in _USELESS_PASSES:
                setattr(rewriting, name, rewriting.OFF)
    return config


def has_useless_passes(config: tf.ConfigProto, devices: Devices) -> bool:
    """Whether a session config has on what `session_config(devices)` turns off."""
    default = session_config(devices).graph_options.rewrite_options
    rewriting = config.graph_options.rewrite_options
    if rewriting.disable_meta_optimizer:
        return False
    turned_off = [name for name in _USELESS_PASSES if getattr(default, name) == default.OFF]
    is_on = any(getattr(rewriting, name) != rewriting.OFF for name in turned_off)
    return default.disable_meta_optimizer or is_on


def warn_of_missing(devices: Sequence[str], config: Any) -> None:
    """Warns if a session lacks some of the devices, and says what to write.

    Args:
      devices: those of all towers.
      config: the RunConfig of the session, or None.
    """
    session = getattr(config, 'session_config', None) or tf.ConfigProto()
    cpus = session.device_count.get('CPU', 1)
    if config is not None and cpus < _cpus_needed(devices):
        tf.logging.warning(
            f'The towers are for {", ".join(devices)}, but the session has {cpus} CPU device(s): '
            'they will share them, or fail without soft placement. Write '
            f'RunConfig(session_config=estimator_mgpu.session_config({list(devices)})).'
        )


def _cpus_needed(devices: Sequence[str]) -> int:
    """Returns how many logical CPU devices a session needs to have these devices."""
    cpus = [spec for spec in map(device_spec, devices) if spec.device_type == 'CPU']
    return max((spec.device_index + 1 for spec in cpus), default=1)
