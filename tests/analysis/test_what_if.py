"""What-if: the curve is monotone and true, and its bounds hold."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import cli
from cost_models import devices
from planner.analysis.study import Study
from planner.analysis.trade_off import axes as sizes
from planner.analysis.trade_off.answers import RECOMPUTE_ALONE, Answers, methods_beside
from planner.analysis.trade_off.axes import Outcome, SizeAxis, SizeSearch, ask, on_devices
from planner.analysis.trade_off.curve import MORE_BYTES, CurveSweep
from planner.analysis.trade_off.ranges import check_budgets, parse_budgets, parse_sizes, spread
from planner.analysis.trade_off.types import TradeOffCurve, TradeOffPoint, find_knee
from planner.common.limits import Clock
from planner.common.options import Offload, Search
from planner.errors import ClaimMismatchError, UsageError
from planner.ir.host import Host
from planner.ir.simulator import simulate
from planner.plans.comparison import cheapest_within
from planner.plans.plan import NoPlanFitsError
from planner.report.what_if import render as render_what_if
from planner.solving.incumbent import Incumbent
from tests.example_graphs import transformer
from tests.oracle import cheapest, random_graph
from tests.orders import branches
from tests.planned import printed, study_of, without_recompute

QUICK = Search(time_limit_seconds=0.2, deterministic=True)


def traced(study: Study, solver: str = "auto", **options: Any) -> CurveSweep:
    """Trace a curve to its end."""
    tracing = CurveSweep(study, dataclasses.replace(QUICK, solver=solver), **options)
    tracing.run()
    return tracing


@pytest.fixture(scope="module")
def toy() -> CurveSweep:
    """Trace the curve of a small transformer, with a budget that is asked about."""
    return traced(study_of(*transformer(3)), points=7, asked="70%")


def assert_monotone(points: tuple[TradeOffPoint, ...]) -> None:
    """Hold that more memory costs nothing: neither overhead nor bound rises, and no plan is lost."""
    for before, after in pairwise(points):
        assert before.budget_bytes < after.budget_bytes
        if before.overhead is None:
            continue
        assert after.overhead is not None and after.overhead <= before.overhead
        assert after.lower_bound_overhead <= before.lower_bound_overhead


# The curve.


def test_the_curve_goes_from_the_smallest_peak_to_none_needed(toy: CurveSweep) -> None:
    curve = toy.curve()
    assert len(curve.points) == 7 and curve.is_complete
    assert curve.points[0].budget_bytes == curve.minimum_feasible_peak_bytes
    assert curve.points[-1].budget_bytes == curve.baseline_peak_bytes
    assert curve.points[-1].overhead == 0.0 and curve.points[0].overhead > 0.0
    assert_monotone(curve.points)
    assert curve.asked is not None and curve.asked.budget_bytes == int(0.7 * curve.baseline_peak_bytes)
    assert curve.asked_more is not None and curve.asked_more.budget_bytes == curve.asked.budget_bytes + MORE_BYTES
    assert curve.asked_more.overhead == 0  # the toy needs less than 1 GiB
    assert_monotone((*curve.points, curve.asked_more))


def test_every_point_is_what_its_plan_simulates_to(toy: CurveSweep) -> None:
    graph, costs = toy.study.graph, toy.study.costs
    step_seconds = sum(cost.seconds for cost in costs)
    for point in toy.curve().points:
        best = cheapest_within(point.budget_bytes, toy.found)
        assert best is not None
        evaluation = simulate(graph, costs, best.schedule)
        assert point.predicted_peak_bytes == evaluation.peak_bytes + sum(graph.static_bytes.values())
        assert point.predicted_peak_bytes <= point.budget_bytes
        assert point.overhead == pytest.approx((evaluation.seconds - step_seconds) / step_seconds, abs=1e-12)
        assert point.lower_bound_overhead <= point.overhead
        assert (point.status == "optimal") == (point.lower_bound_overhead == pytest.approx(point.overhead, rel=1e-9))


@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold_against_brute_force(seed: int) -> None:
    graph, costs = random_graph(seed)
    tracing = traced(study_of(graph, costs), budgets="1..24", points=24)
    step_seconds = sum(cost.seconds for cost in costs)
    points = tracing.curve().points
    assert_monotone(points)
    for point in points:
        problem = dataclasses.replace(tracing.study.problem(), budget_bytes=point.budget_bytes)
        best = cheapest(problem)
        if best is None:
            assert point.overhead is None and point.status == "infeasible"
        else:
            assert point.overhead is not None, "a plan exists and was not found"
            assert point.lower_bound_overhead * step_seconds <= best[0] + 1e-6
            assert point.overhead * step_seconds >= best[0] - 1e-9
            if point.status == "optimal":
                assert point.overhead * step_seconds == pytest.approx(best[0])


def test_counting_work_gives_the_same_curve_every_time(toy: CurveSweep) -> None:
    assert traced(toy.study, points=7, asked="70%").curve() == toy.curve()


def test_a_wrong_proof_is_not_hidden(toy: CurveSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = CurveSweep(toy.study, QUICK, points=2)

    def wrong(self: Study, incumbent: Incumbent, **_: Any) -> None:
        raise incumbent.infeasible(proven=True)

    monkeypatch.setattr(Study, "improve", wrong)
    with pytest.raises(ClaimMismatchError, match="no plan keeps"):
        tracing.run()


def test_budgets_below_the_floor_are_there_without_a_plan(toy: CurveSweep) -> None:
    tracing = traced(toy.study, budgets="20%,100%,110%", asked="10%")
    below, at, above = tracing.curve().points
    assert below == TradeOffPoint(budget_bytes=below.budget_bytes) and below.status == "infeasible"
    assert (at.overhead, above.overhead) == (0.0, 0.0)
    report = tracing.curve().report()
    assert report["points"][0]["overhead"] is None and report["asked"]["overhead"] is None


def test_the_optimizers_step_must_fit_too() -> None:
    graph, costs = transformer(3)
    plain = CurveSweep(study_of(graph, costs), QUICK)
    needed = plain.top_bytes - 2**20 - plain.optimizer_bytes
    tracing = traced(study_of(graph, costs, optimizer_step_bytes=needed), points=4)
    curve = tracing.curve()
    assert curve.points[0].budget_bytes == curve.minimum_feasible_peak_bytes == plain.top_bytes - 2**20
    assert traced(tracing.study, budgets=f"{plain.top_bytes - 2**21},100%").curve().points[0].overhead is None


def test_a_step_that_recompute_cannot_lower_is_one_point() -> None:
    graph, costs = random_graph(1)
    curve = traced(study_of(without_recompute(graph), costs), points=5).curve()
    assert [point.overhead for point in curve.points] == [0.0] and curve.knee is None


def test_neighbours_give_a_plan_and_a_bound(toy: CurveSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ends solved, and solvers that find nothing more, the middle still has both."""
    tracing = CurveSweep(toy.study, QUICK, points=3)
    low, middle, high = tracing.budgets
    tracing._solve(low, 0.2, Clock(1.0))
    tracing._solve(high, 0.2, Clock(1.0))
    monkeypatch.setattr(Study, "improve", lambda *_, **__: None)
    tracing._solve(middle, 0.2, Clock(1.0))
    curve = tracing.curve()
    assert curve.points[1].overhead == curve.points[0].overhead
    assert curve.points[1].lower_bound_overhead >= curve.points[2].lower_bound_overhead


