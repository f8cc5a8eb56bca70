"""Cut the calls of a model into pipeline stages that fit in the memory of their ranks."""
