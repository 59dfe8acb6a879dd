"""What another budget, size, device or way would give: questions about a step that is captured already.

``curve`` traces overhead over budget, ``sizes`` finds the largest batch that fits and the one that trains most a
second, ``accelerators`` asks devices, ``methods`` sets solvers and what people do without one on the same axes.
"""
