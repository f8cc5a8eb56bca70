"""What a rank holds: parameters, gradients, buffers, the loss, and what is offloaded."""
