"""Why a plan does what it does: the table of values held against the simulator, reasons, the command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import cli
from planner.analysis.explain import Explanation, explain
from planner.errors import UsageError
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import Evaluation, lifetimes, simulate
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import Plan
from planner.plans.values import ValueRow, ValueTable, value_table
from planner.report.explain import render as render_explanation
from tests.example_graphs import Builder, random_drops, transformer
from tests.planned import by_hand, make_plan, make_problem, printed

GRAPH, COSTS = transformer(4)
TURN = next(index for index, op in enumerate(GRAPH.operations) if op.phase is Phase.BACKWARD)


def problem_at(schedule: Schedule) -> Problem:
    return make_problem(GRAPH, COSTS, activation_budget=simulate(GRAPH, COSTS, schedule).peak_bytes)


def table_for(schedule: Schedule) -> ValueTable:
    table = value_table(problem_at(schedule), schedule)
    assert table is not None
    return table


def plan_for(graph: TrainingGraph, costs: tuple[OperationCost, ...], schedule: Schedule, **budget: Any) -> Plan:
    problem = make_problem(graph, costs, **budget)
    return plan_from_solution(problem, by_hand(problem, schedule))


def plan_with_drops() -> Plan:
    """Return a plan that recomputes GELUs and norms, and one more value in layer 2."""
    wanted = [
        value
        for index, op in enumerate(GRAPH.operations[:TURN])
        for value in op.outputs
        if "gelu" in op.target or "norm" in op.target or ("h.2." in op.module and "mlp.0" in op.module)
    ]
    return plan_for(GRAPH, COSTS, recompute_lazily(GRAPH, {TURN - 1: wanted}), budget="75%")


def value_of(row: ValueRow) -> int:
    """Return the value of the example graph that a row is about."""
    (operation,) = (op for op in GRAPH.operations if op.key == row.operation)
    return operation.outputs[row.output]


def begins(schedule: Schedule) -> int:
    """Return the position where the backward begins, what is run again for it included."""
    return schedule.order.index(TURN - 1) + 1


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(GRAPH, COSTS, budget="60%", time_limit_seconds=2.0)


# The table.


@pytest.mark.parametrize("seed", range(25))
def test_the_table_adds_up_to_what_the_simulator_finds(seed: int) -> None:
    schedule = random_drops(GRAPH, seed)
    rows = table_for(schedule).rows
    crossing: dict[int, int] = {}
    for copy in reversed(lifetimes(GRAPH, schedule)):  # the first copy of a value is noted last
        crossing[copy.value] = copy.died
    held = {
        value
        for value, died in crossing.items()
        if GRAPH.producer[value] < TURN - 1 and (died >= begins(schedule) or GRAPH.values[value].retained)
    }
    assert {value_of(row) for row in rows if row.kept} == held

    again = [index for index in schedule.order[begins(schedule) :] if index < TURN]
    by_operation = {row.operation: row for row in rows}
    assert {GRAPH.operations[index].key for index in again} <= by_operation.keys()
    forward_seconds = sum(COSTS[i].seconds * (schedule.order.count(i) - 1) for i in range(TURN))
    assert sum(row.seconds * (row.runs - 1) for row in by_operation.values()) == pytest.approx(forward_seconds)

    read = {value for op in GRAPH.operations[TURN:] for value in op.inputs}
    for row in rows:
        assert row.needed == (value_of(row) in read)
        assert row.size_bytes == GRAPH.values[value_of(row)].size_bytes
        assert row.runs == schedule.order.count(GRAPH.producer[value_of(row)])
        sources = {value_of(rows[source]) for source in row.made_from}
        assert sources <= set(GRAPH.operations[GRAPH.producer[value_of(row)]].inputs)


def spent(schedule: Schedule, operation: int) -> Schedule:
    """Leave out what an operation is run again for, and then what is run again for nothing."""
    order = list(schedule.order)
    first = {index: order.index(index) for index in range(len(GRAPH.operations))}
    useless = [at for at, index in enumerate(order) if index == operation and at > first[index]]
    while useless:
        order = [index for at, index in enumerate(order) if at not in useless]
        first = {index: order.index(index) for index in range(len(GRAPH.operations))}
        last_read: dict[tuple[int, int], bool] = {}
        for copy in lifetimes(GRAPH, Schedule(tuple(order))):
            index = GRAPH.producer[copy.value]
            is_read = copy.died > copy.born and not GRAPH.values[copy.value].retained
            last_read[index, copy.born] = last_read.get((index, copy.born), False) or is_read
        useless = [at for (index, at), is_read in last_read.items() if at > first[index] and not is_read]
    return Schedule(tuple(order))


def without_each(schedule: Schedule, rows: Iterable[Any]) -> list[tuple[Any, Evaluation]]:
    """Return each row of what runs again for one value alone, which says what that costs, and the step without it."""
    whole, found = simulate(GRAPH, COSTS, schedule), []
    for row in rows:
        producer = GRAPH.producer[value_of(row)]
        if not row.kept and len(GRAPH.operations[producer].outputs) == 1 and row.needed:
            without = simulate(GRAPH, COSTS, spent(schedule, producer))
            assert row.again_seconds == pytest.approx(whole.recompute_seconds - without.recompute_seconds)
            found.append((row, without))
    return found


@pytest.mark.parametrize("budget", ["75%", "60%", "52%"])
def test_what_is_recomputed_costs_and_frees_what_the_row_says(budget: str) -> None:
    plan = make_plan(GRAPH, COSTS, budget=budget, time_limit_seconds=2.0)
    assert plan.values is not None
    found = without_each(plan.schedule_for(GRAPH), plan.values.rows)
    for row, without in found:
        is_over = without.peak_bytes + GRAPH.total_static_bytes > plan.budget_bytes
        assert is_over == (row.busiest_bytes + row.size_bytes > plan.budget_bytes)
    assert len(found) >= 4


@pytest.mark.parametrize("seed", [1, 2, 13, 26, 27, 35, 44, 49])
def test_runs_that_are_for_a_value_alone_are_counted_in_any_schedule(seed: int) -> None:
    schedule = random_drops(GRAPH, seed)
    without_each(schedule, table_for(schedule).rows)


@pytest.mark.parametrize("seed", range(6))
def test_dropping_what_is_kept_costs_and_frees_what_the_row_says(seed: int) -> None:
    schedule = random_drops(GRAPH, seed) if seed else make_plan(GRAPH, COSTS, budget="60%").schedule_for(GRAPH)
    before = simulate(GRAPH, COSTS, schedule)
    seen = 0
    for row in table_for(schedule).rows:
        value = value_of(row)
        producer = GRAPH.producer[value]
        if not row.kept or row.retained or row.again_runs != 1 or row.runs > 1:
            continue
        copies = lifetimes(GRAPH, schedule)
        (copy,) = (copy for copy in copies if copy.value == value)
        touched = [
            at
            for at, index in enumerate(schedule.order)
            if value in GRAPH.operations[index].inputs or index == producer
        ]
        end = next(at for at in touched if at >= begins(schedule))
        start = max(at for at in touched if at < begins(schedule))
        assert copy.born <= start and end <= copy.died
        after = simulate(GRAPH, COSTS, Schedule((*schedule.order[:end], producer, *schedule.order[end:])))
        assert row.again_seconds == pytest.approx(after.recompute_seconds - before.recompute_seconds)
        idle = range(start + 1, end)
        held_bytes = max((before.timeline_bytes[at] + GRAPH.total_static_bytes for at in idle), default=0)
        assert row.busiest_bytes == held_bytes
        held = {other.value for other in copies if other.born < end <= other.died}
        operation = GRAPH.operations[producer]  # one that has other results would free more
        if held.issuperset(operation.inputs) and len(operation.outputs) == 1 and not operation.state_bytes:
            assert {before.timeline_bytes[at] - after.timeline_bytes[at] for at in idle} <= {row.size_bytes}
            seen += 1
    assert seen >= 2


def test_a_value_lies_idle_between_forward_and_backward(plan: Plan) -> None:
    baseline = simulate(GRAPH, COSTS, Schedule.keep_all(GRAPH))
    table = table_for(Schedule.keep_all(GRAPH))
    assert (table.steps, table.baseline_peak_step) == (len(GRAPH.operations), baseline.peak_position)
    budget = baseline.peak_bytes
    for row in table.rows:
        if row.retained:
            continue
        value = value_of(row)
        touched = (GRAPH.producer[value], *GRAPH.readers[value])
        assert row.idle_from == max(step for step in touched if step < TURN)
        assert row.idle_to == min(step for step in touched if step >= TURN)
        assert row.spans_baseline_peak == (row.idle_from < baseline.peak_position < row.idle_to)
        assert row.spans_peak == row.spans_baseline_peak, "the plan is the step without recompute"
        assert row.excess_bytes == 0 and row.busiest_bytes <= budget + GRAPH.total_static_bytes
    assert plan.values is not None
    for row in plan.values.rows:
        idle = range(row.idle_from + 1, row.idle_to)
        if row.kept and not row.retained and idle:
            over = max(baseline.timeline_bytes[step] for step in idle) - plan.activation_budget_bytes
            assert row.excess_bytes >= max(over, 0)


# The file.


def test_the_table_survives_the_plan_file(plan: Plan) -> None:
    assert plan.values is not None and len(plan.values.rows) > 30
    assert Plan.from_json(plan.to_json()).values == plan.values
    without = dataclasses.replace(plan, values=None)
    assert len(plan.to_json()) - len(without.to_json()) < 350 * len(plan.values.rows)
    bare = make_plan(GRAPH, COSTS, budget="60%", time_limit_seconds=2.0, compare=False)
    assert bare.values is None and "values" not in json.loads(bare.to_json())


# Reasons.


def reasons(explanation: Explanation) -> dict[str, str]:
    return {f"{v.value.module} {v.value.target}": v.reason for v in explanation.values}


def small_step() -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a step in which every reason to keep a value stands once."""
    b = Builder()
    unit = 2**20
    x = b.add("aten.embedding.default", [], [unit], module="input", recomputable=False)[0]
    cheap = b.add("aten.gelu.default", [x], [8 * unit], module="cheap", seconds=1e-3)[0]
    dear = b.add("aten.mm.default", [x], [unit], module="dear", seconds=50e-3)[0]
    brief = b.add("aten.mm.default", [dear], [unit], module="brief", seconds=1e-3)[0]
    last = b.add("aten.mul.Tensor", [brief, dear, cheap], [unit], module="last", seconds=1e-3)[0]
    out = b.add("aten.sum.default", [last], [64], module="", kind="output", retained=True)[0]
    seed = b.add("tangent", [out], [64], phase=Phase.LOSS, kind="tangent", retained=True, seconds=0.0)[0]
    g = b.add("mul_backward", [seed, last], [unit], module="last", phase=Phase.BACKWARD)[0]
    g = b.add("big", [g], [unit], module="last", phase=Phase.BACKWARD, workspace=16 * unit)[0]
    g = b.add("mm_backward", [g, dear], [unit], module="dear", phase=Phase.BACKWARD)[0]
    g = b.add("gelu_backward", [g, cheap], [unit], module="cheap", phase=Phase.BACKWARD)[0]
    b.add(
        "embedding_backward", [g, x, out], [unit], module="input", phase=Phase.BACKWARD, kind="gradient", retained=True
    )
    return b.graph("small", {"parameters": 4 * unit}), tuple(b.costs)


