"""From a model and inputs to a studied step and a plan: capture, costs and planning in order."""
