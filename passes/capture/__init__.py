"""Capture a module or an exported program as one flat graph of pure operators."""
