"""What one call of a block, such as a layer, costs one rank for one microbatch: seconds, saved bytes, state bytes."""
