"""Ops that the package has no rule for: `register_rule()` gives one, `check_rule()` tries it."""
