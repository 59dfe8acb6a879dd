"""What-if questions about a captured step: other budgets, input sizes, devices and solvers.

``curve`` traces overhead over budget, ``axes`` finds the largest batch or length that fits and asks other devices,
``answers`` sets other solvers and what people do without one beside the curve.
"""