@pytest.mark.parametrize(
    ("overheads", "knee"),
    [
        ((0.4, 0.1, 0.05, 0.0), 1),
        ((0.3, 0.2, 0.1, 0.0), None),  # straight
        ((0.3, 0.29, 0.28, 0.0), None),  # bent the other way
        ((None, 0.4, 0.1, 0.0, 0.0), 2),
        ((0.0, 0.0, 0.0), None),
        ((0.4, 0.0), None),
    ],
)
def test_the_knee(overheads: tuple[float | None, ...], knee: int | None) -> None:
    points = [TradeOffPoint(budget_bytes=10 * i, overhead=overhead) for i, overhead in enumerate(overheads)]
    found = find_knee(points)
    assert (found.budget_bytes if found else None) == (None if knee is None else 10 * knee)


HOST = Host(bytes_per_second=2e9, budget_bytes=2**30)


def test_with_offload_the_curve_lies_below_that_of_recompute_alone(toy: CurveSweep) -> None:
    tracing = traced(toy.study, points=5, host=HOST)
    methods = methods_beside(tracing, [RECOMPUTE_ALONE])
    (alone,) = methods
    curve = tracing.curve()
    assert_monotone(curve.points)
    step_seconds = sum(cost.seconds for cost in toy.study.costs)
    for point, other in zip(curve.points, alone.points, strict=True):
        best = cheapest_within(point.budget_bytes, tracing.found)
        assert best is not None and point.budget_bytes == other.budget_bytes and not other.host_bytes
        evaluation = simulate(toy.study.graph, toy.study.costs, best.schedule, HOST)
        assert evaluation.peak_bytes + toy.static_bytes == point.predicted_peak_bytes <= point.budget_bytes
        assert evaluation.added_seconds / step_seconds == pytest.approx(point.overhead, abs=1e-12)
        assert point.host_bytes == evaluation.host_bytes <= HOST.budget_bytes
        assert point.lower_bound_overhead <= point.overhead
        assert other.overhead is None or point.overhead <= other.overhead + 1e-3
    low, _, middle, *_ = curve.points
    assert curve.minimum_feasible_peak_bytes < toy.curve().minimum_feasible_peak_bytes, "recompute cannot reach it"
    assert low.host_bytes and middle.host_bytes and curve.knee is not None
    assert middle.overhead < 0.5 * alone.points[2].overhead
    report = Answers(curve=curve, methods=methods).report()
    assert report["host_budget_bytes"] == HOST.budget_bytes
    assert report["solvers"][0]["name"] == "recompute" and report["points"][0]["host_bytes"] == low.host_bytes
    text = printed(render_what_if, Answers(curve=curve, methods=methods), width=100)
    assert "may wait in the host's memory" in " ".join(text.split())


