"""Costs of operations, losses, optimizers and devices."""
