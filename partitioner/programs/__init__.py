"""Further programs of a plan (evaluation, generation, training steps for other batch shapes). They use the parameters
in the sharding of the plan's main program, the training step."""
