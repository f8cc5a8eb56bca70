"""Operators that this project adds to torch, with shape functions and gradients: attention, experts, random numbers,
fp8.
"""
