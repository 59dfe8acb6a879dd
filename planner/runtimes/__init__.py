"""Ways to run a plan: one file each."""
