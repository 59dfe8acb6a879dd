"""Repeated blocks captured one by one, and the step around them."""
