"""What one call of a block costs one rank for one microbatch: seconds, saved bytes, state bytes."""
