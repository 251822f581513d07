"""The order in which a step touches state: variables, tables, queues, the log, random numbers.

    open pairs --> calls, branches and loops taken apart --> rewrites --> Order --+
                                      |                                           |
                                      |                                           v
                                      |                               rewrites, towers, waits
                                      |                                           |
                                      |                                           v
                                      +---> Facts ----------------------------> check

One device has an order, and several have to keep it. `order` tells it, of the finished graph, to
whoever changes the graph; `open_pairs` decides what the graph leaves to chance. What copies and the
user's ops then wait for, `towers.waits` says in one place. `check` compares the divided graph with
the facts.
"""
