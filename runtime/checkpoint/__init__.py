"""Save the state of a training run, and restore it under any plan of the same model."""
