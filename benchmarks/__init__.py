"""What the planner is held against, one command for each question; see ``benchmarks/README.md``."""
