"""What a user's policy decides on single operations, beside the budget.

A *policy* is a function of an operation. It answers ``"save"`` (the operation runs once), ``"recompute"`` (none of its
results is held from the forward to the backward), ``"offload"`` (its results wait in the host's memory in between), or
None, which leaves the decision to the solver. JAX's ``jax.checkpoint`` has policies of this kind, without a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.errors import UsageError
from planner.ir.graph import Operation, Phase, TrainingGraph, named_by, operator_name
from planner.ir.schedule import Schedule

Choice = Literal["save", "recompute", "offload"]
CHOICES: tuple[Choice, ...] = ("save", "offload", "recompute")
"""In order of precedence, for operations that run as one and have different answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOperation:
    """What a policy sees of a forward operation."""

    name: str
    """Name of the operator: ``"mm"``, ``"gelu"``, ``"_scaled_dot_product_flash_attention"``."""
    module: str
    """Path of the module that calls it, ``"h.0.mlp"``; ``""`` is the model itself."""
    signature: str
    """Operator, and type, shape and strides of each argument: ``aten.mm.default(float32[8, 4][4, 1]/32, ...)``."""
    output_bytes: int
    """Size of its results."""
    flops: int
    """Floating-point operations."""


Policy = Callable[[PolicyOperation], Choice | None]


@dataclass(frozen=True, slots=True)
class Decisions:
    """Operations of a graph by what a policy decided; by default nothing is decided."""

    save: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = field(default=())
    """Keys of operations that the policy wants to recompute or offload although that is impossible."""

    @property
    def moves(self) -> bool:
        """Whether the policy recomputes or offloads some value."""
        return bool(self.recompute or self.offload)


def decide(graph: TrainingGraph, policy: Policy, *, can_offload: bool) -> Decisions:
    """Ask a policy about each operation of the forward whose results the backward reads, in O(operations).

    UsageError if an answer is neither None nor in :data:`CHOICES`, or offloads although no host memory was given.
    """
    found: dict[Choice, set[int]] = {choice: set() for choice in CHOICES}
    ignored: list[str] = []
    for index, operation in enumerate(graph.operations):
        saved = read_by_backward(graph, index)
        if operation.phase is not Phase.FORWARD or not saved:
            continue
        answers = [_answer(policy, graph, operation, key) for key in operation.keys]
        choice = next((choice for choice in CHOICES if choice in answers), None)
        if choice == "offload" and not can_offload:
            raise UsageError(f"the policy offloads {operation.key!r}: give offload=True, and the device's link is used")
        if choice is None:
            continue
        is_possible = operation.recomputable if choice == "recompute" else True
        if any(graph.values[value].retained for value in saved) and choice != "save":
            is_possible = False
        if choice == "offload" and not all(map(graph.is_private, saved)):
            is_possible = False
        if is_possible:
            found[choice].add(index)
        else:
            ignored.append(operation.key)
    save, offload, recompute = (frozenset(found[choice]) for choice in CHOICES)
    return Decisions(save, recompute, offload, tuple(ignored))


def _answer(policy: Policy, graph: TrainingGraph, operation: Operation, key: str) -> Choice | None:
    module, target = named_by(key)
    answer = policy(
        PolicyOperation(
            name=operator_name(target),
            module=module,
            signature=operation.signature,
            output_bytes=sum(graph.values[value].size_bytes for value in operation.outputs),
            flops=operation.flops,
        )
    )
    if answer is not None and answer not in CHOICES:
        raise UsageError(f"the policy answers {answer!r} for {key!r}: answer 'save', 'recompute', 'offload' or None")
    return answer


def backward_begins(graph: TrainingGraph) -> int:
    """Return the index of the first operation of the backward; the number of operations if there is none."""
    backward = (index for index, operation in enumerate(graph.operations) if operation.phase is Phase.BACKWARD)
    return next(backward, len(graph.operations))


def read_by_backward(graph: TrainingGraph, index: int) -> list[int]:
    """Return the results of an operation that the backward reads."""
    turn = backward_begins(graph)
    return [value for value in graph.operations[index].outputs if max(graph.readers[value], default=-1) >= turn]


def run_once(graph: TrainingGraph, decisions: Decisions) -> TrainingGraph:
    """Return the graph with saved and offloaded operations marked as not recomputable."""
    once = decisions.save | decisions.offload
    if not once:
        return graph
    operations = (
        replace(operation, recomputable=False) if index in once else operation
        for index, operation in enumerate(graph.operations)
    )
    return replace(graph, operations=tuple(operations))


def held_against(graph: TrainingGraph, decisions: Decisions, schedule: Schedule) -> set[int]:
    """Return the operations that violate a policy: in the backward they read a copy that the policy forbids to hold.

    A schedule follows the policy if there are none. O(runs x inputs).
    """
    decided = {u for index in decisions.recompute | decisions.offload for u in graph.operations[index].outputs}
    turn = schedule.first_runs().get(backward_begins(graph) - 1, -1)
    returned = schedule.returning(graph)
    fresh: set[int] = set()
    readers: set[int] = set()
    for position, index in enumerate(schedule.order):
        fresh.update(returned.get(position, ()))
        if position > turn:
            if decided.intersection(graph.operations[index].inputs) - fresh:
                readers.add(index)
            fresh.update(graph.operations[index].outputs)
    return readers
