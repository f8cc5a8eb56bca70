"""Rewrite operators on rows that a mask selects to static shapes: all rows are kept, together with the mask."""
