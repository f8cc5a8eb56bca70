"""Start the ranks of a plan: the command ``python -m partitioner.runtime``, local processes or threads, and
torchrun.
"""
