"""All that a schedule allocates at fixed places in one arena: what the arena takes beside the step's peak."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import StaticMemory
from planner.plans.liveness import allocations_of
from planner.plans.plan import StaticArena
from planner.solving.arena import ALIGNMENT_BYTES, Block, lay_out


def blocks_of(graph: TrainingGraph, costs: Sequence[OperationCost], schedule: Schedule) -> list[Block]:
    """Return what a schedule allocates, as the simulator counts it, with lifetimes in positions of its order."""
    return [Block(made.size_bytes, made.born, made.died) for made in allocations_of(graph, costs, schedule)]


def arena_of(problem: Problem, schedule: Schedule, static_memory: StaticMemory) -> StaticArena | None:
    """Lay out a schedule in one arena; None where nobody asked."""
    if not static_memory.arena:
        return None
    blocks = blocks_of(problem.graph, problem.costs, schedule)
    alignment_bytes = max(ALIGNMENT_BYTES, problem.graph.alignment_bytes)
    found = lay_out(blocks, alignment_bytes=alignment_bytes)
    return StaticArena(
        size_bytes=found.size_bytes,
        lower_bound_bytes=found.lower_bound_bytes,
        step_peak_bytes=problem.evaluate(schedule).peak_bytes,
        tensors=sum(block.size_bytes > 0 for block in blocks),
    )
