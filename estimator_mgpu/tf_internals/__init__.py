"""What the package has to know of TensorFlow's own workings, and nothing of devices or shards.

`private` has the private names of TensorFlow that the package uses, but for those of
`tf.estimator`, which are in `tf_estimator`. The other modules walk over
graphs and change them, tell types of ops and ops with effects, and bring `tf.estimator` back.
"""
