"""What the package has to know of TensorFlow's own workings, and nothing of devices or shards.

`private` has the private names of TensorFlow that the package uses, but for those of
`tf.estimator`, which are in `tf_estimator`, and modules in which `lost_sessions`
and `graph_defs` replace a name. The other
modules walk over graphs and change them, and tell types of ops and ops with side effects.
"""
