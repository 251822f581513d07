"""Several machines: each runs the same program, and the chief trains on the devices of all.

In: a RunConfig that has read TF_CONFIG. Out: the devices of the cluster, a session's hooks, and
for `input='machine'` the parts of each batch. How a graph is divided doesn't belong here: to
`partition`, a machine is a part of a device's name.
"""