def test_every_reason_is_given_where_it_holds() -> None:
    graph, costs = small_step()
    plan = make_plan(graph, costs, budget="80%")
    found = reasons(explain(plan))
    assert found["cheap aten.gelu.default"].startswith("recomputed: frees 8.0 MiB for 1.0 ms (8.0 MiB per ms). If kept")
    assert found["dear aten.mm.default"] == (
        "kept: dropping it would free 1.0 MiB for 50.0 ms (20.5 KiB per ms); what the plan recomputes frees 8.0 MiB "
        "per ms or more"
    )
    assert found["input aten.embedding.default"].startswith("kept: its operation cannot be recomputed")
    assert found[" aten.sum.default"].startswith("kept: the model returns it")
    assert found["last aten.mul.Tensor"].startswith("kept: it is idle only while the step fits without recompute")
    assert "brief aten.mm.default" not in found, "the backward does not wait for it"

    whole = reasons(explain(make_plan(graph, costs, budget="100%")))
    assert whole["dear aten.mm.default"] == "kept: the step fits without recompute"


def test_what_is_needed_again_at_once_is_kept() -> None:
    b = Builder()
    first = b.add("aten.mm.default", [], [2**20], module="first")[0]
    last = b.add("aten.mm.default", [first], [2**20], module="last")[0]
    g = b.add("mm_backward", [last], [2**20], module="last", phase=Phase.BACKWARD, workspace=2**20)[0]
    b.add("mm_backward", [g, first], [2**20], module="first", phase=Phase.BACKWARD, kind="gradient", retained=True)
    graph, costs = b.graph("two", {}), tuple(b.costs)
    schedule = recompute_lazily(graph, {2: [first]})
    plan = plan_for(graph, costs, schedule, budget="100%")
    found = reasons(explain(plan))
    assert found["last aten.mm.default"] == "kept: needed again at once"
    assert found["first aten.mm.default"].startswith(
        "recomputed: frees 1.0 MiB for 1.0 ms (1.0 MiB per ms). This value alone"
    )


