"""With `recompute=True`, gradients use copies of forward ops: `recompute` has the steps.

- `step_ops`: the forward pass, and the gradients that use it.
- `kept_activations`: what is kept, and what is computed again; `cuts`: where the pass is cut, so
  that what is kept has few bytes.
- `gradients`: for which gradients the copies wait; `forward_copies`: the copies.
"""
