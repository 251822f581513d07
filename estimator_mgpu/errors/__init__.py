"""What the error of a step says: which of the user's ops failed, where, and with which examples.

- `step_errors`: errors are raised again, with an explanation.
- `user_lines`: the line of the user's program that made an op.
"""
