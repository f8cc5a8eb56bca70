"""The program as data, and modules that compute its communication groups, memory, precision and simulated timeline."""
