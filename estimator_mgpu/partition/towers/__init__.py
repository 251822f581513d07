"""Carries out a `Plan`: makes each tower's copies of the ops, and what connects them.

In: a `Plan`, and a device for each tower. Out: nodes in the graph: copies, slices of the batch,
gathered and reduced values. No decision about sharding is made here, and no rule is known.

`build_towers` puts it together, from:

- `op_copies`, `function_copies`: each tower's copies of ops, and of the functions that they call.
- `values`: what each tower has of a tensor, and its full value; `origins`: which full values are
  made of what towers have, and `only_fetched`: for which of these somebody may ask.
- `reduce_and_gather`, `unique_ids`: how full values are made.
- `local_parts`: what towers take of full values; `sparse_features`, `ragged_features`: of tensors
  of the batch that aren't dense. `bits`: packs masks that wait for their turn.
- `row_spaces`: which rows of each row space towers have, and how large tensors are; `shards`: of
  one row space; `sums_of_entries`: of the sums of a sparse tensor's entries.
- `sending`: full values, to the devices that need them.
- `everywhere`: small ones, which each device makes for itself.
- `waits`: control edges that keep the order of reads and writes.

Rooms beside this one decide what is sent together or in slices (`messages`), how micro-batches take
turns (`micro_batches`), and add the nodes to the graph (`nodes`). On which device what runs once
runs is decided before, by `partition.once_devices`.
"""
