"""Parts that the core never imports: each folder may be removed, and everything else still works.

A module of an extra that is named as a room that grows by one file (``exporters``, ``commands``, ...) adds what it
defines to that room; see :func:`planner.common.registry.defined`.
"""
