"""Checkpointing of whole modules, as an integer programme over their variants."""
