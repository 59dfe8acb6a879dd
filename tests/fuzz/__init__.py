"""Random models under random budgets, held to the promises: ``python -m tests.fuzz --models 1000``."""
