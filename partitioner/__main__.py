"""The command line as a module: ``python -m partitioner plan model.py:make --topology local:4``."""

from partitioner.cli import app

if __name__ == "__main__":
    app(prog_name="partitioner")
