"""Saves training, and restores it under any plan of the same model."""
