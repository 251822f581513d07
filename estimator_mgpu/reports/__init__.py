"""What users are told of their model on several devices.

- `explain`: what is sharded, what isn't, and what devices send each other.
- `verify`: how far the numbers of several devices are from those of one.
- `pictures`, `notebooks`: both, as a picture and as tables.
"""
