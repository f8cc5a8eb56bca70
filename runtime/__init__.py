"""Run a program: on the ranks of a cluster (``Engine``), or all ranks on one machine (``run_local``).

This package needs only a plan's program and weights, not the planner. Users import its names from ``partitioner``.
"""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "runtime":  # imported by its folder's name, with the repository's root on the path
    sys.modules["runtime"] = import_module("partitioner.runtime")


def __getattr__(name: str) -> object:
    """Return the public name ``name`` of ``partitioner``, so that ``runtime.Engine`` works in older scripts. Raise
    ``AttributeError`` for other names.
    """
    public = import_module("partitioner")
    if name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)
