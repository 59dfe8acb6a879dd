"""Values that wait on the host as bfloat16: what may be rounded, what that takes, and how far gradients are off."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cli
import planner
from planner import solvers
from planner.capture.memory import record
from planner.capture.state_restore import RandomStates
from planner.common.options import grouped
from planner.diagnose.verification import ROUNDED, StepResult, compare
from planner.errors import PlanMismatchError, UsageError
from planner.ir.graph import named_by
from planner.ir.host import Host, graph_for
from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule
from planner.ir.simulator import simulate
from planner.plans.from_solution import plan_from_solution
from planner.report import render
from planner.rewrite import host_copies
from tests.example_graphs import transformer
from tests.models import images, rows
from tests.planned import by_hand, make_plan, printed
from tests.runtimes.steps import hold_peak, peak_of, wrap_and_hold
from tests.runtimes.test_offload import ChannelsLast, chain, perceptrons, roundable

LINK = Host(bytes_per_second=1.0, budget_bytes=1000, least_bytes=1, lossy=True)


def test_a_rounded_value_takes_half_of_the_host_and_of_the_link():
    graph, costs = chain()
    exact, lossy = (Schedule(tuple(range(8)), (Offload(0, 6, (7,), lossy),)) for lossy in (False, True))
    before, after = (simulate(graph, costs, schedule, LINK) for schedule in (exact, lossy))
    assert (before.host_bytes, before.transfer_seconds, before.stall_seconds) == (4, 8.0, 4.0)
    assert (after.host_bytes, after.transfer_seconds, after.stall_seconds) == (2, 4.0, 2.0)


def test_a_piece_counts_where_it_is_more_than_what_is_gone_or_not_there_yet():
    """Of 4 bytes, 2 are a piece: sent after the run of ``o0``, fetched before that of ``o7``, which makes 4."""
    graph, costs = chain()
    exact, lossy = (Schedule(tuple(range(8)), (Offload(0, 3, (7,), lossy),)) for lossy in (False, True))
    before, after = (simulate(graph, costs, schedule, LINK).timeline_bytes for schedule in (exact, lossy))
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 0, 0, 0, 0, 0, 0, 0]


def test_a_lossy_plan_offloads_for_half_and_says_so_everywhere():
    graph, costs = transformer(2)
    host = Host(bytes_per_second=2e9, budget_bytes=2**30, lossy=True)
    plan = make_plan(roundable(graph), costs, activation_budget="40%", host=host, time_limit_seconds=1)
    offloading = plan.offloading
    assert offloading is not None and offloading.lossy and offloading.rounded == len(offloading.values) > 0
    assert 2 * offloading.host_bytes == sum(value.size_bytes for value in offloading.values)
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan and again.schedule_for(roundable(graph)) == plan.schedule_for(roundable(graph))
    assert again.report()["offload"]["lossy"] is True and again.report()["offload"]["values"][0]["lossy"] is True
    assert "lossy-offload" in [warning.rule for warning in plan.warnings]
    first, rest = printed(render, plan, width=100, full=True).split("\n", 1)
    assert "LOSSY: rounded to bfloat16, gradients are not bit-equal" in first and "at half the size" in rest
    with pytest.raises(PlanMismatchError, match="must stay exact"):
        plan.schedule_for(graph)
    exact = make_plan(graph, costs, activation_budget="40%", host=host, time_limit_seconds=1)
    assert exact.offloading.rounded == 0 and "LOSSY" not in exact.to_json()


def test_a_lossy_plan_is_no_dearer_than_an_exact_one():
    graph, costs = transformer(2)
    problem = Problem(graph=roundable(graph), costs=costs, budget_bytes=0)
    problem = replace(problem, budget_bytes=problem.baseline.peak_bytes // 2)
    exact, lossy = (
        solvers.solve(replace(problem, host=replace(LINK, bytes_per_second=2e8, budget_bytes=2**40, lossy=lossy)),
                      time_limit_seconds=1, deterministic=True)
        for lossy in (False, True)
    )  # fmt: skip
    assert lossy.lower_bound_seconds <= exact.lower_bound_seconds + 1e-12
    assert lossy.added_seconds < exact.added_seconds


def test_what_decides_runs_once_where_values_are_rounded():
    graph, _ = transformer(1)
    operations = (replace(graph.operations[0], decides=True), *graph.operations[1:])
    graph = replace(graph, operations=operations)
    assert graph_for(graph, replace(LINK, lossy=False)) is graph is graph_for(graph, None)
    assert not graph_for(graph, LINK).operations[0].recomputable


# Which values of a model may be rounded.


class Everything(torch.nn.Module):
    """A mask, a table, a norm, a router, a maximum and a view as integers, beside plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.route, self.up, self.down = (torch.nn.Linear(*sizes) for sizes in ((32, 4), (32, 64), (64, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(x.shape[0]).float()[:, None].sin()
        mixed = self.norm(x * table)
        _, chosen = self.route(mixed).topk(2, dim=-1)
        wide = torch.relu(self.up(mixed)) * chosen.float().sum(-1, keepdim=True)
        high = self.down(wide)
        return (high.amax(-1) * high.double().mean(-1)).sum()


def test_what_must_stay_exact_does():
    graph = planner.study(Everything(), torch.randn(16, 32)).graph
    makers = [graph.operations[graph.producer[u]] for u, v in enumerate(graph.values) if v.roundable]
    rounded = {named_by(key)[1] for operation in makers for key in operation.keys}
    assert {operation.phase for operation in makers} == {"forward"}
    assert {"aten.native_layer_norm.default", "aten.relu.default"} <= rounded
    assert not rounded & {"aten.sin.default", "aten.topk.default", "aten.amax.default", "aten._to_copy.default"}
    names = [value.name for value in graph.values if value.roundable]
    assert "native_layer_norm.0" in names and "native_layer_norm.1" not in names and "native_layer_norm.2" not in names
    assert "relu" in names and "addmm_2" not in names, "its maximum is looked for in it again"
    deciding = {operation.target for operation in graph.operations if operation.decides}
    assert "aten.topk.default" in deciding, "it would pick others when run again"


def test_other_types_are_sent_as_they_are():
    asked = {"activation_budget": "60%", "offload": True, "offload_at_least": 1, "offload_lossy": True}
    asked["time_limit_seconds"] = 1
    studied = planner.study(perceptrons().bfloat16(), rows(256, 128).bfloat16()).plan(**grouped(**asked))
    ran = wrap_and_hold(perceptrons().double(), rows(256, 128).double(), **asked)
    for plan in (studied, ran):
        assert plan.offloading.values and not plan.offloading.rounded
        assert "lossy-offload" not in [warning.rule for warning in plan.warnings]


# Copies.


def test_copies_are_rounded_piece_by_piece_and_stay_finite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 64)
    numbers = torch.randn(100, 7).t()
    numbers[0, :3] = torch.tensor([torch.finfo(torch.float32).min, torch.nan, torch.inf])
    place = host_copies.offload(numbers, rounded=True)
    assert place.numel() == 2 * numbers.numel()
    back = host_copies.wait_reload(host_copies.reload(host_copies.wait_offload(place, numbers)), place)
    assert back.stride() == numbers.stride() and back.dtype is torch.float32
    wanted = numbers.to(torch.bfloat16).float().clamp(*(torch.finfo(torch.bfloat16).max * s for s in (-1, 1)))
    assert torch.equal(back.nan_to_num(), wanted.nan_to_num()) and back[0, 1].isnan() and back[0, 0].isfinite()


@pytest.mark.parametrize(
    ("build", "x", "share"),
    [
        (perceptrons, rows(1024, 128), "48%"),
        pytest.param(ChannelsLast, images(8, 3, 64), "60%", marks=pytest.mark.slow),
    ],
)
def test_a_lossy_step_takes_the_bytes_that_were_predicted_and_is_a_little_off(build, x, share):
    module = build()
    asked = {"activation_budget": share, "offload": True, "offload_lossy": True, "time_limit_seconds": 1}
    plan = planner.plan(module, x, **grouped(compare=False, **asked))
    assert plan.offloading is not None and plan.offloading.rounded
    plan = planner.Plan.from_json(plan.to_json())
    found = planner.verify(module, x, plan, timed_steps=1)
    assert found.agrees and not found.exact and found.loss_equal and found.buffers_equal
    assert 1e-5 < found.rounding_error < 0.01 and found.tolerance == ROUNDED
    text = printed(render, replace(plan, verification=found), width=300)
    assert f"off by up to {found.rounding_error:.2g} of their length" in text
    planner.auto_wrap(module, budget=plan)
    module(x).backward()
    hold_peak(module, x, rounded=True)
    assert planner.plan_of(module).offloading == plan.offloading


class Wide(torch.nn.Module):
    """What it makes is large, and what is made of that small: rounding it is where its peak is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 2048), torch.nn.Linear(2048, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).square().mean()


@pytest.mark.parametrize(("model", "seeds"), [(Wide, (5, 7)), (perceptrons, (73,))])
def test_pieces_are_in_the_measured_peak(model: Callable[[], torch.nn.Module], seeds: tuple[int, ...]):
    """Carry out offloads that nobody would plan."""
    module, x = model(), torch.randn(512, 64 if model is Wide else 128)
    study = planner.study(module, x)
    graph, host = study.graph, Host(bytes_per_second=1e9, budget_bytes=2**40, least_bytes=1, lossy=True)
    made = 0
    for seed in seeds:
        draw = random.Random(seed)
        movable = host.movable(graph)
        offloads = []
        for u in sorted(draw.sample(movable, min(len(movable), draw.randint(2, 5)))):
            uses = [graph.producer[u], *graph.readers[u]]
            leaves = draw.randint(uses[-2] + 1, uses[-1])
            offloads.append(Offload(u, leaves, (draw.randint(leaves, uses[-1]),), host.rounds(graph.values[u])))
        schedule = Schedule(tuple(range(len(graph.operations))), tuple(offloads))
        problem = replace(study.problem(), host=host)
        found = problem.evaluate(schedule)
        exact = replace(schedule, offloads=tuple(replace(offload, lossy=False) for offload in offloads))
        made += found.peak_bytes > problem.evaluate(exact).peak_bytes
        around = {"origin": study.origin, "static_memory": study.static_memory, "compare": False}
        problem = replace(problem, budget_bytes=found.peak_bytes)
        plan = plan_from_solution(problem, by_hand(problem, schedule), **around)
        assert sum(plan.anatomy.values()) == plan.peak_bytes
        planner.auto_wrap(module, budget=plan)
        module(x).backward()
        module.zero_grad()
        assert planner.plan_of(module).offloading.values == plan.offloading.values
        with record() as recording:
            module(x).backward()
        assert peak_of(recording) == found.peak_bytes
        module.zero_grad()
    assert made, "none of the peaks was one of pieces"


def test_a_router_and_a_maximum_work_on_rounded_values():
    torch.manual_seed(0)
    module, x = Everything(), torch.randn(64, 32)
    asked = {"offload": True, "offload_at_least": 1, "offload_lossy": True, "time_limit_seconds": 1}
    plan = planner.plan(module, x, **grouped(activation_budget="70%", compare=False, **asked))
    assert plan.offloading.rounded
    found = planner.verify(module, x, plan, timed_steps=1)
    assert found.agrees and 0 < found.rounding_error < 0.02


def test_what_is_far_off_does_not_pass_for_rounding():
    def step(*gradient: float) -> StepResult:
        return StepResult(
            loss=(), gradients={"w": torch.tensor(gradient).bfloat16()}, buffers={}, random_states=RandomStates()
        )

    near, far, broken = step(1.02, 2.0), step(1.5, 2.0), step(float("nan"), 2.0)
    assert not compare(step(1.0, 2.0), near, tolerance=ROUNDED, in_roundings=False)
    for other in (far, broken):
        assert compare(step(1.0, 2.0), other, tolerance=ROUNDED, in_roundings=False)


# What is typed.


def test_rounding_is_refused_without_offload_and_by_other_runtimes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UsageError, match="give offload too"):
        planner.plan(perceptrons(), rows(8, 128), budget="90%", offload=planner.Offload(False, lossy=True))
    with pytest.raises(UsageError, match="give offload too"):
        planner.study(Wide(), torch.randn(8, 64)).plan(budget="90%", offload=planner.Offload(False, lossy=True))
    with pytest.raises(UsageError, match="only the runtime 'graph' rounds"):
        planner.plan(perceptrons(), rows(8, 128), budget="90%", offload=planner.Offload(lossy=True), runtime="modules")
    for command in (["plan", "gpt2", "--budget", "50%"], ["what-if", "gpt2"]):
        assert cli.main([*command, "--offload-lossy"]) == 2
        assert "--offload-lossy is for what is offloaded: give --offload too" in capsys.readouterr().err
