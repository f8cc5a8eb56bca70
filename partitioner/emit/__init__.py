"""Build the instruction lists of all ranks from a solved candidate (mesh, schedule, stages and shardings): gradient
buckets, ZeRO gathers, sends, offload, and the freeing of tensors."""
