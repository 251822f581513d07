"""Carries out a `Plan`: makes each tower's copies of the ops, and what connects them.

In: a `Plan`, and a device for each tower. Out: nodes in the graph: copies, slices of the batch,
gathered and reduced values. No decision about sharding is made here, and no rule is known.

`build_towers` puts it together, from:

- `op_copies`, `function_copies`: each tower's copies of ops, and of the functions that they call.
- `values`: what each tower has of a tensor, and its full value; `origins`: which full values are
  made of what towers have.
- `shards`, `sparse_rows`, `unique_ids`: which part of the batch, of a sparse tensor, and of all
  different ids each tower has.
- `reduce_and_gather`: how full values are made; `only_fetched`: which ones are made.
- `everywhere`: small ones, which each device makes for itself.
- `node_builder`, `names`: nodes are collected, and added all at once.

Where it happens:

- `op_copies`: copies run on their tower's device, unless the user wants another kind of device.
- `once_devices`: on which device what runs once runs, and sums and gathers are made.
- `variable_devices`: where variables live.
- `host_memory`: what moves from a GPU to the host. Which op has no kernel for GPUs is known to
  `tf_internals.kernels`.

What is sent:

- `sending`: full values, to the devices that need them.
- `packing`: small values share messages, gradients those of one call of an optimizer; `slices`:
  large ones are cut. `sharing`: which device has how much of them; `grid`: which devices exchange
  them; `exchange`: the ops that do.
- `bits`: masks that wait are packed.

What waits for what:

- `waits`: control edges that keep the order of reads and writes.
- `turns`: micro-batches are turns of a device, each with a tower; `schedule`: which ops take
  turns; `activation_bytes`: how much a step keeps in memory then; `turn_gates`: what lets a turn
  wait for the one before.
- `edges`: what waits for what, by data or control, before it's in the graph: by it, `schedule`
  chooses.
"""