def test_a_solver_that_only_recomputes_traces_no_curve_with_offload(toy: CurveSweep) -> None:
    with pytest.raises(UsageError, match="'ilp' does not offload"):
        traced(toy.study, points=2, host=HOST, solver="ilp")


# What is written.


def test_json_has_every_field_of_the_points(toy: CurveSweep) -> None:
    curve = toy.curve()
    report = json.loads(json.dumps(Answers(curve=curve).report(), allow_nan=False))
    assert report["points"] == [dataclasses.asdict(point) for point in curve.points]
    assert report["knee_budget_bytes"] in [point["budget_bytes"] for point in report["points"]]


def fixed_curve() -> TradeOffCurve:
    """Return a curve whose numbers are those of no solver."""
    gib = 2**30
    points = [(4, None, None, ""), (6, 0.302, 0.29, "search"), (8, 0.081, 0.0809, "ilp"), (10, 0.02, 0.02, "ilp"),
              (12, 0.0, 0.0, "auto")]  # fmt: skip
    made = [
        TradeOffPoint(
            budget_bytes=budget * gib,
            predicted_peak_bytes=budget * gib - 2**20,
            overhead=overhead,
            lower_bound_overhead=bound,
            solver=solver,
            status="optimal" if overhead == bound else "feasible",
        )
        if overhead is not None
        else TradeOffPoint(budget_bytes=budget * gib)
        for budget, overhead, bound, solver in points
    ]
    asked = dataclasses.replace(made[2], budget_bytes=int(7.5 * gib), predicted_peak_bytes=int(7.4 * gib))
    more = dataclasses.replace(made[3], budget_bytes=int(8.5 * gib), overhead=0.06, lower_bound_overhead=0.05)
    return TradeOffCurve(
        model="toy", device="toy-device", cost_model="roofline", torch="2.13.0", baseline_peak_bytes=12 * gib,
        baseline_step_seconds=1.25, minimum_feasible_peak_bytes=int(5.2 * gib),
        proven_minimum_peak_bytes=5 * gib, points=tuple(made), asked=asked, asked_more=more,
    )  # fmt: skip


# Other axes.


def sized(unit_bytes: int = 2**20) -> Callable[[int], Study]:
    """Return a step whose activations and times grow with the batch, beside a launch time that does not."""
    asked: list[int] = []

    def study_at(size: int) -> Study:
        asked.append(size)
        graph, costs = transformer(2, unit_bytes=size * unit_bytes)
        return study_of(
            dataclasses.replace(graph, static_bytes={"parameters": 100 * unit_bytes}),
            tuple(dataclasses.replace(cost, seconds=1e-4 + cost.seconds * size) for cost in costs),
        )

    study_at.asked = asked  # type: ignore[attr-defined]
    return study_at


def search_sizes(text: str, study_at: Callable[[int], Study], budget_bytes: int, step: int = 1) -> SizeAxis:
    """Look for the largest size."""
    return SizeSearch(
        sizes=parse_sizes(text, what="batch sizes"),
        study_at=study_at,
        axis=SizeAxis(name="batch size", unit="samples", budget_bytes=budget_bytes),
        search=Search(time_limit_seconds=0.05, deterministic=True),
        step=step,
    ).run()


