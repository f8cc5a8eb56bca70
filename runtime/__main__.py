"""Entry point of the ranks: ``torchrun --nproc-per-node N -m partitioner.runtime plan.json``."""

from __future__ import annotations

from partitioner.runtime.launch.cli import main

if __name__ == "__main__":
    main()
