"""Ops that order entries: along the last dimension, each vector by itself."""

from __future__ import annotations

from estimator_mgpu.partition.rules.notation import Rule, table

_RULES: dict[str, Rule] = {
    'InTopK': 'n_ n -> n',
    'InTopKV2': 'n_ n * -> n',
    'NthElement': 'S_ * -> S',
    'TopKV2': 'S_ * -> S_ S_',
    # Each value is looked for by itself (m), in the sorted vector of its row (n).
    'LowerBound UpperBound': 'n_ nm -> nm',
}
RULES = table(_RULES)
