"""From a module or an exported program to one flat graph of pure operators."""
