"""The best-first search over candidates, its certificate, and the fit of the program to memory."""
