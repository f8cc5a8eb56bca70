"""What one training step costs on a placed mesh: time by kind and memory by stage."""
