"""From a model_fn to a replicated one.

- `calls`: what a model_fn may be, how it's called, and what it has to return.
- `build`: the graph that it builds is divided over the devices, unless it's to be exported.
- `spec_results`: what an EstimatorSpec gives, which becomes that of the global batch, and what of
  it a step is run for.
- `refused_gradients`: after that, `tf.gradients` doesn't go through it any more.
- `model_function`: a replicated model_fn can be pickled.
"""
