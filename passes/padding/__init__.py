"""Find which inputs may be padded without any change to what a model computes, and prove it from the model's graph."""
