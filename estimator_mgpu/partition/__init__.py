"""Divides a finished graph over devices.

In: the graph that a model_fn has built for the whole batch. Out: the same graph with a copy of most
ops on each device, and the same results. `divide` has the steps in order, in these folders:

    rewrites/ -> propagation/ (asks rules/) -> a Plan -> once_devices -> towers/ -> nodes/

`towers/` asks `messages/` what is sent together, and `micro_batches/` what takes turns on a device.
`variable_devices` places variables before all that.

The steps hand on a `division`. `placements`, `plan` and `sizes` are the data in it. A `tower` is a
device and a turn. `size_inference` works out sizes from the graph, by the `value_functions` of ops;
`byte_counts` estimates bytes of tensors. `order/` says throughout in which order the graph touches
state. Afterwards, `fetches` gives whoever fetches a tensor that touches state its value of the
step.
"""
