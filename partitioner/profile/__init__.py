"""Measures the machine at hand and writes a topology file from the measurements."""
