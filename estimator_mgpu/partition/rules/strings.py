"""Ops on strings: each string is handled by itself, as by elementwise ops."""

from __future__ import annotations

from estimator_mgpu.partition.rules.notation import FAMILIES, table

_EACH_STRING = """
    AsString DecodeBase64 EncodeBase64 RegexFullMatch RegexReplace StaticRegexFullMatch
    StaticRegexReplace StringJoin StringLength StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Substr
"""

RULES = table({_EACH_STRING: FAMILIES['elementwise']})
