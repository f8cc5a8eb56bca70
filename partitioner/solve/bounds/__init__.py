"""Compute lower bounds on a candidate's step time and memory from the unsharded graphs of the model."""
