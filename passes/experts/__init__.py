"""Rewrite mixtures of experts as matrix products grouped by expert, and distribute experts over expert-parallel
ranks.
"""
