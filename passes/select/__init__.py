"""Operators on rows that a mask selects, rewritten to static shapes with a mask beside the rows."""
