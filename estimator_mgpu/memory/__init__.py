"""What helps if a device has too little memory for a step.

- `memory_advice`: how many micro-batches would help, or why more of them wouldn't.
- `auto_microbatches`: `microbatches='auto'`, which follows that advice.

Which errors say that memory is too small is known to `tf_internals.error_messages`.
"""
