"""Offload: what a schedule with it means, plans that mix it with recompute, and the same steps run."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cost_models
import planner
from planner import errors, solvers
from planner.common.limits import Clock
from planner.common.options import Search, grouped
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.host import Host, host_of
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule
from planner.ir.simulator import Copy, FetchedCopy, lifetimes, simulate
from planner.plans.device_file import load, save
from planner.plans.no_plan_fits import too_little
from planner.plans.offload import with_offloads
from planner.plans.plan import NoPlanFitsError
from planner.report import render
from planner.rewrite import host_copies
from planner.solvers.auto import AutoSolver
from planner.solvers.offload_search import lowest_offloading
from planner.solving.exchange import exchanged
from planner.solving.milp import minimise
from planner.solving.offload_bound import build
from planner.solving.offload_reduction import OffloadReduction, steps_of
from planner.solving.peak_bounds import lowest_peak
from planner.solving.transfer_windows import widened
from tests.example_graphs import by_reads, transformer
from tests.models import SEQUENCES, Layers, Stack, Transformer, images, perceptron, rows
from tests.offload_oracle import cheapest_offloading, walk
from tests.oracle import random_graph
from tests.planned import make_plan, printed, problem_at, without_recompute
from tests.runtimes.steps import assert_same, beside, hold_peak, train
from tests.runtimes.steps import step as one_step
from tests.tiers import tiered

LINK = Host(bytes_per_second=1.0, budget_bytes=1000, least_bytes=1)


def chain() -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Four operations forward with results of 4 bytes, and four backward, each of which reads one of them."""
    reads = [(), (0,), (1,), (2,), (3,), (4, 2), (5, 1), (6, 0)]
    return by_reads(reads, [4] * len(reads), forward=4), (OperationCost(seconds=1.0),) * len(reads)


def posed(share: float, host: Host = LINK, seed: int | None = None) -> Problem:
    step = chain() if seed is None else random_graph(seed, plain=seed % 2 == 0)
    return replace(problem_at(step, share), host=host)


def posed_by(seed: int) -> Problem:
    """Pose a random graph with a budget, a link and a host that its seed says."""
    share, rate = (0.85, 0.7, 0.6, 0.5)[seed % 4], (0.25, 0.5, 1.0, 2.0)[seed // 4 % 4]
    return posed(share, replace(LINK, bytes_per_second=rate, budget_bytes=6 if seed % 3 == 0 else 1000), seed)


def test_an_offloaded_value_is_away_between_the_runs_that_say_so():
    graph, costs = chain()
    schedule = Schedule(tuple(range(8)), (Offload(0, leaves=3, returns=(6,)),))
    copies = [c for c in lifetimes(graph, schedule) if c.value == 0]
    assert copies == [Copy(0, 0, 2), FetchedCopy(0, 6, 7)]
    before = simulate(graph, costs, Schedule.keep_all(graph)).timeline_bytes
    after = simulate(graph, costs, schedule, LINK)
    assert [b - a for b, a in zip(before, after.timeline_bytes, strict=True)] == [0, 0, 0, 4, 4, 4, 0, 0]
    assert after.host_bytes == 4 and after.recompute_seconds == 0


@pytest.mark.parametrize(
    ("offloads", "stall", "transfer"),
    [
        ([Offload(0, 6, (7,))], 4.0, 8.0),  # sent from 1 to 5; fetched from 7 to 11, wanted at 7
        ([Offload(0, 2, (3,))], 3.0, 8.0),  # 3 before it leaves, and the fetching hides
        # The second is sent after the first, and fetched before it: 2 engines, 4 transfers. Sent until 5 and 9.
        # Position 5 waits from 5 to 9; v1 comes from 9 to 13, v0, asked for at 10, to 17. Position 6 reads v1 at 13
        # instead of 10; position 7 reads v0 at 17 instead of 14.
        ([Offload(0, 5, (6,)), Offload(1, 5, (5,))], 10.0, 16.0),
    ],
)
def test_waiting_is_what_does_not_hide(offloads: list[Offload], stall: float, transfer: float):
    graph, costs = chain()
    evaluation = simulate(graph, costs, Schedule(tuple(range(8)), tuple(offloads)), LINK)
    assert (evaluation.stall_seconds, evaluation.transfer_seconds) == (stall, transfer)
    assert evaluation.seconds == 8.0 + stall == 8.0 + evaluation.added_seconds


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        (Offload(0, 1, (6,)), "is away"),
        (Offload(0, 0, (6,)), "before it is made"),
        (Offload(0, 5, (3,)), "out of order"),
        (Offload(0, 3, ()), "out of order"),
        (Offload(0, 3, (8,)), "after the end"),
        (Offload(3, 5, (6,)), "fetched and not read"),
        (Offload(0, 3, (5, 6)), "fetched twice"),
    ],
)
def test_an_offload_that_cannot_be_carried_out_is_refused(offload: Offload, said: str):
    graph, costs = chain()
    with pytest.raises(errors.ScheduleError, match=said):
        simulate(graph, costs, Schedule(tuple(range(8)), (offload,)), LINK)


