"""Further programs of a plan (evaluation, generation, training steps for other batch shapes). They use the parameters
as the plan's main program, the training step, shards them."""
