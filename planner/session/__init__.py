"""Where capture, costs and planning meet."""
