"""Further programs of a plan over the layout of its first one: evaluation, and other batch shapes."""
