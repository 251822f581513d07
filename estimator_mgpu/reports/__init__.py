"""What users are told of their model on several devices.

- `explain`: what is sharded, what isn't, and what it costs; it counts by `work`, how much ops put
  out, and by `traffic`, what devices send each other.
- `start_of_training`: the line in the log.
- `verify`: how far the numbers of several devices are from those of one.
- `pictures`, `notebooks`: both, as a picture and as tables.
"""
