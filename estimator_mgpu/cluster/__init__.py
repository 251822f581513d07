"""Several machines: each runs the same program, and the chief trains on the devices of all.

In: a RunConfig that has read TF_CONFIG. Out: the devices of the cluster, a session's hooks, and
for `input='machine'` the parts of each batch. How a graph is divided doesn't belong here: to
`partition`, a machine is a part of a device's name.

What a process is:

- `tf_config`: what TF_CONFIG has to be.
- `join`: the process joins its cluster once, as one of its tasks.
- `task`: what all tasks have: a server, and waiting for the others, with its time limit.
- `chief`, `serve`, `evaluator`: what each kind of task does. `chief` begins each session.

What a training needs:

- `restarts`: counts the sessions that are lost, as when a worker is killed, and gives up.
- `machine_input`: each machine reads a part of each batch; and what happens when one has no more.
- `saving`: the chief saves checkpoints, but for some parts; and whether one is being saved.

How tasks know of each other:

- `reach`: what is at a task's address, asked by a connection of our own.
- `notes`: what tasks leave for each other.
- `leadership`: which chief leads the others, as another one may have replaced it.
- `connections`: those to a machine that has gone are dropped.
- `watch`: tasks that don't answer, while a step waits for them in TensorFlow.

How they end:

- `exits`: with which error and status this process ends, which Python doesn't tell.
- `end_of_chief`: the chief tells the others that it ends, and how; also if its main thread hangs as
  SIGTERM comes. `serve` says what SIGTERM does to other tasks.
- `ending`: what the chief leaves, and how all other tasks end by it. If it leaves nothing, they
  wait, as `task` says: nobody takes a chief's place but a process that is started as the chief.
"""