def test_what_recompute_starts_from_is_said() -> None:
    # The backward never reads what c_proj makes; here the dropout mask is made again from it.
    wanted = [value for op in GRAPH.operations[:TURN] for value in op.outputs if "h.1.attn.drop" in op.module]
    schedule = recompute_lazily(GRAPH, {TURN - 1: wanted})
    found = explain(plan_for(GRAPH, COSTS, schedule, budget="110%"), "transformer.h.1.attn")
    by_module = {v.value.module: v for v in found.values}
    source = by_module["transformer.h.1.attn.c_proj"]
    assert "recomputed operations do" in source.reason and not source.value.needed
    (sources,) = {v.made_from for v in found.values if v.value.module.endswith("drop")}
    assert [row.module for row in sources] == ["transformer.h.1.attn.c_proj"]


def test_what_waits_on_the_host_is_said() -> None:
    host = Host(bytes_per_second=2e9, budget_bytes=2**30)
    plan = make_plan(GRAPH, COSTS, activation_budget="45%", host=host, time_limit_seconds=2)
    assert plan.values is not None and plan.offloading is not None
    away = {(value.operation, value.output): value for value in plan.offloading.values}
    rows = {(row.operation, row.output): row for row in plan.values.rows}
    assert away and {place for place, row in rows.items() if row.offloaded} == set(away)
    explanation = explain(plan)
    assert explanation.offloaded_bytes == plan.offloading.host_bytes
    assert explanation.kept_bytes == sum(row.size_bytes for row in plan.values.rows if row.kept)
    for explained in explanation.values:
        row = explained.value
        assert explained.reason.startswith("offloaded: frees") is row.offloaded
        if row.offloaded and not row.kept and row.runs == 1:
            assert row.again_seconds is None or row.again_seconds > 0
            assert row.excess_bytes > 0 or not row.spans_baseline_peak
    assert ", offloads " in printed(render_explanation, explanation).splitlines()[0]
    assert Plan.from_json(plan.to_json()).values == plan.values


