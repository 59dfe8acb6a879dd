"""What comes on top of the step's own peak: the optimizer's step after it, and the allocator beneath it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.common.units import format_bytes
from planner.findings.finding import Finding
from planner.ir.graph import TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import Surroundings
from planner.plans.allocator import simulate_reserved
from planner.plans.parts import ReservedMemory

OPTIMIZER_STEP = "the optimizer's step"


def optimizer_peak_bytes(graph: TrainingGraph, surroundings: Surroundings) -> int:
    """Give what the device holds while the optimizer steps: gradients and outputs, and its temporaries.

    Gradients that are accumulated into are resident already, so those of the step are gone by then.
    """
    kinds = ("output",) if "gradients" in graph.static_bytes else ("output", "gradient")
    left_bytes = sum(value.size_bytes for value in graph.values if value.retained and value.kind in kinds)
    return graph.total_static_bytes + left_bytes + surroundings.optimizer_step_bytes


def reserved_by_cuda(problem: Problem, schedule: Schedule, surroundings: Surroundings) -> ReservedMemory | None:
    """Predict what CUDA's caching allocator takes from the device; None where there is none."""
    if not surroundings.has_caching_allocator:
        return None
    found = simulate_reserved(problem.graph, problem.costs, schedule, resident_bytes=surroundings.tensor_bytes)
    return ReservedMemory(allocated_bytes=found.block_bytes, reserved_bytes=found.reserved_bytes)


def reserve_warnings(
    problem: Problem, surroundings: Surroundings, reserved: ReservedMemory | None
) -> Iterator[Finding]:
    """Warn where fragmentation would eat what the budget leaves free."""
    static_bytes = problem.graph.static_bytes
    available_bytes = problem.budget_bytes + problem.graph.total_static_bytes - static_bytes.get("reserve", 0)
    if reserved is None or reserved.reserved_bytes <= available_bytes:
        return
    yield Finding(
        rule="fragmentation",
        evidence=f"CUDA's allocator would reserve {format_bytes(reserved.reserved_bytes)} for this plan, more than the "
        f"{format_bytes(available_bytes)} that it may have",
        cause="holes between segments are lost to the budget",
        fix="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan with a reserve of "
        f"{format_bytes(reserved.reserved_bytes - available_bytes + static_bytes.get('reserve', 0))}, if the budget is "
        "all that the card has",
    )
