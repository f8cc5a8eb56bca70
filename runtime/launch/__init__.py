"""Starts ranks: the `python -m partitioner.runtime` command, local processes and threads, torchrun."""
