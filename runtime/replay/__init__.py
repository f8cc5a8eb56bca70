"""Record the operators of a step once, and repeat them in later steps without Python code between them."""
