"""Decides which ops are sharded, and where each tensor's values are.

In: the placements of the batch. Out: a `Plan`. Nothing is added to the graph here.

- `batch_placements`: what towers have of the batch.
- `engine` visits the ops in order, and has what they need decided; ops that ask for shapes need no
  rule: sizes are known without a gather.
- `decisions`: how one op runs. `partial_results`: if what it's given is partial:
  `op_types.PARTIAL_INPUTS` has the ops that pass partial results on.
- `reasons`: why an op runs once, of several reasons the one that users are told.
- `matching`: along which label of its rule an op is sharded.
- `loops`, `branches`, `called_functions`, `function_bodies`: ops that call functions, and loops and
  branches of TensorFlow 1. `value_origins`: which op made a value that a loop keeps;
  `loops_over_rows`: loops that take one example after the other, as `tf.map_fn` does.
- `scope`: what is known of a graph, or of a function, while its ops are visited.
- `unused_gradients`, before, finds ops that need no decision; `needless_ops`, afterwards, takes ops
  out of the plan.
"""
