"""The nodes that dividing a graph adds: they are collected, and added to the graph all at once.

In: what kind of op, its inputs, and a device. Out: the name of a tensor to be. Which nodes are
needed is decided in `towers`, and in the rooms that it uses.

- `node_builder`: collects nodes, and adds them.
- `names`: those of copies, and which tower and which of the user's ops a name stands for.
- `host_memory`: what moves from a GPU to the host. Which op has no kernel for GPUs is known to
  `tf_internals.kernels`.
"""
