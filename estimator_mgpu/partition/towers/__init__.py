"""Carries out a `Plan`: makes each tower's copies of the ops, and what connects them.

In: a `Plan`, and a device for each tower. Out: nodes in the graph: copies, slices of the batch,
gathered and reduced values. No decision about sharding is made here, and no rule is known.
"""
