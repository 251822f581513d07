"""The table of rules: for each type of op what it does along which dimensions.

An op whose type isn't here runs once, on the whole batch, which is exact.
"""

from __future__ import annotations

from . import axes, elementwise, images, matrices, views
from .signature import Rule

_FAMILIES = (axes, elementwise, images, matrices, views)
PRODUCTS = {**matrices.RULES, **images.RULES}
"""Those that it's worth while to divide rows for that aren't the batch's."""
RULES: dict[str, Rule] = {op: rule for own in _FAMILIES for op, rule in own.RULES.items()}
