"""The picture of a plan: what is sharded, and what the devices have and send each other.

In: the numbers of an `Explanation`. Out: a file that Matplotlib writes, such as 'plan.svg'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

# Colors that color-blind people can tell apart, of Okabe and Ito, and what they mean.
_COLORS = {'shard': '#0072B2', 'partial': '#56B4E9', 'once': '#D55E00'}
_MEANINGS = {
    'shard': 'sharded: each device has its examples',
    'partial': 'partial: each device has its part of a sum',
    'once': 'runs once, on one device',
}
_GRAY = '#767676'
_WORTH_A_BAR = 0.01  # a share of all output: scopes with less share a bar
_BARS = 24  # at most
_NAMED = 2  # variables of a device
_NUMBERED = 8  # Of more devices, the picture has no numbers.


class Bar(NamedTuple):
    """The output of one scope, or of several small ones."""

    label: str
    sizes: dict[str, int]  # bytes by 'shard', 'partial' and 'once'


class Device(NamedTuple):
    """What one device has and sends."""

    name: str  # such as '/device:GPU:0'
    examples: str  # of each of its towers: '25'; '' if it has no tower
    bytes: int  # of all its variables, slots included
    variables: list[str]  # those that are trained, by name


def draw(
    path: str,
    scopes: Mapping[str, Mapping[str, int]],
    devices: Sequence[Device],
    sent: Mapping[str, Mapping[str, int]],
) -> None:
    """Draws what each scope puts out, and beside it the devices.

    Args:
      path: where the picture goes; its ending says in which format.
      scopes: bytes of output by scope, and by 'shard', 'partial' and 'once'.
      devices: in the order in which they are shown.
      sent: bytes that go from one device to another in a step.
    """
    from matplotlib.figure import Figure

    bars = bars_of(scopes)
    height = 1.8 + max(0.32 * len(bars), 0.7 * len(devices), 1.6)
    figure = Figure(figsize=(13, height), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    figure.suptitle(_title(scopes, devices), fontsize=14, fontweight='bold')
    _draw_bars(left, bars)
    _draw_devices(right, devices, sent)
    figure.savefig(path, dpi=120)


def bars_of(scopes: Mapping[str, Mapping[str, int]]) -> list[Bar]:
    """The bars of all scopes that have output: small ones share the last bar."""
    totals = {scope: sum(sizes.values()) for scope, sizes in scopes.items()}
    largest = sorted(totals, key=lambda scope: -totals[scope])[:_BARS]
    limit = _WORTH_A_BAR * sum(totals.values())

    bars = []
    others: dict[str, int] = dict.fromkeys(_COLORS, 0)
    count = 0
    for scope, sizes in scopes.items():
        if not totals[scope]:
            continue
        if scope in largest and totals[scope] >= limit:
            bars.append(Bar(scope, dict(sizes)))
            continue
        count += 1
        for kind, size in sizes.items():
            others[kind] += size
    if count:
        bars.append(Bar(f'{count} smaller scopes', others))
    return bars


def _title(scopes: Mapping[str, Mapping[str, int]], devices: Sequence[Device]) -> str:
    """Says on how many devices the model runs, and how much of it is sharded."""
    count = sum(bool(device.examples) for device in devices)
    where = 'one device' if count == 1 else f'{count} devices'
    total = sum(sum(sizes.values()) for sizes in scopes.values())
    if not total:
        return f'A step on {where}: nothing is sharded'
    once = sum(sizes.get('once', 0) for sizes in scopes.values()) / total
    if not once:
        return f'A step on {where}: all ops are sharded'
    return f'A step on {where}: {1 - once:.1%} of all output is sharded, {once:.1%} runs once'


def _draw_bars(axes: Any, bars: Sequence[Bar]) -> None:
    """Draws a bar for each scope, with a part for each placement."""
    axes.set_title('Output of the ops in each name scope', loc='left')
    if not bars:
        axes.set_axis_off()
        axes.text(0, 0.5, 'All ops run once, on the global batch.', va='center')
        return

    labels = [_shortened(bar.label, 34) for bar in bars]
    places = list(range(len(bars)))
    ends = [0.0] * len(bars)
    for kind, color in _COLORS.items():
        sizes = [bar.sizes.get(kind, 0) for bar in bars]
        if any(sizes):
            axes.barh(places, sizes, 0.7, left=ends, color=color, label=_MEANINGS[kind])
        ends = [end + size for end, size in zip(ends, sizes)]

    for place, end in zip(places, ends):
        axes.annotate(
            _size(end), (end, place), (4, 0), textcoords='offset points', va='center', color=_GRAY
        )
    axes.set_yticks(places, labels)
    axes.set_ylim(len(bars) - 0.5, -0.5)  # the first one at the top
    axes.set_xlim(0, 1.15 * max(ends))  # Room for the numbers, and none for a bar at the frame.
    axes.locator_params(axis='x', nbins=4)
    axes.xaxis.set_major_formatter(lambda size, _: _size(size))
    axes.set_xlabel('bytes in a step')
    axes.tick_params(length=0)
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.figure.legend(loc='outside lower left', ncols=len(_COLORS), frameon=False)


def _draw_devices(
    axes: Any, devices: Sequence[Device], sent: Mapping[str, Mapping[str, int]]
) -> None:
    """Draws a row for each device, and in it what that sends to each of the others."""
    from matplotlib.patches import Rectangle

    names = [f'to {_short_name(device.name)}' for device in devices]
    places = list(range(len(devices)))
    rows = [[sent.get(one.name, {}).get(other.name, 0) for other in devices] for one in devices]
    largest = max(map(max, rows)) or 1

    axes.set_title('What each device has, and sends to the others', loc='right')
    axes.imshow(rows, cmap='Blues', vmin=0, vmax=1.6 * largest, aspect='auto')
    for place in places:  # A gray square is where a device would send to itself.
        axes.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, color='#eeeeee'))

    if len(devices) <= _NUMBERED:
        axes.set_xticks(places, names)
        axes.xaxis.tick_top()
        for row in places:
            for column in places:
                if row != column:
                    text = _size(rows[row][column])
                    axes.text(column, row, text, ha='center', va='center')
    else:
        axes.set_xticks([])
        axes.set_xlabel(f'to all, in the same order; darkest: {_size(largest)}', loc='right')

    axes.set_yticks(places, [_described(device) for device in devices])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _described(device: Device) -> str:
    """A device's label: its name, its examples and its variables."""
    first = _short_name(device.name)
    if device.examples:
        first += f': {device.examples} examples'
    names = ', '.join(_shortened(name, 22) for name in device.variables[:_NAMED])
    if len(device.variables) > _NAMED:
        names += f' and {len(device.variables) - _NAMED} more'
    second = f'{_size(device.bytes)} of variables'
    return '\n'.join(filter(None, [first, second, names]))


def _short_name(device: str) -> str:
    """The name of a device in a picture: 'GPU:0', or 'worker 1, GPU:0'."""
    parts = dict(part.split(':', 1) for part in device.strip('/').split('/'))
    task = f'{parts["job"]} {parts.get("task", 0)}, ' if 'job' in parts else ''
    return task + parts.get('device', '')


def _shortened(text: str, length: int) -> str:
    """The end of a text, if that is too long."""
    return text if len(text) <= length else f'…{text[1 - length :]}'


def _size(size: float) -> str:
    """A number of bytes, as text: '1.54kB' for 1536."""
    return tqdm.format_sizeof(size, suffix='B') if size else '0'
