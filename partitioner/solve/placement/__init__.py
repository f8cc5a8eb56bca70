"""Maps the ranks of a mesh to devices, on regular and irregular clusters."""
