"""What operations, losses, optimizers and devices cost and hold."""
