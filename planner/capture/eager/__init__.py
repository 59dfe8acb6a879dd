"""Record one eager training step as autograd runs it."""
