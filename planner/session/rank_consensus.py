"""One plan for all ranks: rank 0 plans and broadcasts, and a failure on one rank is raised on all.

Only text is exchanged. Timeouts are those of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from planner.capture.failures import first_line
from planner.capture.model_facts import has_distributed_tensors, has_several_ranks, layers_group, units_of
from planner.errors import InfeasibleBudgetError, PlanMismatchError, PlannerError
from planner.ir.graph import TrainingGraph
from planner.plans.plan import Plan
from planner.session.step import LoweredStep, Options, fingerprint_of

Step = TypeVar("Step")
Made = TypeVar("Made")


def plan_together(
    model: nn.Module, prepare: Callable[[], LoweredStep], options: Options, plan: Callable[[LoweredStep], Plan]
) -> Plan:
    """Plan the step that ``prepare`` lowers; on rank 0 for all ranks if they plan collectively.

    Raises PlanMismatchError if the ranks' steps differ, naming the difference, and PlannerError with another rank's
    message if that fails.
    """
    if not (options.plan_collectively and has_several_ranks()):
        return plan(prepare())
    step = prepared_by_all(prepare, lambda step: {**trained(model), **fingerprint_of(model, step)})
    return planned_by_first(lambda: plan(step), step.lowered.graph)


def trained(model: nn.Module) -> dict[str, str | int]:
    """Return the number of trained parameters, which must be equal on all ranks."""
    return {"parameters that train": sum(parameter.requires_grad for parameter in model.parameters())}


def who_agrees(model: nn.Module, options: Options) -> list[Any]:
    """Return the group of ranks that must recompute the same modules, if any; None stands for all ranks.

    Ranks that share layers must: recompute communicates, and a rank that recomputes other modules would wait for ever.
    The first plan is made by all ranks together; later ones, such as for a last batch that only some ranks have, by
    the ranks that share layers.
    """
    if not has_several_ranks():
        return []
    if options.plan_collectively and (has_distributed_tensors(model) or units_of(model)):
        return [None]
    return [layers_group(model)] if has_distributed_tensors(model) else []


def prepared_by_all(
    prepare: Callable[[], Step], facts: Callable[[Step], Mapping[str, str | int]], group: Any = None
) -> Step:
    """Prepare a step on every rank, and check that its ``facts`` are equal; raises as :func:`plan_together`."""
    prepared: list[Step] = []

    def described() -> dict[str, str | int]:
        prepared.append(prepare())
        return dict(facts(prepared[0]))

    everyone = made_by_all(described, "captured the step", group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs != first:
            keys = [key for key in first if theirs.get(key) != first[key]]
            differs = "; ".join(f"{key} is {theirs.get(key)!r} there and {first[key]!r} on rank 0" for key in keys)
            advice = "All ranks must wrap the same model with inputs of the same sizes"
            raise PlanMismatchError(f"rank {rank} has another step than rank 0: {differs}. {advice}")
    return prepared[0]


def made_by_all(make: Callable[[], Made], doing: str, group: Any = None) -> list[Made]:
    """Return the plain data that each rank of a group makes, by rank.

    A failure is raised on its own rank; the others raise a PlannerError that names the rank, or says that one is gone.
    Where no plan fits, all raise InfeasibleBudgetError: they go on alike, with the plan before or another assumption.
    """
    made: Made | None = None
    failure: Exception | None = None
    said, facts = "", None
    try:
        made = make()
    except Exception as error:  # told to the other ranks first, which would wait otherwise, and raised then
        failure, said = error, f"{type(error).__name__}: {error}"
        facts = error.facts() if isinstance(error, InfeasibleBudgetError) else None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, (said, facts, made), group=group)
    except RuntimeError as error:
        raise PlannerError(
            "a rank went away while the ranks agreed on a plan, or did something else; perhaps it has not "
            f"wrapped its model: {first_line(error)}"
        ) from error
    if failure is not None:
        raise failure
    for rank, (said, facts, _) in enumerate(everyone):
        if said:
            message = f"rank {rank} failed while it {doing}: {said}"
            raise PlannerError(message) if facts is None else InfeasibleBudgetError(message, **facts)
    return [theirs for *_, theirs in everyone]


def planned_by_first(make: Callable[[], Plan], graph: TrainingGraph, group: Any = None) -> Plan:
    """Return the plan that the first rank of a group makes, after checking that this rank's graph can run it."""
    own: list[Plan] = []

    def made() -> str:
        if dist.get_rank(group) == 0:
            own.append(make())
        return own[0].to_json() if own else ""

    text, *_ = made_by_all(made, "planned for all", group)
    if own:
        return own[0]
    plan = Plan.from_json(text)
    plan.schedule_for(graph)  # raises if this rank could not carry it out
    return plan
