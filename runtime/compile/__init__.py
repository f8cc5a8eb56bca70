"""Compile groups of operators of a block (a piece of the model, such as a layer), each to one function, by Inductor or
another backend of torch.
"""
