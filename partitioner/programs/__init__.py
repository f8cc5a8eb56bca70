"""Further programs of a plan over the layout of its main program, the training step: evaluation, generation, and other
batch shapes."""
