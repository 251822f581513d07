"""Parts of the graph are written in another way, so that more of it can be sharded.

In: the graph of one device. Out: a graph of one device that gives the same numbers. Each module
returns which tensors are used in place of which. Nothing here knows devices or placements.
"""
