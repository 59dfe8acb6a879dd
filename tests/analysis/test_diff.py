"""What one plan does otherwise than another: figures held against the simulator, refusals, the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import cli
from planner.analysis.diff import Difference, diff
from planner.errors import UsageError
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.schedule import recompute_lazily
from planner.ir.simulator import lifetimes, simulate
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import Plan, PlanOrigin
from planner.report.diff import render as render_difference
from tests.example_graphs import Builder, transformer
from tests.planned import by_hand, make_plan, make_problem, printed

GRAPH, COSTS = transformer(4)
TURN = next(index for index, op in enumerate(GRAPH.operations) if op.phase is Phase.BACKWARD)


def plan_that_drops(
    *names: str, graph: TrainingGraph = GRAPH, costs: tuple[OperationCost, ...] = COSTS, inputs: str = "(8, 64) int64"
) -> Plan:
    """Return a plan that recomputes, from the end of the forward, what operations of these modules and names make."""
    turn = next(index for index, op in enumerate(graph.operations) if op.phase is Phase.BACKWARD)
    dropped = [
        value
        for op in graph.operations[:turn]
        for value in op.outputs
        if any(name in f"{op.module} {op.target}" for name in names)
    ]
    schedule = recompute_lazily(graph, {turn - 1: dropped})
    problem = make_problem(graph, costs, activation_budget=simulate(graph, costs, schedule).peak_bytes)
    fingerprint: dict[str, str | int] = {"model": "toys.Toy", "parameters": len(graph.operations), "inputs": inputs}
    origin = PlanOrigin(fingerprint=fingerprint, torch_version="2.13.0")
    return plan_from_solution(problem, by_hand(problem, schedule), origin=origin)


def two_plans() -> tuple[Plan, Plan]:
    return plan_that_drops("gelu", "h.0.ln_1"), plan_that_drops("gelu", "h.1.mlp.0", "h.2.mlp.0", "h.2.attn.c_attn")


plans = pytest.fixture(two_plans, scope="module")


def crossing_bytes(plan: Plan) -> dict[int, int]:
    """Return the bytes of each value whose first copy is held into the backward."""
    schedule = plan.schedule_for(GRAPH)
    begins = schedule.order.index(TURN - 1) + 1
    first = {copy.value: copy for copy in reversed(lifetimes(GRAPH, schedule))}
    return {
        value: GRAPH.values[value].size_bytes
        for value, copy in first.items()
        if GRAPH.operations[GRAPH.producer[value]].phase is Phase.FORWARD and copy.died >= begins
    }


def test_bytes_and_times_are_those_of_the_simulator(plans: tuple[Plan, Plan]) -> None:
    difference = diff(*plans)
    found = [simulate(GRAPH, COSTS, plan.schedule_for(GRAPH)) for plan in plans]
    assert difference.peak_bytes == found[1].peak_bytes - found[0].peak_bytes < 0
    assert difference.recompute_seconds == pytest.approx(found[1].recompute_seconds - found[0].recompute_seconds)
    assert sum(layer.added_seconds for layer in difference.layers) == pytest.approx(difference.recompute_seconds)
    again = [sum(map(len, plan.recomputations.values())) for plan in plans]
    assert sum(layer.recomputed for layer in difference.layers) == again[1] - again[0]

    kept = [crossing_bytes(plan) for plan in plans]
    moved_bytes = sum(
        (move.size_bytes or 0) * ((move.after == "kept") - (move.before == "kept")) for move in difference.moves
    )
    assert moved_bytes == sum(kept[1].values()) - sum(kept[0].values())
    assert sum(layer.saved_bytes for layer in difference.layers) == moved_bytes
    assert len([move for move in difference.moves if "kept" in (move.before, move.after)]) == len(
        kept[0].keys() ^ kept[1].keys()
    )


def test_what_moved_is_named(plans: tuple[Plan, Plan]) -> None:
    difference = diff(*plans)
    moved = {(move.module, move.output): (move.before, move.after) for move in difference.moves}
    assert moved["transformer.h.1.mlp.0", 0] == ("kept", "recomputed")
    assert moved["transformer.h.0.ln_1", 0] == ("recomputed", "kept")
    assert {layer.module for layer in difference.layers} == {f"transformer.h.{i}" for i in (0, 1, 2)}
    assert difference.moved_layers == 3 and difference.header.keys() == {"budget_bytes"}
    back = diff(*reversed(plans))
    assert {(m.operation, m.output, m.after, m.before) for m in back.moves} == {
        (m.operation, m.output, m.before, m.after) for m in difference.moves
    }


def shown(difference: Difference) -> str:
    return printed(render_difference, difference)


def test_the_answer_says_what_it_comes_to(plans: tuple[Plan, Plan]) -> None:
    a, b = plans
    lower = (a.peak_bytes - b.peak_bytes) / 2**20
    points = (b.overhead - a.overhead) * 100
    count = len(diff(a, b).moves)
    assert shown(diff(a, b)).splitlines()[0] == (
        f"B peaks {lower:.1f} MiB lower and pays +{points:.1f}% more step time; {count} values moved in 3 layers"
    )
    assert f"B peaks {lower:.1f} MiB higher and pays +{points:.1f}% less" in shown(diff(b, a))
    assert shown(diff(a, a)) == "B does what A does: no value moved\n"


def test_plans_without_a_table_are_compared_by_operation(plans: tuple[Plan, Plan]) -> None:
    a, b = plans[0], dataclasses.replace(plans[1], values=None)
    difference = diff(a, b)
    assert not difference.by_value and all(move.size_bytes is None for move in difference.moves)
    moved = {move.module: (move.before, move.after) for move in difference.moves}
    assert moved["transformer.h.1.mlp.0"] == ("run once", "run again")
    text = shown(difference)
    assert "operations moved" in text and "No table of values in B" in text


def test_what_waits_on_the_host_moves_too(plans: tuple[Plan, Plan]) -> None:
    host = Host(bytes_per_second=2e9, budget_bytes=2**30)
    a, b = (
        make_plan(GRAPH, COSTS, activation_budget="45%", host=one, time_limit_seconds=2, origin=PlanOrigin(
            fingerprint={"model": "toys.Toy", "parameters": len(GRAPH.operations)}))
        for one in (None, host)
    )  # fmt: skip
    difference = diff(a, b)
    assert b.offloading is not None and difference.host_bytes == b.offloading.host_bytes > 0
    moved = {(move.operation, move.output) for move in difference.moves if move.after == "offloaded"}
    assert moved == {(value.operation, value.output) for value in b.offloading.values}
    assert difference.added_seconds == pytest.approx(b.added_seconds - a.added_seconds)
    assert difference.header["host_budget_bytes"] == (0, 2**30)
    assert "offloads " in shown(difference).splitlines()[0]


def test_other_sizes_are_compared_by_operation(plans: tuple[Plan, Plan]) -> None:
    larger = plan_that_drops(
        "gelu", "h.3.mlp.0", graph=transformer(4, unit_bytes=2**21)[0], inputs="(16, 64) int64"
    )  # fmt: skip
    difference = diff(plans[0], larger)
    assert not difference.same_inputs and difference.header["inputs"] == ("(8, 64) int64", "(16, 64) int64")
    assert {move.size_bytes for move in difference.moves if move.module.endswith("mlp.0")} == {None}
    assert ("transformer.h.3.mlp.0", "kept", "recomputed") in {(m.module, m.before, m.after) for m in difference.moves}
    assert "inputs of other sizes" in shown(difference)


def test_a_deeper_model_is_compared_where_both_have_layers(plans: tuple[Plan, Plan]) -> None:
    graph, costs = transformer(6)
    difference = diff(plans[0], plan_that_drops("gelu", graph=graph, costs=costs))
    assert difference.only_in_b == ("transformer.h.4", "transformer.h.5") and not difference.only_in_a
    assert not any(move.block in difference.only_in_b for move in difference.moves)
    text = shown(difference)
    assert "Only in B, and left out of the tables: transformer.h 4-5 (x2)." in text
    assert "A +" in text.splitlines()[0], "overheads are of different steps"


def test_another_model_is_refused(plans: tuple[Plan, Plan]) -> None:
    b = Builder()
    x = b.add("aten.mm.default", [], [2**20], module="net.a")[0]
    y = b.add("aten.mm.default", [x], [2**20], module="net.b")[0]
    b.add("mm_backward", [y, x], [2**20], module="net.a", phase=Phase.BACKWARD, kind="gradient", retained=True)
    other = make_plan(b.graph("other", {}), tuple(b.costs), budget="100%")
    for pair in ((plans[0], other), (other, plans[0])):
        with pytest.raises(UsageError, match=r"different models, \w+ and \w+: .* 0 of 2 are in both") as caught:
            diff(*pair)
        assert "\n" not in str(caught.value)


def test_the_command(plans: tuple[Plan, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.plan", "b.plan")]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    assert cli.main(["diff", *paths]) == 0
    assert capsys.readouterr().out.startswith("B peaks ")
    assert cli.main(["diff", *paths, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peak_bytes"]["change"] == plans[1].peak_bytes - plans[0].peak_bytes
    assert len(report["moves"]) == len(diff(*plans).moves) and report["moves_are_of"] == "values"
    (tmp_path / "damaged.plan").write_text(plans[0].to_json()[:1000])
    for wrong, words in (
        ([paths[0], str(tmp_path / "missing")], "cannot read plan file"),
        ([str(tmp_path / "damaged.plan"), paths[0]], "not a whole plan"),
        ([paths[0]], "PLAN_B"),
        ([*paths, "--json", "/"], "directory"),
    ):
        assert cli.main(["diff", *wrong]) == 2
        streams = capsys.readouterr()
        assert words in streams.err and streams.err.count("\n") == 1 and not streams.out
