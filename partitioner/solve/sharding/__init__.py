"""Chooses layouts of values and states and strategies of operators, one mesh axis at a time."""
