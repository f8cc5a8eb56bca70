"""The ranks' entry: ``torchrun --nproc-per-node N -m runtime plan.json``."""

from __future__ import annotations

from runtime.launch.cli import main

if __name__ == "__main__":
    main()
