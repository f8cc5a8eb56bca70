"""Compare a model that was distributed by other means with the plain model."""
