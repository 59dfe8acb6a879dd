"""Choices of modules, written into a plan and read back: which are checkpointed, what they keep, what they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.ir.checkpoints import AWAY, HOLD, Region
from planner.ir.problem import Problem, Solution
from planner.plans.offload import OffloadedModule
from planner.plans.plan import Plan
from planner.solving.modules.offload import sending, sending_given
from planner.solving.modules.transfer_windows import moved
from planner.solving.modules.variants import way_named


def modules_of(plan: Plan) -> tuple[str, ...]:
    """Give the paths of the modules that a plan checkpoints, in the order of their backward."""
    again = dict.fromkeys(key for keys in plan.recomputations.values() for key in keys)
    return tuple(key.partition("|")[0] for key in again if key.split("|")[1] in (HOLD, AWAY))


def with_choices(plan: Plan, problem: Problem, solution: Solution) -> Plan:
    """Write into a plan what its checkpoints keep, and which modules send what, and when."""
    plan = replace(plan, kept=_kept(plan, problem))
    if plan.offloading is None or problem.host is None or not solution.regions:
        return plan
    modules = tuple(
        OffloadedModule(
            module=way.module,
            tensors=tuple(sorted(number for sent in way.sent for number in sent.numbers)),
            leaves_with=way.leaves_with or way.module,
            returns_with=way.returns_with or way.module,
        )
        for way in sorted(solution.regions, key=lambda way: way.sends.ended if way.sends is not None else 0)
        if way.sent
    )
    offloading = replace(plan.offloading, modules=modules, least_bytes=problem.host.least_bytes)
    return replace(plan, offloading=offloading) if modules else plan


def _kept(plan: Plan, problem: Problem) -> dict[str, dict[str, tuple[int, ...]]]:
    """Give what checkpoints keep, by operator and occurrence within the module."""
    again = {key for keys in plan.recomputations.values() for key in keys}
    chosen = set(modules_of(plan))
    kept: dict[str, dict[str, tuple[int, ...]]] = {}
    for region in problem.regions or ():
        for one in region.keepable if region.module in chosen else ():
            if problem.graph.operations[one.stand_in].key in again:
                operators = kept.setdefault(region.module, {})
                operators[one.operator] = (*operators.get(one.operator, ()), one.occurrence)
    return kept


def ways_in(plan: Plan, regions: Sequence[Region]) -> tuple[Region, ...] | None:
    """Give the ways that a plan takes, None if these regions do not have them."""
    region_of = {region.module: region for region in regions}
    modules = {one.module: one for one in plan.offloading.modules} if plan.offloading is not None else {}
    checkpointed = modules_of(plan)
    ways = []
    for name in dict.fromkeys((*checkpointed, *modules)):
        way = region_of.get(name)
        if way is not None and name in checkpointed:
            way = way_named(way, plan.kept.get(name, {}))
        if way is not None and name in modules:
            if way.sends is None:
                return None
            way = sending_given(way) if name in checkpointed else sending(way)
            if not way.sent:
                return None
        if way is None:
            return None
        ways.append(way)
    return tuple(
        moved(way, ways, modules[way.module].leaves_with, modules[way.module].returns_with)
        if way.module in modules
        else way
        for way in ways
    )
