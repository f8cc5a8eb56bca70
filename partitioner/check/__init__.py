"""Compare a model that was distributed by other means, such as FSDP or DTensor, with the same model on one process."""
