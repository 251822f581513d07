"""What the error of a step says: which of the user's ops failed, where, and with which examples.

- `failures`: errors are raised again, with an explanation.
- `nan_losses`: which examples' loss isn't finite, if training ends with a loss that is NaN.
- `user_lines`: the line of the user's program that made an op.
"""
