"""The search over candidates, its lower bounds, and the solvers that it calls."""
