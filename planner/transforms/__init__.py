"""Rewrites of a joint graph: chunks, gradients added in place, rounding."""
