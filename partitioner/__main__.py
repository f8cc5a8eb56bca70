"""The command line as a module: ``python -m partitioner plan model.py:make --topology local:4``."""

from __future__ import annotations

from partitioner.cli.app import app

if __name__ == "__main__":
    app(prog_name="partitioner")
