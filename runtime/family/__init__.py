"""Several programs over one layout of the state: as data, in plan files, and how their batches are padded."""
