"""The table of rules: for each type of op what it does along which dimensions.

An op whose type isn't here runs once, on the whole batch, which is exact.
"""

from __future__ import annotations

from . import axes, elementwise, images, matrices, views
from .signature import table

PRODUCTS = table({**matrices.RULES, **images.RULES})  # worth dividing rows that aren't the batch's
RULES = table({**axes.RULES, **elementwise.RULES, **views.RULES}) | PRODUCTS
OF_DEVICE = table(images.OF_DEVICE)
