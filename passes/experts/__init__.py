"""Rewrite mixtures of experts as matrix products grouped by expert, and distribute the experts over expert-parallel
ranks."""
