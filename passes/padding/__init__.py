"""Which inputs may be padded without any change to what a model computes, shown from its graph."""
