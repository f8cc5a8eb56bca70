"""The tensors that a rank holds: parameters, gradients, buffers, the loss, and data offloaded to host
memory or disk.
"""
