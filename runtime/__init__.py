"""Run a program: on the ranks of a cluster (``Engine``), or all of them on one machine (``run_local``).

It needs a plan's program and weights, and nothing of the planner. Users import its names from ``partitioner``.
"""
