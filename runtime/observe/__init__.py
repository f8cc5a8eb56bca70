"""Observe a run: metrics per step, traces, measured bubbles, origins of NaNs, and bitwise comparison of two runs."""
