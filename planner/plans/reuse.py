"""Reuse a plan: check that it is for this step, or carry its decisions over to another one."""

from __future__ import annotations

from dataclasses import replace

from planner.common.options import HELD
from planner.errors import PlanMismatchError, ScheduleError
from planner.ir.checkpoints import schedule_of
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LOSS, OF_THE_MODEL, OUTPUTS, SHARDS, StaticMemory
from planner.plans.allocator import optimizer_peak_bytes, whole_peak_bytes
from planner.plans.from_solution import plan_from_solution
from planner.plans.module_choices import variants_in
from planner.plans.plan import Plan, PlanOrigin

_REUSED = " (reused)"
"""What is added to the name of a solver where its plan was taken over."""

OF_THE_GRAPH = ("assumes", "operations", "graph", OUTPUTS, LOSS)
"""Keys of a fingerprint that say how a step was captured, and for which loop; the others say what of, and where."""


_MEASURED = (
    "cost_model", "baseline_step_seconds", "recompute_seconds", "cache_seconds", "offloading", "lower_bound_seconds",
    "status",
)  # fmt: skip
"""What a plan says by its costs."""


def check_match(plan: Plan, origin: PlanOrigin, *, varies: bool = False) -> None:
    """Refuse a plan of another graph by a PlanMismatchError with what differs; one that varies with data may differ."""
    theirs, ours = plan.fingerprint, origin.fingerprint
    if theirs.get("graph") == ours["graph"]:
        return
    keys = _differing(plan, origin)
    if varies and not set(keys) - {"graph", "operations"}:
        return
    if not assumes_the_same(plan, origin):  # a batch that needs a mask, say, has a graph of its own
        keys = [key for key in keys if key not in OF_THE_GRAPH]
        if not keys:
            return
    _refuse(plan, origin, keys)


def check_same_step(plan: Plan, origin: PlanOrigin) -> None:
    """Refuse a plan of another model, other sizes or another device, however its graph was captured, likewise."""
    keys = [key for key in _differing(plan, origin) if key not in OF_THE_GRAPH]
    if keys:
        _refuse(plan, origin, keys)


def _differing(plan: Plan, origin: PlanOrigin) -> list[str]:
    """Return the keys of fingerprints that differ; builds of one version of torch, as +cpu and +cu130, are the same."""
    both = plan.fingerprint, origin.fingerprint
    theirs, ours = ({**each, "torch": str(each.get("torch")).partition("+")[0]} for each in both)
    return [key for key in ours if theirs.get(key) != ours[key]]


def _refuse(plan: Plan, origin: PlanOrigin, keys: list[str]) -> None:
    said = {OUTPUTS: HELD, **plan.fingerprint}
    differs = [f"{key} is {said.get(key)!r} in the plan and {origin.fingerprint[key]!r} here" for key in keys]
    raise PlanMismatchError(
        f"the plan was made for something else: {'; '.join(differs)}. Plan again, or pass "
        "Budget(plan=plan, replan=True)"
    )


def assumes_the_same(plan: Plan, origin: PlanOrigin) -> bool:
    """Whether a plan and a step are captured under the same assumptions on inputs."""
    return plan.fingerprint.get("assumes", "") == origin.fingerprint["assumes"]


def take_over(
    problem: Problem,
    plan: Plan,
    *,
    origin: PlanOrigin,
    around: StaticMemory,
    compare: bool,
    asked_for: bool = False,
    even_unneeded: bool = False,
) -> Plan | None:
    """Reuse a plan for a step whose operations have the same keys, if it keeps the budgets there.

    One that recomputes what the budget leaves room for is not, unless it is of this very graph and asked for: its
    budget may have been kept by compiled code, which can need more than the graph. Or unless it is wanted
    ``even_unneeded``: other ranks may need it.
    """
    graph = problem.graph
    try:
        variants = variants_in(plan, problem.regions) if problem.regions is not None else ()
        if variants is None:
            return None
        schedule = schedule_of(graph, variants) if problem.regions is not None else plan.schedule_for(graph)
        if schedule.offloads and problem.host is None:
            return None
        evaluation = problem.evaluate(schedule)
    except (PlanMismatchError, ScheduleError):  # keys that are not there; or values that leave before their last use
        return None
    same_graph = plan.fingerprint.get("graph") == origin.fingerprint["graph"]
    budget_bytes = problem.budget_bytes + graph.total_static_bytes
    unneeded = (evaluation.added_seconds > 0 or bool(variants)) and not (even_unneeded or (asked_for and same_graph))
    unneeded = unneeded and whole_peak_bytes(problem, Schedule.keep_all(graph), around) <= budget_bytes
    needed_bytes = max(whole_peak_bytes(problem, schedule, around), optimizer_peak_bytes(graph, around))
    if needed_bytes > budget_bytes or unneeded:
        return None
    if problem.host is not None and evaluation.host_bytes > problem.host.budget_bytes:
        return None
    solution = Solution.simulated(
        evaluation,
        schedule,
        plan.solver if same_graph else f"{plan.solver.removesuffix(_REUSED)}{_REUSED}",
        lower_bound_seconds=plan.lower_bound_seconds if same_graph else 0.0,
    )
    used = problem.as_used_by(schedule)
    taken = plan_from_solution(used, solution, origin=origin, static_memory=around, compare=compare)
    if same_graph and plan.order:
        taken = replace(taken, captured_order=plan.captured_order)
    if same_graph and plan.cost_model != origin.cost_model:  # its times were measured, and still hold
        measured = {name: getattr(plan, name) for name in _MEASURED}
        taken = replace(taken, **measured, details=plan.details or taken.details)
    return taken


def is_reused(plan: Plan) -> bool:
    """Whether a plan was solved for another step, such as one of other sizes."""
    return plan.solver.endswith(_REUSED)


def as_planned(around: StaticMemory, plan: Plan) -> StaticMemory:
    """Return the static memory that a plan was made with, with the model's own memory as it is now."""
    of_model = {kind: size_bytes for kind, size_bytes in around.static_bytes.items() if kind in OF_THE_MODEL}
    beside = {kind: size_bytes for kind, size_bytes in plan.static_bytes.items() if kind not in OF_THE_MODEL}
    shards = int(plan.fingerprint.get(SHARDS, 1))
    if shards > 1:
        of_model["parameters"] = plan.static_bytes["parameters"]
    others = sum(beside.values()) - beside.get("reserve", 0)
    of_libraries = around.library_bytes if sum(around.library_bytes) <= others else ()
    return replace(
        around,
        gradient_shards=shards,
        static_bytes=of_model | beside,
        optimizer_step_bytes=plan.optimizer_step_bytes,
        tensor_bytes=(*around.tensor_bytes[:-1], others - sum(of_libraries)),
        library_bytes=of_libraries,
    )
