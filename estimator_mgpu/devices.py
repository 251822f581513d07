"""Which devices there are, and the session that has them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.tf_estimator import get_default_session_config

Devices = Union[None, int, str, Iterable[str]]
CHIEF = '/job:chief/task:0'  # the machine of what names none

# Grappler's passes that go over the ops of all towers; on GPUs, layout and remapping are worth it.
_NO_FASTER = (
    'arithmetic_optimization',
    'common_subgraph_elimination',
    'constant_folding',
    'dependency_optimization',
    'loop_optimization',
    'shape_optimization',
)
_LEGAL = (
    'devices is None (every GPU), a positive int (that many GPUs, or logical CPU devices where '
    "there is no GPU), or a list of device strings such as ['/device:GPU:0', '/device:GPU:1']"
)


def resolve(devices: Devices = None, machines: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the devices meant by `devices`, one a tower, in canonical form; initialises no GPU.

    `machines` are the devices of each of several, on which `devices` are those of each.

    >>> resolve(['/cpu:0', 'CPU:1'])
    ['/device:CPU:0', '/device:CPU:1']
    """
    devices = checked(devices)
    listed = [_canonical(device) for device in devices] if isinstance(devices, list) else []
    gpus = {'': sum(len(parts) or 1 for parts in _gpus())}
    if machines:
        training = [
            name for name in machines if device_spec(name).job != 'ps'
        ]  # which has variables
        gpus = {name: sum('GPU' in device for device in machines[name]) for name in training}
    kind = 'GPU' if any(gpus.values()) else 'CPU'
    towers: list[str] = []
    for machine, found in gpus.items():
        count = devices if isinstance(devices, int) else found if kind == 'GPU' else 1
        own = listed or [f'/device:{kind}:{i}' for i in range(count)]
        towers += [machine + device for device in own]
    for tower in towers:
        spec = device_spec(tower)
        if machines and tower not in machines[machine_of(tower)]:
            raise ValueError(
                f'devices={devices!r} asks for {tower!r}, but that machine has '
                f'{", ".join(machines[machine_of(tower)])}. devices= are those of each machine; '
                'None stands for every GPU there is.'
            )
        if spec.device_type == 'GPU' and spec.job is None and spec.device_index >= gpus['']:
            has = {0: 'no GPU', 1: '1 GPU'}.get(gpus[''], f'{gpus[""]} GPUs')
            raise ValueError(
                f'devices={devices!r} asks for {tower!r}, but this machine has {has}. Ask for '
                "those of `nvidia-smi -L`; one may stand twice: ['/device:GPU:0', '/device:GPU:0']."
            )
    return towers


def _gpus() -> list[list[Any]]:
    """Returns the parts that each of the machine's GPUs is split into: none, if it isn't split."""
    parts = tf.config.get_logical_device_configuration
    return [parts(gpu) or [] for gpu in tf.config.list_physical_devices('GPU')]


def checked(devices: Any) -> int | list[str] | None:
    """Checks what can be told without a look at the machine; reads a generator into a list."""
    if devices is None:
        return None
    if isinstance(devices, (int, np.integer)) and not isinstance(devices, bool):
        if devices < 1:
            raise ValueError(f'devices={devices} leaves nothing to run on: {_LEGAL}.')
        return int(devices)
    try:
        listed = [devices] if isinstance(devices, str) else list(devices)
    except TypeError as error:
        what = f'devices={devices!r} is of {type(devices).__name__}'
        raise TypeError(f'{what}: {_LEGAL}.') from error
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
    """The task whose machine has a device: the chief, if it names none."""
    spec = device_spec(device)
    return f'/job:{spec.job}/task:{spec.task or 0}' if spec.job else CHIEF


def relay(devices: Sequence[str], device: str, home: str) -> str | None:
    """The one of a device's machine that sends to another machine, or gets from it, for all there.

    None if both devices are of one machine.
    """
    machine = machine_of(device)
    if machine == machine_of(home):
        return None
    like = machine + device_spec(home).replace(job=None, task=None).to_string()
    return like if like in devices else next(d for d in devices if machine_of(d) == machine)


@functools.cache
def host_of(device: str) -> str:
    """The CPU of a device's machine."""
    return device_spec(device).replace(device_type='CPU', device_index=0).to_string()


def _canonical(device: str) -> str:
    if not isinstance(device, str):
        raise TypeError(
            f'{device!r} in devices is of {type(device).__name__}, not a str such as '
            f"'/device:GPU:0': {_LEGAL}."
        )
    with contextlib.suppress(ValueError):
        spec = device_spec(device)
        if spec.device_type in ('CPU', 'GPU') and spec.device_index is not None:
            return spec.to_string()
    raise ValueError(
        f'{device!r} in devices is unknown: it names no numbered CPU or GPU. {_LEGAL}.'
    )


def session_config(devices: Devices = None, base: tf.ConfigProto | None = None) -> tf.ConfigProto:
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
    """
    config = copy.deepcopy(get_default_session_config() if base is None else base)
    towers = resolve(devices)
    if not isinstance(config, tf.ConfigProto):
        raise TypeError(
            f'base is of {type(base).__name__}, not a tf.ConfigProto: give what a RunConfig has as '
            'its session_config, rather than a RunConfig.'
        )
    count = config.device_count
    count['CPU'] = max(_cpus(towers), count.get('CPU', 1))
    gpus, split = _gpus(), config.gpu_options.experimental.virtual_devices
    if not split and any(gpus):
        for parts in gpus:
            split.add(memory_limit_mb=[part.memory_limit or 0 for part in parts])
    if base is None and len(towers) > 1:
        rewriting = config.graph_options.rewrite_options
        rewriting.disable_meta_optimizer = all(device_spec(t).device_type == 'CPU' for t in towers)
        for name in _NO_FASTER:
            setattr(rewriting, name, rewriting.OFF)
    return config


def warn_of_missing(devices: Sequence[str], config: Any) -> None:
    """Warns where a session of a RunConfig lacks some of `devices`, and says what to write."""
    session = getattr(config, 'session_config', None) or tf.ConfigProto()
    found = session.device_count.get('CPU', 1)
    if config is not None and found < _cpus(devices):
        tf.logging.warning(
            f'The towers are for {", ".join(devices)}, but the session has {found} CPU device(s): '
            'they will share them, or fail without soft placement. Write '
            f'RunConfig(session_config=estimator_mgpu.session_config({list(devices)})).'
        )


def _cpus(devices: Sequence[str]) -> int:
    """Returns how many logical CPU devices a session needs."""
    specs = map(device_spec, devices)
    return max((spec.device_index + 1 for spec in specs if spec.device_type == 'CPU'), default=1)
