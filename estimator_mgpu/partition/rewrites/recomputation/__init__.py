"""With `recompute=True`, gradients use copies of forward ops: `recompute` has the steps.

step_ops -> forward (asks cuts) -> gradients -> forward_copies
"""