def test_the_largest_batch_is_found_with_few_captures() -> None:
    study_at = sized()
    whole = study_at(21).problem("70%").budget_bytes + 100 * 2**20
    study_at.asked.clear()
    axis = search_sizes("1..64", study_at, whole)
    largest = axis.largest
    assert largest is not None
    rows = {row.size: row for row in axis.rows}
    assert largest.size + 1 in rows and not rows[largest.size + 1].outcome.fits, "the next one was tried"
    assert study_at.asked[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert len(study_at.asked) == len(set(study_at.asked)) <= 7 + 6, "each once, and few to close in"
    for row in axis.rows:
        assert row.outcome.fits == (row.size <= largest.size)
        if row.outcome.fits:
            assert row.outcome.predicted_peak_bytes <= whole
            seconds = sum(cost.seconds for cost in sized()(row.size).costs) * (1 + row.outcome.overhead)
            assert row.per_second == pytest.approx(row.size / seconds)
    assert axis.best.per_second == max(row.per_second for row in axis.rows if row.per_second)


def least_bytes_bent(size: int) -> int:
    """Return what GPT-2 of 774M parameters needs: from a batch of 48 on, another plan takes less for each sample."""
    return int(3.1e9 + 0.8325e9 * size if size <= 48 else 43.06e9 + 0.288e9 * (size - 48))


@pytest.mark.parametrize(
    ("text", "least_bytes", "largest", "most"),
    [
        ("1..64", least_bytes_bent, 43, 3),
        ("1..4096", lambda size: 2 * int(size**2 * 2e3) + 10**9, 3090, 8),
        ("1..4096", lambda size: int(39.2e9) + (1 if size > 3001 else 0), 3001, 28),
    ],
)
def test_the_largest_size_is_closed_in_on_where_needs_do_not_follow_a_line(
    monkeypatch: pytest.MonkeyPatch, text: str, least_bytes: Callable[[int], int], largest: int, most: int
) -> None:
    asked: list[int] = []

    def answer(size: int, budget_bytes: int, *_: Any) -> Outcome:
        asked.append(size)
        need, fits = least_bytes(size), least_bytes(size) <= budget_bytes
        return Outcome(status="", minimum_feasible_peak_bytes=need, predicted_peak_bytes=need if fits else None)

    monkeypatch.setattr(sizes, "ask", answer)
    axis = search_sizes(text, lambda size: size, int(39.2e9))  # type: ignore[arg-type, return-value])
    assert axis.largest is not None and axis.largest.size == largest and len(asked) == len(set(asked))
    assert {largest, largest + 1} <= set(asked)
    assert len(asked) - asked.index(parse_sizes(text, what="").values[-1]) - 1 <= most


def test_listed_sizes_alone_are_tried_and_no_larger_one_than_the_first_that_fails() -> None:
    study_at = sized()
    budget = study_at(5).problem("100%").budget_bytes + 100 * 2**20
    study_at.asked.clear()
    axis = search_sizes("2,4,30,40", study_at, budget)
    assert study_at.asked == [2, 4, 30] and axis.largest.size == 4 and not axis.rows[-1].outcome.fits


@pytest.mark.parametrize("of", ["recompute", "offload", "order"])
def test_a_row_says_what_a_plan_with_all_beside_it_says(of: str) -> None:
    study = study_of(*(branches(depth=2) if of == "order" else transformer(2)))
    study, offload = dataclasses.replace(study, device=devices.device("h100")), Offload(of == "offload")
    search = dataclasses.replace(QUICK, time_limit_seconds=0.1)
    seen: set[str] = set()
    for share in (0.3, 0.6, 1.2):
        budget_bytes = int(share * study.whole_bytes)
        outcome = ask(study, budget_bytes, search, offload)
        try:
            plan = study.plan(budget_bytes, search=search, offload=offload)
        except NoPlanFitsError as error:
            assert not outcome.fits and outcome.minimum_feasible_peak_bytes == error.minimum_feasible_peak_bytes
            continue
        assert dataclasses.asdict(outcome) == {name: getattr(plan, of_plan) for name, of_plan in OF_PLANS.items()}
        offloads = plan.offloading is not None and plan.offloading.host_bytes > 0
        moved, again = bool(plan.order), plan.recompute_seconds > 0
        seen |= {name for name, did in (("order", moved), ("offload", offloads), ("recompute", again)) if did}
    assert of in seen


OF_PLANS = {f.name: f.name for f in dataclasses.fields(Outcome)} | {"predicted_peak_bytes": "peak_bytes"}


def test_coarse_steps_are_kept_and_nothing_may_fit() -> None:
    study_at = sized()
    budget = study_at(40).problem("100%").budget_bytes + 100 * 2**20
    axis = search_sizes("8..64", study_at, budget, step=8)
    assert all(row.size % 8 == 0 for row in axis.rows) and axis.largest.size % 8 == 0
    none = search_sizes("8..64", study_at, 101 * 2**20)
    assert none.largest is None and none.best is None and len(none.rows) == 1


def test_devices_fit_or_not() -> None:
    study = study_of(*transformer(3, unit_bytes=2**27))
    search = Search(time_limit_seconds=0.2)
    for row in on_devices(["rtx-4090", "h100"], lambda name: study, search, Offload(False)):
        report = row.report()
        assert report["overhead"] == row.outcome.overhead
        assert row.outcome.fits == (row.outcome.predicted_peak_bytes is not None)
        if row.memory_bytes >= row.baseline_peak_bytes:
            assert row.outcome.overhead == 0.0
    with pytest.raises(UsageError, match="did you mean h100"):
        on_devices(["h10"], lambda name: study, QUICK, Offload(False))


def test_other_ways_are_on_the_same_axes(toy: CurveSweep) -> None:
    found = methods_beside(toy, ["auto", "sqrt", "every-layer", "every-2"])
    methods = {method.name: method.points for method in found}
    curve = toy.curve()
    assert methods["auto"] == curve.points
    assert [point.budget_bytes for point in methods["sqrt"]] == [point.budget_bytes for point in curve.points]
    assert_monotone(methods["sqrt"])
    for best, other in zip(curve.points, methods["sqrt"], strict=True):
        assert other.overhead is None or other.overhead >= best.lower_bound_overhead - 1e-9
    (every,), (second,) = methods["every-layer"], methods["every-2"]
    assert every.budget_bytes < second.budget_bytes and every.overhead > second.overhead > 0
    with pytest.raises(UsageError, match="did you mean every-layer"):
        methods_beside(toy, ["every-layers"])


# What is typed.


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (partial(parse_sizes, what="batch sizes"), "64..1", "empty range"),
        (partial(parse_sizes, what="batch sizes"), "1..", "cannot read"),
        (partial(parse_sizes, what="batch sizes"), "0..4", "cannot read"),
        (partial(parse_sizes, what="batch sizes"), "1,,2", "cannot read"),
        (partial(parse_sizes, what="batch sizes"), "4,2", "out of order"),
        (partial(parse_sizes, what="batch sizes"), "2,2", "out of order"),
        (check_budgets, "16GiB..4GiB", "out of order"),
        (check_budgets, "4GiB,8GiB,6GiB", "out of order"),
        (check_budgets, "4GiB..4GiB..8GiB", "cannot read"),
        (check_budgets, "4GiB..", "cannot read"),
        (check_budgets, "4GiB,8XiB", "unknown unit"),
        (check_budgets, "", "cannot read"),
    ],
)
def test_what_makes_no_sense_is_refused(parse: Callable[[str], object], text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


def test_budgets_of_both_kinds_are_compared_once_the_peak_is_known() -> None:
    check_budgets("4GiB..50%")
    assert parse_budgets("1000,50%", whole_bytes=10_000, points=2) == (1000, 5000)
    with pytest.raises(UsageError, match="out of order"):
        parse_budgets("1000,50%", whole_bytes=1000, points=2)
    assert spread(0, 10, 3) == (0, 5, 10)


def test_a_model_without_that_size_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.commands._asked.load", lambda *_, **__: pytest.fail("the model was built"))
    (tmp_path / "own.py").write_text("def make(batch_size=4):\n    raise AssertionError\n", encoding="utf-8")
    assert cli.main(["what-if", f"{tmp_path}/own.py:make", "--seq-lens", "64..128", "--budget", "90%"]) == 2
    assert "takes no seq_len" in capsys.readouterr().err


# The whole command.


OWN = """
import torch

def make(batch_size=64):
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers), torch.randn(batch_size, 32), lambda output: output.square().mean()
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN, encoding="utf-8")
    curve = ["what-if", "own.py:make", "--points", "4", "--budget", "80%", "--time-limit", "1"]
    code = cli.main([*curve, "--batch-sizes", "64,96", "--solvers", "sqrt", "--html", "curve.html", "--json", "-"])
    output = capsys.readouterr()
    assert code == 0, output.err
    report = json.loads(output.out)
    assert len(report["points"]) == 4 and report["is_complete"]
    assert [way["name"] for way in report["solvers"]] == ["sqrt"]
    assert report["asked"]["budget_bytes"] == int(0.8 * report["baseline"]["peak_bytes"])
    page = Path("curve.html").read_text(encoding="utf-8")
    assert [int(b) for b in re.findall(r'data-budget="(\d+)"', page)] == [p["budget_bytes"] for p in report["points"]]
    assert "Other batch sizes" in page and "http:" not in page and "https:" not in page
    rows = report["batch_sizes"]["rows"]
    assert rows[0]["size"] == 64 and report["batch_sizes"]["unit"] == "samples"
