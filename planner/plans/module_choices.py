"""Write into a plan, and read back, which modules are checkpointed, and what these keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.ir.checkpoints import HOLD, Region
from planner.ir.graph import named_by
from planner.ir.problem import Problem
from planner.plans.plan import Plan
from planner.solving.modules.ilp import variant_named


def modules_of(plan: Plan) -> tuple[str, ...]:
    """Return the paths of the modules that a plan checkpoints, in the order of their backward."""
    again = dict.fromkeys(named_by(key) for keys in plan.recomputations.values() for key in keys)
    return tuple(module for module, target in again if target == HOLD)


def kept_of(plan: Plan, problem: Problem) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return what checkpoints keep, by operator and occurrence within the module."""
    again = {key for keys in plan.recomputations.values() for key in keys}
    chosen = set(modules_of(plan))
    kept: dict[str, dict[str, tuple[int, ...]]] = {}
    for region in problem.regions or ():
        for one in region.keepable if region.module in chosen else ():
            if problem.graph.operations[one.stand_in].key in again:
                operators = kept.setdefault(region.module, {})
                operators[one.operator] = (*operators.get(one.operator, ()), one.occurrence)
    return kept


def choices_in(regions: Sequence[Region], chosen: Mapping[str, Mapping[str, Sequence[int]]]) -> tuple[Region, ...]:
    """Return the variants of those regions that are chosen, each with what it keeps if it can."""
    found = (region for region in regions if region.module in chosen)
    return tuple(variant_named(region, chosen[region.module]) or region for region in found)


def variants_in(plan: Plan, regions: Sequence[Region]) -> tuple[Region, ...] | None:
    """Return the variants that a plan takes, None if these regions do not have them."""
    region_of = {region.module: region for region in regions}
    names = modules_of(plan)
    variants = [variant_named(region_of[name], plan.kept.get(name, {})) for name in names if name in region_of]
    found = tuple(variant for variant in variants if variant is not None)
    return found if len(found) == len(names) else None
