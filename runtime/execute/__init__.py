"""Execute a rank's instructions: compile graphs to functions, transfer values, overlap communication,
record progress.
"""
