"""Where a forward pass is cut into segments, so that few bytes have to be kept for gradients.

Gradients are computed from the last op back to the first. What crosses a cut is kept. All else is
computed again, one segment after another, from what crosses the cut before it:

    forward pass               segment 0  | cut 0 |  segment 1  | cut 1 |  segment 2

    gradients of segment 2 need:            cut 0                 cut 1    segment 2
    gradients of segment 1 need:            cut 0    segment 1
    gradients of segment 0 need: segment 0

So an early segment may have more bytes than a late one, beside which more is kept. With n layers of
one size, the most bytes at once are those of about sqrt(2 * n) layers.

In: the activations, each with the positions of the ops that make and use it. Out: the positions
behind which the ops are cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_LEAST_SHARE_SAVED = 0.25  # of all bytes: to save less isn't worth the time
_BUDGETS = [0.9**power for power in range(1, 50)]  # shares of all bytes, to be tried


class Activation(NamedTuple):
    """A large tensor of the forward pass, and all that shares its memory.

    Attributes:
      made: the position of the op that makes it.
      last_use: the position of the last forward op that uses it.
      bytes: how many it has.
      is_needed: whether gradients use it.
    """

    made: int
    last_use: int
    bytes: int
    is_needed: bool


def choose_cuts(activations: Sequence[Activation], count: int, fixed: int) -> list[int]:
    """The positions behind which to cut, in order; none if that saves too little.

    Args:
      activations: those that can be computed again.
      count: the number of forward ops.
      fixed: the bytes of other tensors that gradients use: these are kept anyway.
    """
    if not activations:
        return []
    profile = _Profile(activations, count)
    total = profile.needed_until[-1]
    best: list[int] = []
    fewest_bytes = total - _LEAST_SHARE_SAVED * (total + fixed)
    for share in _BUDGETS:
        cuts = _cuts_within(share * total, profile)
        most_bytes = _most_bytes_at_once(activations, cuts)
        if cuts and most_bytes < fewest_bytes:
            best = cuts
            fewest_bytes = most_bytes
    return best


class _Profile:
    """Bytes by position.

    Attributes:
      activations: those that can be computed again.
      needed_until: of the activations that gradients use, those made up to each position.
      crossing: of the activations that would be kept if it's cut behind a position.
      crossing_needed: the same, of those that gradients use.
    """

    def __init__(self, activations: Sequence[Activation], count: int):
        self.activations = activations
        made = [0] * count
        changes = [0] * (count + 1)
        changes_of_needed = [0] * (count + 1)
        for activation in activations:
            changes[activation.made] += activation.bytes
            changes[activation.last_use] -= activation.bytes
            if activation.is_needed:
                made[activation.made] += activation.bytes
                changes_of_needed[activation.made] += activation.bytes
                changes_of_needed[activation.last_use] -= activation.bytes
        self.needed_until = list(accumulate(made))
        self.crossing = list(accumulate(changes))
        self.crossing_needed = list(accumulate(changes_of_needed))

    def costs(self, position: int) -> tuple[int, ...]:
        """Says how bad a cut is behind a position. What counts most comes first."""
        return (self.crossing[position], -self.crossing_needed[position], -position)


def _cuts_within(budget: float, profile: _Profile) -> list[int]:
    """Cuts for which so many bytes are enough at once; [] if there are none.

    Each segment has between half and all of the bytes that are left for it. It ends where the
    fewest bytes cross; if that is so in several places, then where most of these are kept anyhow.

    For example, six layers of 10 bytes each are cut behind the fourth one if 40 bytes are enough:
    four layers have 40. After them, 10 bytes are kept, and the other two layers have 20.
    """
    needed_until = profile.needed_until
    cuts: list[int] = []
    before = 0  # bytes of earlier segments
    room = budget
    while needed_until[-1] - before > room:
        first = bisect_right(needed_until, before + room / 2)
        end = bisect_right(needed_until, before + room)
        if first >= end:
            return []

        cut = min(range(first, end), key=profile.costs)
        cuts.append(cut)
        before = needed_until[cut]
        room = budget - sum(one.bytes for one in profile.activations if crosses_any(one, cuts))
    return cuts


def crosses_any(activation: Activation, cuts: Sequence[int]) -> bool:
    """Whether an activation crosses one of some cuts, which are in order."""
    first = bisect_left(cuts, activation.made)  # of the cuts behind it
    return first < len(cuts) and cuts[first] < activation.last_use


def segment_of(position: int, cuts: Sequence[int]) -> int:
    """The number of the segment that a position is in."""
    return bisect_left(cuts, position)


def _most_bytes_at_once(activations: Sequence[Activation], cuts: Sequence[int]) -> int:
    """The most bytes that gradients of a segment need: those kept up to it, and its own."""
    kept = [0] * (len(cuts) + 1)  # by the segment in which they are made
    own = [0] * (len(cuts) + 1)
    for activation in activations:
        segment = segment_of(activation.made, cuts)
        if crosses_any(activation, cuts):
            kept[segment] += activation.bytes
        elif activation.is_needed:
            own[segment] += activation.bytes

    kept_until = accumulate(kept)
    return max(before + again for before, again in zip(kept_until, own))
