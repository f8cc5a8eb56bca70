"""Features of Python and torch that a trace needs beyond `torch.export`, and equal layers traced once."""
