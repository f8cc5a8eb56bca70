"""Metrics, traces, measured bubbles, origins of NaNs, and bitwise comparison of runs."""
