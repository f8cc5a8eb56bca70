"""The ranks' entry: ``torchrun --nproc-per-node N -m runtime plan.json``."""

from runtime.launch import main

if __name__ == "__main__":
    main()
