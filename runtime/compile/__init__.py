"""Compile groups of operators of a block to one function each, by Inductor or another backend of torch."""
