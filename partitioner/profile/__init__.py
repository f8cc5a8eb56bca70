"""Measure a machine and write its speeds as a topology file."""
