"""The program (what each rank executes) as data, and modules that compute its communication groups, memory, precision
and simulated timeline."""
