"""The table of rules: for each type of op what it does along which dimensions.

An op whose type isn't here runs once, on the whole batch, which is exact.
"""

from __future__ import annotations

from estimator_mgpu.partition.rules import (
    contractions,
    elementwise,
    images,
    lookups,
    makers,
    reductions,
    views,
)
from estimator_mgpu.partition.rules.signature import Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **reductions.RULES,
    **contractions.RULES,
    **images.RULES,
    **views.RULES,
    **makers.RULES,
    **lookups.RULES,
}
