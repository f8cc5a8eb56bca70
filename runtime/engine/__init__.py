"""One rank of a training run: batches, steps, optimizer checks, data loading, export of weights."""
