"""One eager step, recorded as autograd runs it."""
