"""A split in the words of the engine that runs it: arguments of its command line."""

from __future__ import annotations

from planner.analysis.splits.table import ModelTable
from planner.analysis.splits.types import Estimate, Question
from planner.exporters import megatron, torchtitan

_WRITERS = {"torchtitan": torchtitan.split_arguments, "megatron": megatron.split_arguments}


def split_arguments(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return what the engine of a split is given, one argument a line."""
    return _WRITERS[estimate.split.engine](estimate, table, question)
