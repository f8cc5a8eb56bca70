"""Layouts of small models, correct and faulty, for `partitioner check`."""