def test_the_sums_are_those_of_the_plan(plan: Plan) -> None:
    found = explain(plan)
    assert found.added_seconds == pytest.approx(plan.recompute_seconds)
    assert found.added_runs == sum(len(again) for again in plan.recomputations.values())
    layers = [layer for layer in plan.placement if layer.module]
    for layer in layers:
        part = explain(plan, layer.module)
        assert part.added_runs == layer.recomputed and part.added_seconds == pytest.approx(layer.added_seconds)
        assert part.kept_bytes == layer.saved_bytes
    assert found.report()["added_seconds"] == found.added_seconds


def test_unknown_modules_and_plans_without_a_table(plan: Plan) -> None:
    with pytest.raises(UsageError, match=r"nothing of 'transformer.h.9'; did you mean 'transformer.h.\d'") as caught:
        explain(plan, "transformer.h.9")
    assert caught.value.exit_code == 2
    assert explain(plan, "transformer").kept_bytes >= explain(plan, "transformer.h.1").kept_bytes
    with pytest.raises(UsageError, match=r"no table of its values.*plan MODEL --budget SIZE --save PLAN"):
        explain(dataclasses.replace(plan, values=None))
    with pytest.raises(UsageError, match="recomputes whole modules"):
        explain(dataclasses.replace(plan, values=None, runtime="modules"))


# The report and the command.


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toy.plan"
    plan.save(path)
    assert cli.main(["explain", str(path), "transformer.h.1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("transformer.h.1 keeps ")
    assert cli.main(["explain", str(path)]) == 0
    assert "smaller values are not shown" in capsys.readouterr().out
    assert cli.main(["explain", str(path), "--all"]) == 0
    assert "not shown" not in capsys.readouterr().out
    assert cli.main(["explain", str(path), "transformer.h.1", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kept_bytes"] == sum(value["size_bytes"] for value in report["values"] if value["kept"])


def test_wrong_usage(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, damaged = tmp_path / "toy.plan", tmp_path / "damaged.plan"
    plan.save(path)
    damaged.write_text(plan.to_json()[:1000])
    for arguments, words in (
        ([str(tmp_path / "missing")], "cannot read plan file"),
        ([str(damaged)], "not a whole plan"),
        ([str(path), "transformer.g.1"], "did you mean 'transformer.h.1'"),
        ([str(path), "transformer", "--all"], "leave it out"),
        ([str(path), "--json", "/"], "directory"),
        ([], "PLAN"),
    ):
        assert cli.main(["explain", *arguments]) == 2
        streams = capsys.readouterr()
        assert words in streams.err and streams.err.count("\n") == 1 and not streams.out
