"""The order in which a step touches state: variables, tables, queues, the log, random numbers.

One device has an order, and several have to keep it:

1. `open_pairs` decides what the model_fn's graph leaves to chance, by control edges.
2. The first steps of `divide` turn calls, branches and loops into ops. All accesses are visible
   then, so the `facts` for the check are noted.
3. Up to `_find_order`, control edges in the graph hold the order.
4. From there on `order` holds it, and whoever changes the graph asks it. Control edges are
   bypassed; `towers.waits` says, in one place, what copies and the user's ops wait for.
5. `check` compares the divided graph with the facts.
"""
