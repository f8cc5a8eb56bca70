"""The normal form of a captured graph: decompositions, losses, attention masks, random numbers."""
