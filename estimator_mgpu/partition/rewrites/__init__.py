"""Parts of the graph are written in another way, so that more of it can be sharded.

In: the graph of one device. Out: a graph of one device that gives the same numbers.
`Division.replaced` notes what is used in place of what. Nothing here knows placements.
"""
