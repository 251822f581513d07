"""Carries out a `Plan`: makes each tower's copies of the ops, and what connects them.

In: a `Plan`, and a device for each tower. Out: nodes in the graph: copies, slices of the batch,
gathered and reduced values. No decision about sharding is made here, and no rule is known.

`build_towers` puts it together, from:

- `op_copies`, `function_copies`: each tower's copies of ops, and of the functions that they call.
- `values`: what each tower has of a tensor, and its full value; `origins`: which full values are
  made of what towers have.
- `shards`, `sparse_features`, `ragged_features`, `unique_ids`: which part of the batch, of a sparse
  or ragged tensor, and of all different ids each tower has.
- `sums_of_entries`: how many sums of a sparse tensor's entries towers have.
- `reduce_and_gather`: how full values are made; `only_fetched`: which ones are made.
- `sending`: full values, to the devices that need them.
- `everywhere`: small ones, which each device makes for itself.
- `bits`: masks that wait are packed.
- `waits`: control edges that keep the order of reads and writes.

Rooms beside this one decide what is sent together or in slices (`messages`), how micro-batches take
turns (`micro_batches`), and add the nodes to the graph (`nodes`). On which device what runs once
runs is decided before, by `partition.once_devices`.
"""
