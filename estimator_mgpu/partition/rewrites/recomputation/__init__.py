"""With `recompute=True`, gradients use copies of forward ops: `recompute` has the steps.

- `step_ops`: the forward pass, and the gradients that use it.
- `forward`: what is kept, and what is computed again; `cuts`: where the pass is cut for that.
- `gradients`: for which gradients the copies wait; `forward_copies`: the copies.
"""
