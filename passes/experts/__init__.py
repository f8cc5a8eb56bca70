"""Mixtures of experts as products by expert, and their dispatch over expert-parallel ranks."""
