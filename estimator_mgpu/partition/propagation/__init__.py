"""Decides which ops are sharded, and where each tensor's values are.

In: the placements of the batch. Out: a `Plan`. `engine` visits the ops in order and asks `rules`
about each; nothing is added to the graph here. Before, `unused_gradients` finds ops that need no
decision; afterwards, `needless_ops` takes ops out of the plan.
"""
