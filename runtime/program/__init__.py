"""The program as data, and its groups, memory, precision and simulated timeline."""
