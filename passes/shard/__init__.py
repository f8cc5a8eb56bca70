"""Passes from a graph in normal form to the graphs of one rank: fold equal layers, split the batch, shard tensors,
differentiate."""