def test_without_a_host_nothing_can_be_offloaded():
    graph, costs = chain()
    with pytest.raises(errors.ScheduleError, match="no host"):
        simulate(graph, costs, Schedule(tuple(range(8)), (Offload(0, 3, (6,)),)))


@settings(max_examples=120, deadline=None)
@example(seed=1256, share=0.9, rate=1.0, free=0)  # two come back at once, and the second in the graph is read first
@given(
    seed=st.integers(0, 10_000), share=st.sampled_from([0.5, 0.6, 0.7, 0.75, 0.85, 0.9]),
    rate=st.sampled_from([0.3, 1.0, 5.0]), free=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_bytes_are_those_of_a_second_count(seed: int, share: float, rate: float, free: int):
    """Carry a mixed schedule out on a set of what is there, value by value."""
    problem = posed(share, replace(LINK, bytes_per_second=rate), seed)
    asked = OffloadReduction(problem, problem.host.movable(problem.graph), free)
    try:
        found = solvers.get("sqrt").solve(asked.problem, effort=solvers.SolveLimits())
    except errors.InfeasibleBudgetError:
        return
    tight = asked.invert(found.schedule)
    assert asked.invert(Schedule(tuple(asked.order_from(steps_of(problem.graph, tight))))) == tight
    wide = widened(problem, tight)
    less = exchanged(problem, wide, Clock(10.0, counts_work=True), lambda tried: len(tried.order) % 3 > 0)
    before, after, last = map(problem.evaluate, (tight, wide, less))
    assert less == wide or (len(less.order) % 3 and last.added_seconds < after.added_seconds)
    for schedule, evaluation in ((tight, before), (wide, after), (less, last)):
        assert list(evaluation.timeline_bytes) == walk(problem, schedule)
        assert 0 <= evaluation.stall_seconds <= evaluation.transfer_seconds + 1e-9
        assert evaluation.peak_bytes <= problem.budget_bytes
    assert after.peak_bytes <= max(before.peak_bytes, problem.budget_bytes)
    assert after.stall_seconds <= before.stall_seconds + 1e-9


@pytest.mark.parametrize(
    "seed",
    # 60: two at once; 158: fetched in order of reading; 797: no waiting for what leaves beside a return;
    # 1454: something runs again right after what is sent is made.
    tiered([*range(24), 60, 158, 797, 1454], quick=[*range(4), 60, 158]),
)
def test_the_mixed_solver_equals_brute_force_and_its_bound_is_one(seed: int):
    problem = posed_by(seed)
    best = cheapest_offloading(problem)
    if best is None:
        with pytest.raises(errors.InfeasibleBudgetError):
            solvers.solve(problem, time_limit_seconds=3, deterministic=True)
        return
    found = solvers.solve(problem, time_limit_seconds=3, deterministic=True)
    assert found.lower_bound_seconds <= best + 1e-9
    assert found.added_seconds == pytest.approx(best, abs=1e-9)
    for step in range(len(problem.graph.operations)):
        cut = build(problem, step)
        assert cut is not None
        for relax in (True, False):
            assert minimise(cut.model, relax=relax).bound * cut.scale <= best + 1e-6


def test_a_budget_that_is_proven_too_small_is_told_one_at_which_offload_does():
    graph, costs = transformer(2)
    graph = without_recompute(graph)
    problem = Problem(graph=graph, costs=costs, budget_bytes=0, host=replace(LINK, budget_bytes=2**40))
    whole_bytes = problem.baseline.peak_bytes
    with pytest.raises(errors.InfeasibleBudgetError) as caught:
        solvers.solve(replace(problem, budget_bytes=whole_bytes // 5), time_limit_seconds=1)
    known_bytes = caught.value.minimum_feasible_peak_bytes - graph.total_static_bytes
    assert caught.value.is_proven and known_bytes < whole_bytes
    assert solvers.solve(replace(problem, budget_bytes=known_bytes), time_limit_seconds=1).peak_bytes <= known_bytes


def test_a_budget_below_what_is_resident_is_told_one_for_which_the_host_has_memory():
    graph, costs = transformer(2)
    problem = Problem(graph=graph, costs=costs, budget_bytes=0, host=replace(LINK, budget_bytes=2**20))
    error = too_little(problem, Search(time_limit_seconds=1), "what is resident")
    found = problem.evaluate(error.lowest)
    assert found.peak_bytes == error.minimum_feasible_peak_bytes - graph.total_static_bytes
    assert found.host_bytes <= 2**20


def test_what_one_of_many_solves_does_not_use_is_left_to_the_others():
    """Counted work: solves that end early once used up the whole effort, and waiting that could be hidden was left."""
    problem = replace(problem_at(transformer(2), 0.45), host=Host(bytes_per_second=1e9, budget_bytes=2**40))
    assert solvers.solve(problem, time_limit_seconds=4, deterministic=True).added_seconds == 0


def test_what_a_neighbour_offloads_is_tried_before_all_else_and_with_room_for_transfers():
    problem = replace(problem_at(transformer(2), 0.45), host=Host(bytes_per_second=1e9, budget_bytes=2**40))
    near = lowest_offloading(problem, problem.host.movable(problem.graph))
    effort = solvers.SolveLimits(time_limit_seconds=1e-4, deterministic=True)  # enough for what is tried first, only
    assert AutoSolver(near).solve(problem, effort=effort).added_seconds == 0 < problem.evaluate(near).added_seconds


@pytest.mark.parametrize("rate", tiered([1e8, 1e9], slow=[1e9]))
def test_both_together_are_no_worse_than_either_alone(rate: float):
    problem = problem_at(transformer(2), 0.45)
    host = Host(bytes_per_second=rate, budget_bytes=2**40)
    fixed = without_recompute(problem.graph)
    alone = [
        solvers.solve(one, time_limit_seconds=2).added_seconds
        for one in (problem, replace(problem, graph=fixed, host=host))
    ]
    both = solvers.solve(replace(problem, host=host), time_limit_seconds=2)
    near_seconds = 2e-3 * problem.baseline.seconds  # what two seconds of search on a busy machine leave open
    assert both.added_seconds <= min(alone) + near_seconds
    assert rate > 1e8 or both.added_seconds < 0.9 * min(alone), "what does not hide is recomputed, and no more"
    assert both.added_seconds - both.lower_bound_seconds < 0.02 * problem.baseline.seconds


def test_budgets_below_what_recompute_can_reach_are_kept():
    graph, costs = transformer(2)
    graph, host = without_recompute(graph), Host(bytes_per_second=1e10, budget_bytes=2**40)
    problem = problem_at((graph, costs), 2 / 3)
    with pytest.raises(errors.InfeasibleBudgetError):
        solvers.solve(problem, time_limit_seconds=2)
    found = solvers.solve(replace(problem, host=host), time_limit_seconds=2)
    assert found.peak_bytes <= problem.budget_bytes and found.schedule.offloads
    assert lowest_peak(replace(problem, host=host)).proven_peak_bytes <= found.peak_bytes
    with pytest.raises(errors.HostBudgetError) as small:
        solvers.solve(replace(problem, host=replace(host, budget_bytes=2**20)), time_limit_seconds=2)
    enough = replace(host, budget_bytes=small.value.host_budget_bytes)
    assert solvers.solve(replace(problem, host=enough), time_limit_seconds=2).schedule.offloads
    with pytest.raises(NoPlanFitsError, match=rf"{enough.budget_bytes} bytes.*--host-budget"):
        small = replace(host, budget_bytes=2**20)
        make_plan(graph, costs, activation_budget=problem.budget_bytes, host=small, time_limit_seconds=2)


def test_solvers_that_only_recompute_refuse():
    with pytest.raises(errors.UsageError, match="'ilp' does not offload; those that do are 'auto', 'offload_search'"):
        solvers.solve(posed(0.7), "ilp")


def test_what_a_plan_offloads_survives_its_file_and_shows_in_the_report():
    graph, costs = transformer(2)
    host = Host(bytes_per_second=2e9, budget_bytes=2**30)
    plan = make_plan(graph, costs, activation_budget="40%", host=host, time_limit_seconds=1)
    assert plan.offloading is not None and plan.offloading.values
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan and again.schedule_for(graph) == plan.schedule_for(graph)
    evaluation = simulate(graph, costs, again.schedule_for(graph), host)
    assert evaluation.peak_bytes + graph.total_static_bytes == plan.peak_bytes
    assert plan.overhead == pytest.approx(evaluation.added_seconds / plan.baseline_step_seconds)
    assert sum(plan.anatomy.values()) == plan.peak_bytes
    assert sum(layer.offloaded_bytes for layer in plan.placement) == plan.offloading.host_bytes
    text = printed(render, plan, width=100, full=True)
    assert "offloaded" in text.splitlines()[0] and "MiB offloaded; " in text and "in the host's memory" in text
    with pytest.raises(errors.PlanMismatchError, match="offloads output"):
        other = transformer(1)[0]
        with_offloads(other, Schedule.keep_all(other), plan.offloading)


def test_a_device_without_a_link_to_the_host_is_refused(tmp_path):
    spec = replace(cost_models.device("h100"), host_link_bytes_per_second=0.0)
    with pytest.raises(errors.UsageError, match="no figure for its link"):
        host_of(spec)
    save(spec, tmp_path / "device.json")
    assert load(tmp_path / "device.json") == spec
    assert host_of(cost_models.device("h100"), "8GiB").budget_bytes == 8 * 2**30


def perceptrons() -> Stack:
    return Stack(block=lambda: torch.nn.Sequential(perceptron(128), torch.nn.Dropout(0.2)))


def convolutions() -> torch.nn.Module:
    parts = ((torch.nn.Conv2d(n, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()) for n in (3, 16, 16))
    return torch.nn.Sequential(*(torch.nn.Sequential(*part) for part in parts))


class ChannelsLast(Layers, layers=convolutions):
    """Convolutions with BatchNorm, whose activations in channels-last order are not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(memory_format=torch.channels_last)).flatten(1).mean(0).square().sum()


def test_host_memory_is_given_back_when_no_backward_comes():
    module, pool = perceptrons(), host_copies.Pool()
    host_copies.POOL = pool
    planner.auto_wrap(module, **grouped(activation_budget="50%", offload=True, deterministic=True))
    loss = module(rows(1024, 128))
    assert pool.in_use_bytes == planner.plan_of(module).offloading.host_bytes > 0
    del loss
    assert pool.in_use_bytes == 0


def test_hooks_do_not_get_what_waits_on_the_host():
    module, x = perceptrons(), rows(1024, 128)
    expected = train(copy.deepcopy(module), (x,))
    planner.auto_wrap(module, **grouped(activation_budget="50%", offload=True, deterministic=True))
    module(x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        assert_same(expected, train(module, (x,)))
    assert planner.plan_of(module).offloading.host_bytes > 0


def image_block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, bias=False), torch.nn.BatchNorm2d(16), torch.nn.GELU())


class Images(Layers, layers=lambda: torch.nn.Sequential(*(image_block() for _ in range(6)))):
    """Equal blocks of convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is called while it holds")
@pytest.mark.parametrize("runtime", ["inductor", "inductor_blocks"])
@pytest.mark.parametrize(("model", "x", "share"), [(Transformer, SEQUENCES, "75%"), (Images, images(8), "90%")])
def test_compiled_code_offloads(runtime: str, model: Any, x: torch.Tensor, share: str):
    asked = {"offload": True, "offload_at_least": 1, "time_limit_seconds": 1, "deterministic": True}
    built = model().double()
    plan = planner.plan(built, x.double(), **grouped(activation_budget=share, runtime=runtime, **asked))
    plain, wrapped = beside(built, plan=planner.Plan.from_json(plan.to_json()))
    for _ in range(2):
        assert_same(train(plain, x.double()), train(wrapped, x.double()), 1e-6)
    for _ in range(2):
        one_step(plain, x.double()), one_step(wrapped, x.double())
    assert_same(*({name: p.grad for name, p in one.named_parameters()} for one in (plain, wrapped)), 1e-6)
    with torch.no_grad():
        assert bool(wrapped(x.double()))
    hold_peak(wrapped, x.double())
    assert planner.plan_of(wrapped).offloading.values == plan.offloading.values != ()


@pytest.mark.parametrize("refusal", ["system", "driver"])
def test_no_host_memory_to_be_had_is_said(monkeypatch: pytest.MonkeyPatch, refusal: str):
    def map_nothing(*_: object) -> None:
        raise OSError("out of memory")

    if refusal == "system":
        monkeypatch.setattr(host_copies.mmap, "mmap", map_nothing)
    else:
        driver = SimpleNamespace(cudaHostRegister=lambda *_: 2)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(errors.RuntimeUnsupportedError, match=r"host memory is left .* 1\.0 MiB .*host_budget"):
        host_copies.Pool().take(1 << 20, torch.uint8, pinned=refusal == "driver")


def test_the_runtime_that_runs_eager_code_refuses():
    with pytest.raises(errors.UsageError, match="the runtime 'modules' does not offload: use another"):
        planner.plan(perceptrons(), rows(8, 128), budget="90%", offload=True, runtime="modules")
