"""Operators of this project with shape functions and gradients: attention, experts, random, fp8."""
