"""Parts of the graph are written in another way, so that more of it can be sharded.

In: the graph of one device. Out: a graph of one device that gives the same numbers.
`Division.replaced` notes what is used in place of what. Nothing here knows placements.

Functions become ops, in the order of `divide.STEPS`:

- `read_functions`, `inline_calls`: calls of a `tf.function`; `take_apart_branches`,
  `take_apart_loops`: branches and loops of TensorFlow 2.
- `function_ops`, `function_waits`: what these share: a function's ops in the place of the op that
  called it, and what they wait for.

Ops are replaced by such as can be sharded, or as use less memory:

- `loop_handles`: after a loop, the variables that it was given are used.
- `batch_norm`: fused batch normalization, in two steps.
- `recomputation`: gradients use copies of forward ops.

Ops wait for less, or for a read of their own:

- `later_reads`, `copied_reads`: reference variables that are read after a write, or of which a copy
  is read, as by what nobody uses.
- `loop_waits`, `identities`: what only waits.
"""
