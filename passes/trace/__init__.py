"""Trace features of Python and torch that ``torch.export`` does not support, and trace equal layers only once."""
