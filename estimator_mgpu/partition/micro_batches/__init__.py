"""How micro-batches take turns on a device, so that one of them is kept in memory at a time.

In: a `Plan`, and how many turns there are. Out: which ops take turns, and control edges.

- `schedule`: which ops take turns. `activation_bytes`: how much a step keeps in memory then.
- `turn_gates`: what lets a turn wait for the one before.
- `edges`: what waits for what, by data or control, before it's in the graph: by it, `schedule`
  chooses.
"""
