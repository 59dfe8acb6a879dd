"""What is wrong with how a model is trained, and what stands in the way of a plan.

A rule is a name, a cause, a fix, and a pure function that looks for evidence in a
:class:`~planner.findings.subject.Subject`: plain data on the modules, on what was seen in the forward, and on the
captured step. ``capture.module_facts`` and ``observe`` gather it with torch, ``check`` puts all together.
"""
