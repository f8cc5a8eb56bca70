"""Capture a module or an exported program as one flat graph of operators that do not write in place."""
