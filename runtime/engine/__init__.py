"""One rank of a program that trains: batches, steps, optimizer checks, data loading, export."""
