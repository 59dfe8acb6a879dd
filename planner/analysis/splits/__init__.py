"""Which combination of splits over many devices trains fastest within the memory of each: searched over tables.

A model is a table of its layers for one sample (:mod:`~planner.analysis.splits.table`), devices are joined by links
(:mod:`~planner.analysis.splits.links`), a split is estimated (:mod:`~planner.analysis.splits.estimate`), and the best
ones are searched for (:mod:`~planner.analysis.splits.search`). Nothing here runs anything, or knows torch.
"""
