"""Compile groups of operators of a block (a piece of the model, such as a layer) to one function each, by Inductor or
another backend of torch."""
