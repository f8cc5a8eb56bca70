"""Choose which device each rank of a mesh runs on, for clusters of equal devices (regular) and of different ones
(irregular)."""
