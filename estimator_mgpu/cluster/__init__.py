"""Several machines: each runs the same program, and the chief trains on the devices of all.

In: a RunConfig that has read TF_CONFIG. Out: the devices of the cluster, a session's hooks, and
for `input='machine'` the parts of each batch. How a graph is divided doesn't belong here: to
`partition`, a machine is a part of a device's name.

- `tf_config`: what TF_CONFIG has to be.
- `task`: how the tasks of a cluster meet, train, serve and save.
- `input`: each machine reads a part of each batch; and what happens when one has no more.
- `watch`, `restarts`: tasks that don't answer; sessions that are lost, as when a worker dies.
- `notes`, `ending`: what tasks leave for each other; how all of them end.
- `reach`: what is at a task's address.
"""
