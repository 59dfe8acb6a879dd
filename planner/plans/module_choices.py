"""Write into a plan, and read back, which modules are checkpointed, what these keep, and what modules offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.ir.checkpoints import AWAY, HOLD, Region
from planner.ir.graph import named_by
from planner.ir.problem import Problem, Solution
from planner.plans.offload import OffloadedModule
from planner.plans.plan import Plan
from planner.solving.modules.ilp import variant_named
from planner.solving.modules.offload import moved, sending, sending_given


def modules_of(plan: Plan) -> tuple[str, ...]:
    """Return the paths of the modules that a plan checkpoints, in the order of their backward."""
    again = dict.fromkeys(named_by(key) for keys in plan.recomputations.values() for key in keys)
    return tuple(module for module, target in again if target in (HOLD, AWAY))


def with_choices(plan: Plan, problem: Problem, solution: Solution) -> Plan:
    """Write into a plan what its checkpoints keep, and which modules send what, and when."""
    plan = replace(plan, kept=_kept(plan, problem))
    if plan.offloading is None or problem.host is None or not solution.regions:
        return plan
    modules = tuple(
        OffloadedModule(
            module=variant.module,
            tensors=tuple(sorted(number for sent in variant.sent for number in sent.numbers)),
            leaves_with=variant.leaves_with or variant.module,
            returns_with=variant.returns_with or variant.module,
        )
        for variant in sorted(
            solution.regions, key=lambda variant: variant.sends.ended if variant.sends is not None else 0
        )
        if variant.sent
    )
    offloading = replace(plan.offloading, modules=modules, least_bytes=problem.host.least_bytes)
    return replace(plan, offloading=offloading) if modules else plan


def _kept(plan: Plan, problem: Problem) -> dict[str, dict[str, tuple[int, ...]]]:
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
    modules = {one.module: one for one in plan.offloading.modules} if plan.offloading is not None else {}
    checkpointed = modules_of(plan)
    variants = []
    for name in dict.fromkeys((*checkpointed, *modules)):
        variant = region_of.get(name)
        if variant is not None and name in checkpointed:
            variant = variant_named(variant, plan.kept.get(name, {}))
        if variant is not None and name in modules:
            if variant.sends is None:
                return None
            variant = sending_given(variant) if name in checkpointed else sending(variant)
            if not variant.sent:
                return None
        if variant is None:
            return None
        variants.append(variant)
    return tuple(
        moved(variant, variants, modules[variant.module].leaves_with, modules[variant.module].returns_with)
        if variant.module in modules
        else variant
        for variant in variants
    )
