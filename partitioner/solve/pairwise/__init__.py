"""A solver for pairwise assignment problems: presolve, dynamic programming, mixed-integer programs and lower bounds.

In such a problem, one choice is taken for each node, at the minimum sum of costs of nodes and of pairs of nodes."""
