"""A solver for pairwise assignment problems: presolve, dynamic programming, mixed-integer programs and lower bounds.

Each node of such a problem gets one of its choices, at the least sum of costs of nodes and of pairs of nodes.
"""
