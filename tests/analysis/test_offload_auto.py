"""Offload that nobody asked for: where it saves enough, or nothing fits without, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost_models import devices
from planner.analysis import study as studies
from planner.analysis.study import Study
from planner.common.options import Offload, Search
from planner.errors import UsageError
from planner.ir import host
from planner.ir.static_memory import StaticMemory
from planner.plans.plan import NoPlanFitsError, Plan, PlanOrigin
from planner.report import render
from tests.example_graphs import transformer
from tests.orders import branches
from tests.planned import printed

QUICK = Search(time_limit_seconds=0.2, deterministic=True, compare=False)
FAST = {"host_budget": "1GiB", "at_least": 1, "link": "4GB/s"}


def study_on(device: str = "h100", runtime: str = "graph", graph: Any = None) -> Study:
    """Return what a capture for a device would."""
    traced, costs = graph or transformer(4)
    origin = PlanOrigin(device=device, runtime=runtime)
    return Study(graph=traced, costs=costs, origin=origin, static_memory=StaticMemory(), device=devices.device(device))


def planned(step: Study, budget: Any = "60%", enabled: Any = "auto", **options: Any) -> Plan:
    """Plan a step within a budget."""
    return step.plan(budget, search=QUICK, offload=Offload(enabled, **(FAST | options)))


def test_it_is_used_where_it_saves_more_than_half_a_point() -> None:
    step = study_on()
    alone, plan = planned(step, enabled=False), planned(step)
    assert plan.offloading is not None and plan.offloading.values and alone.offloading is None
    assert plan.offloading.alone_seconds == pytest.approx(alone.added_seconds)
    assert plan.overhead < alone.overhead - studies.WORTH_OFFLOADING
    text = " ".join(printed(render, plan, width=100, full=True).split())
    assert f"Without offload the overhead would be +{100 * alone.overhead:.1f}%." in text
    assert "of the 1.00 GiB that they may take" in text and Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("link", ["1MB/s", "4GB/s"])
def test_it_is_not_used_for_less(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if link == FAST["link"]:
        monkeypatch.setattr(studies, "WORTH_OFFLOADING", 10.0)
    alone, plan = planned(study_on(), enabled=False), planned(study_on(), link=link)
    assert plan.offloading is None and plan.overhead == pytest.approx(alone.overhead)
    assert plan.lower_bound_seconds == pytest.approx(alone.lower_bound_seconds)


def test_it_is_used_where_no_plan_fits_without() -> None:
    step = study_on()
    with pytest.raises(NoPlanFitsError) as refused:
        planned(step, "20%", enabled=False)
    plan = planned(step, int(0.985 * refused.value.minimum_feasible_peak_bytes))
    assert plan.offloading is not None and plan.offloading.values and plan.offloading.alone_seconds is None


@pytest.mark.parametrize("of", ["cpu", "no link", "modules", "ilp", "policy", "off"])
def test_elsewhere_it_stays_silent(of: str) -> None:
    step = study_on("cpu" if of == "cpu" else "h100", "modules" if of == "modules" else "graph")
    assert step.device is not None
    if of == "no link":
        step = replace(step, device=replace(step.device, host_link_bytes_per_second=0.0))
        with pytest.raises(UsageError, match="no figure for its link"):
            step.plan("60%", offload=True)
    search = replace(QUICK, solver="ilp" if of == "ilp" else "auto")
    asked = Offload(of != "off" and "auto", host_budget="1GiB", at_least=1)
    policy = (lambda operation: None) if of == "policy" else None
    assert (step.host_for(asked, search) is None) == (of != "policy")
    assert step.plan("60%", search=search, offload=asked, policy=policy).offloading is None


def test_plans_with_offload_cost_no_more_in_another_order_either() -> None:
    step = study_on(graph=branches(depth=2))
    for share in ("55%", "70%", "85%"):
        alone, plan = planned(step, share, enabled=False), planned(step, share, enabled=True)
        assert plan.added_seconds <= alone.added_seconds and plan.lower_bound_seconds <= plan.added_seconds
        assert Plan.from_json(plan.to_json()).schedule_for(step.graph) == plan.schedule_for(step.graph)


def test_it_may_take_half_of_what_is_free_shared_by_the_ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < host.free_bytes() <= devices.device("cpu").memory_bytes
    monkeypatch.setattr(host, "free_bytes", lambda: 8 * 2**30)
    assert host.host_of(devices.device("h100")).budget_bytes == 4 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = host.host_of(devices.device("h100"), link="32GB/s")
    assert (found.budget_bytes, found.bytes_per_second) == (2 * 2**30, 0.8 * 32e9)
    with pytest.raises(UsageError, match="offload is True, False or 'auto'"):
        Offload("sometimes")


@pytest.mark.parametrize(("share", "left"), [(0.0, 1.0), (0.25, 0.75), (3.0, 0.1)])
def test_the_next_batch_takes_its_part_of_the_link(share: float, left: float) -> None:
    step = study_on()
    assert step.device is not None
    rate, step_seconds = host.host_of(step.device).bytes_per_second, sum(cost.seconds for cost in step.costs)
    batch_bytes = round(share * rate * step_seconds)
    with_batch = replace(step, graph=replace(step.graph, static_bytes={"inputs": batch_bytes}))
    assert with_batch.host("1GiB").bytes_per_second == pytest.approx(left * rate)
