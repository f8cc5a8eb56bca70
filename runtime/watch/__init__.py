"""Finds failed, hanging and slow ranks of a run, and names the cause."""
