"""Capture a model's repeated blocks one by one, and record the eager step around them."""
