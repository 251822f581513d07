"""Which devices there are, and the session that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import tensorflow.compat.v1 as tf

Devices = Union[None, int, str, Sequence[str]]

_LEGAL = (
    'devices is None (every GPU), a positive int (that many GPUs, or logical CPU devices where '
    "there is no GPU), or a list of device strings such as ['/device:GPU:0', '/device:GPU:1']"
)


def resolve(devices: Devices = None) -> list[str]:
    """Returns the devices meant by `devices`, one a tower, in canonical form.

    GPUs are listed by `tf.config`, which neither initialises nor reserves one.

    Examples:
      >>> resolve(['/cpu:0', 'CPU:1'])
      ['/device:CPU:0', '/device:CPU:1']

    Args:
      devices: None for every GPU (one CPU device where there is none); an int for that many GPUs
        (logical CPU devices where there is none); or a list of device strings. A device listed
        twice gets two towers. A device string by itself is a list of one.

    Returns:
      A list of device strings such as `/device:GPU:0`.

    Raises:
      TypeError: if `devices` is none of these.
      ValueError: if the list is empty, a device is unknown or there are too few GPUs.
    """
    listed = check(devices)
    gpus = len(tf.config.list_physical_devices('GPU'))
    if devices is None:
        return [f'/device:GPU:{i}' for i in range(gpus)] or ['/device:CPU:0']
    if isinstance(devices, int):
        if gpus and devices > gpus:
            raise ValueError(
                f'devices={devices}, but this machine has {_count(gpus)}. Ask for at most {gpus}, '
                "or list devices, where one may stand twice: ['/device:GPU:0', '/device:GPU:0']."
            )
        kind = 'GPU' if gpus else 'CPU'
        return [f'/device:{kind}:{i}' for i in range(devices)]
    for device, canonical in zip([devices] if isinstance(devices, str) else devices, listed):
        spec = spec_of(canonical)
        if spec.device_type == 'GPU' and spec.job is None and spec.device_index >= gpus:
            raise ValueError(
                f'{device!r} in devices is unknown: this machine has {_count(gpus)}. '
                'List devices that it has; `nvidia-smi -L` and '
                "`tf.config.list_physical_devices('GPU')` say which."
            )
    return listed


def check(devices: Devices) -> list[str]:
    """Checks what can be told of `devices` without a look at the machine.

    Returns:
      The devices in canonical form if they're listed, otherwise none.

    Raises:
      TypeError, ValueError: as `resolve()`.
    """
    if devices is None:
        return []
    if isinstance(devices, bool):
        raise TypeError(f'devices={devices!r} is not a number of devices: {_LEGAL}.')
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f'devices={devices} leaves nothing to run on: {_LEGAL}.')
        return []
    if isinstance(devices, str):
        devices = [devices]
    try:
        devices = list(devices)
    except TypeError:
        raise TypeError(f'devices={devices!r} is of {type(devices).__name__}: {_LEGAL}.') from None
    if not devices:
        raise ValueError(f'devices={devices!r} is empty: {_LEGAL}.')
    return [_canonical(device) for device in devices]


def spec_of(device: str) -> tf.DeviceSpec:
    """Parses a device string; `/gpu:0`, `GPU:0` and `/device:GPU:0` are the same device."""
    return tf.DeviceSpec.from_string(device if device.startswith('/') else f'/{device}')


def host_of(device: str) -> str:
    """The CPU of a device's machine."""
    return spec_of(device).replace(device_type='CPU', device_index=0).to_string()


def _canonical(device: str) -> str:
    if not isinstance(device, str):
        number = device if isinstance(device, int) else 0
        raise TypeError(
            f'{device!r} in devices is of {type(device).__name__}, not a str such as '
            f"'/device:GPU:{number}': {_LEGAL}."
        )
    try:
        spec = spec_of(device)
    except ValueError as error:
        raise ValueError(f'{device!r} in devices is not a device string: {_LEGAL}.') from error
    kind, index = (spec.device_type or '').upper(), spec.device_index
    if kind not in ('CPU', 'GPU') or index is None:
        raise ValueError(
            f'{device!r} in devices is unknown: it names no numbered CPU or GPU. {_LEGAL}.'
        )
    return spec.replace(device_type=kind).to_string()


def _count(gpus: int) -> str:
    return {0: 'no GPU', 1: '1 GPU (/device:GPU:0)'}.get(
        gpus, f'{gpus} GPUs (/device:GPU:0 to {gpus - 1})'
    )


def session_config(devices: Devices = None, base: tf.ConfigProto | None = None) -> tf.ConfigProto:
    """Returns a `ConfigProto` whose session has `devices`.

    A session has one CPU device unless told otherwise, and with soft placement, Estimator's
    default, what is meant for `/device:CPU:1` runs on `/device:CPU:0` without a word.

    Examples:
      >>> session_config(4).device_count['CPU']
      4

    Args:
      devices: as for `replicate()`.
      base: the config to start from; it's left as it is. By default the one that Estimator
        starts from: soft placement and one pass of the graph optimizers.

    Returns:
      A new `ConfigProto`, for `RunConfig(session_config=...)`.

    Raises:
      TypeError, ValueError: as `replicate()` for `devices`.
    """
    config = tf.ConfigProto()
    if base is None:
        config.allow_soft_placement = True
        # RewriterConfig.ONE, what tf.estimator.RunConfig has without a session_config.
        config.graph_options.rewrite_options.meta_optimizer_iterations = 1
    else:
        config.CopyFrom(base)
    needed = cpus_needed(resolve(devices))
    if config.device_count.get('CPU', 1) < needed:
        config.device_count['CPU'] = needed
    return config


def cpus_needed(devices: Sequence[str]) -> int:
    """Returns how many logical CPU devices a session needs to have `devices`."""
    specs = [spec_of(device) for device in devices]
    return max([spec.device_index + 1 for spec in specs if spec.device_type == 'CPU'] + [1])


def warn_of_missing(devices: Sequence[str], config: tf.ConfigProto | None) -> None:
    """Warns where a session of `config` lacks some of `devices`, and says what to write."""
    needed = cpus_needed(devices)
    found = config.device_count.get('CPU', 1) if config else 1
    if found < needed:
        tf.logging.warning(
            'The towers are for %s, but the session has %d CPU device%s: they will share them, or '
            'fail without soft placement. Write '
            'RunConfig(session_config=estimator_mgpu.session_config(%r)).',
            ', '.join(devices),
            found,
            '' if found == 1 else 's',
            list(devices),
        )
