"""Lower bounds of a candidate's step time and memory from the model's unsharded graphs."""
