"""What the package has to know of TensorFlow's own workings, and nothing of shards or towers.

`private` has the private names of TensorFlow that the package uses, but for those of
`tf.estimator`, which are in `tf_estimator`.

Of a graph:

- `graphs`: walks over it, and changes to it; `node_defs`: its ops before they are in it.
- `op_types`, `effects`: what kinds of ops there are, and which have side effects.
- `kernels`: which have a kernel on a GPU, and use which memory.
- `shape_functions`: which shapes an op takes, before any step runs.
- `function_calls`, `v1_loops`: functions that ops call, and loops that are made of ops.
- `liveness`, `upstream`: which ops run in loops or may be dead, and what each one waits for.
- `op_paths`, `tracebacks`: what ops in functions are called, and where the program made them.

Of a session:

- `session_runs`: runs it in a context; `lost_sessions`: when another one is made.
- `error_messages`: what is wrong, by an error's message: too little memory, a lost task, the input.

Of a process: `graph_defs` and `garbage_collection` let training start sooner, and
`variable_sharing` lets variables of one name be shared.
"""
