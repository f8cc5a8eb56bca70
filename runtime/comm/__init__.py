"""Communication between ranks over Gloo, NCCL or threads; compressed gradients; rendezvous."""
