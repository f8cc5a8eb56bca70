"""Choose the layouts of values and states and the strategies of operators, for one mesh axis at a time."""
