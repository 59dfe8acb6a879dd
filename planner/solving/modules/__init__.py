"""The choice of modules to checkpoint, as an integer programme over their variants."""
