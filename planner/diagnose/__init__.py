"""Find what is wrong with a training script, and what limits a plan for it.

A rule is a name, a cause, a fix, and a pure function that looks for evidence in a
:class:`~planner.findings.rules.Subject`: plain data on the modules, on what was seen in the forward, and on the
captured step. ``capture.model_facts`` and ``observe`` gather it with torch, ``check`` puts all together.
"""
