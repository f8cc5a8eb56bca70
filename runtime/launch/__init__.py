"""Start the ranks of a plan: by the command ``python -m partitioner.runtime``, as local processes or threads, or by
torchrun.
"""
