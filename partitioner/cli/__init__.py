"""The command line of the partitioner."""
