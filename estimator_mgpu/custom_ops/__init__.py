"""Ops that the package has no rule for: `register_rule()` gives one, `check_rule()` tries it.

`check_rule` compares a function on several towers with one device. Before, `trials` tries each of
its ops alone: `op_calls` finds the ops and what they are given, and `dimensions` those along which
their rules say that they can be sharded. `runs` has the sessions, and compares results. What is
said of a rule that fails: `rules.notation.failure`.
"""
