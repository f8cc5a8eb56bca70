"""A solver for pairwise assignment problems: presolve, dynamic programming, MILP, bounds."""
