"""Starts ranks: the `python -m runtime` command, local processes and threads, torchrun."""
