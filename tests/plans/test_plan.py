"""Plans: made of graphs, written out, read back, applied, refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner import errors
from planner.common import atomic
from planner.ir.graph import Operation, Phase, TrainingGraph
from planner.ir.layers import collapse, find_layers
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans.comparison import every_nth_layer
from planner.plans.from_solution import plan_from_solution
from planner.plans.liveness import anatomy_of_peak, placement
from planner.plans.plan import NoPlanFitsError, Plan, PlanOrigin
from tests.example_graphs import Builder, random_drops, transformer
from tests.planned import by_hand, make_plan, make_problem
from tests.tiers import tiered

GRAPH, COSTS = transformer(4)
UNPLANNED_BYTES = simulate(GRAPH, COSTS, Schedule.keep_all(GRAPH)).peak_bytes + GRAPH.total_static_bytes


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(
        GRAPH, COSTS, budget="65%", solver="sqrt", origin=PlanOrigin(fingerprint={"class": "Toy", "layers": 4})
    )


# What a plan says.


@pytest.mark.parametrize("seed", range(30))
def test_anatomy_and_placement_add_up_exactly(seed: int) -> None:
    schedule = Schedule.keep_all(GRAPH) if seed == 0 else random_drops(GRAPH, seed)
    evaluation = simulate(GRAPH, COSTS, schedule)
    anatomy = anatomy_of_peak(GRAPH, COSTS, schedule, evaluation)
    assert sum(anatomy.values()) == evaluation.peak_bytes + GRAPH.total_static_bytes
    assert all(size > 0 for size in anatomy.values())

    layers = placement(GRAPH, COSTS, schedule, find_layers(GRAPH))
    kept = placement(GRAPH, COSTS, Schedule.keep_all(GRAPH), find_layers(GRAPH))
    assert sum(x.saved_bytes + x.freed_bytes for x in layers) == sum(x.saved_bytes for x in kept)
    assert sum(x.recomputed for x in layers) == len(schedule.order) - len(GRAPH.operations)
    assert sum(x.added_seconds for x in layers) == pytest.approx(evaluation.recompute_seconds)
    assert all(x.recomputed == sum(x.targets.values()) for x in layers)


def test_without_recompute_saved_activations_are_what_the_backward_reads() -> None:
    kept = placement(GRAPH, COSTS, Schedule.keep_all(GRAPH), find_layers(GRAPH))
    backward = [op for op in GRAPH.operations if op.phase is Phase.BACKWARD]
    read = {value for op in backward for value in op.inputs}
    saved = {
        value
        for value in read
        if GRAPH.operations[GRAPH.producer[value]].phase is Phase.FORWARD and not GRAPH.values[value].retained
    }
    assert sum(layer.saved_bytes for layer in kept) == sum(GRAPH.values[value].size_bytes for value in saved)


def test_the_numbers_of_a_plan_are_those_of_the_simulator(plan: Plan) -> None:
    schedule = plan.schedule_for(GRAPH)
    evaluation = simulate(GRAPH, COSTS, schedule)
    assert plan.peak_bytes == evaluation.peak_bytes + GRAPH.total_static_bytes <= plan.budget_bytes
    assert plan.recompute_seconds == evaluation.recompute_seconds > 0
    assert plan.overhead == pytest.approx(evaluation.recompute_seconds / (evaluation.seconds - plan.recompute_seconds))
    assert plan.baseline_peak_bytes == UNPLANNED_BYTES
    assert plan.minimum_feasible_peak_bytes <= plan.peak_bytes
    assert 0 <= plan.lower_bound_overhead <= plan.overhead
    assert plan.peak_at.operation == GRAPH.operations[schedule.order[evaluation.peak_position]].target
    assert sum(row.seconds for row in plan.operations) == pytest.approx(plan.baseline_step_seconds)
    assert sum(row.runs for row in plan.operations) == len(schedule.order)


def test_baselines_stand_beside_the_plan(plan: Plan) -> None:
    rows = {row.name: row for row in plan.baselines}
    assert list(rows) == ["none", "every layer", "every second layer", "sqrt(L)", "chain DP", "this plan"]
    assert rows["none"].peak_bytes == UNPLANNED_BYTES and not rows["none"].fits
    assert rows["this plan"].peak_bytes == plan.peak_bytes and rows["this plan"].fits
    assert rows["every layer"].overhead == pytest.approx(2 * (rows["every second layer"].overhead or 0), rel=0.1)
    assert not make_plan(GRAPH, COSTS, budget="65%", solver="sqrt", compare=False).baselines


def test_a_false_claim_is_refused() -> None:
    problem = make_problem(GRAPH, COSTS, budget="100%")
    solution = by_hand(problem, Schedule.keep_all(GRAPH))
    with pytest.raises(errors.ClaimMismatchError):
        plan_from_solution(problem, dataclasses.replace(solution, peak_bytes=solution.peak_bytes - 64))


# Budgets.


def test_the_static_part_is_subtracted_once() -> None:
    static_bytes = GRAPH.total_static_bytes
    step_bytes = UNPLANNED_BYTES - static_bytes
    for budget, activation_budget, limit_bytes in (
        ("60%", None, int(UNPLANNED_BYTES * 0.6) - static_bytes),
        (None, "60%", int(step_bytes * 0.6)),
        (static_bytes + 1000, None, 1000),
        (None, 1000, 1000),
        (static_bytes - 1000, None, -1000),
    ):
        problem = make_problem(GRAPH, COSTS, budget=budget, activation_budget=activation_budget)
        assert problem.budget_bytes == limit_bytes


def test_both_budgets_mean_the_same_plan() -> None:
    whole = make_plan(GRAPH, COSTS, budget="65%", solver="sqrt")
    step = make_plan(GRAPH, COSTS, activation_budget=whole.activation_budget_bytes, solver="sqrt")
    assert (step.budget_bytes, step.peak_bytes) == (whole.budget_bytes, whole.peak_bytes)
    assert step.recomputations == whole.recomputations


def test_a_budget_above_the_unplanned_peak_recomputes_nothing() -> None:
    plan = make_plan(GRAPH, COSTS, budget="101%")
    assert plan.status == "optimal" and plan.overhead == 0 and not plan.recomputations
    assert plan.peak_bytes == plan.baseline_peak_bytes


@pytest.mark.parametrize("budget", tiered(["35%", GRAPH.total_static_bytes, 1], quick=["35%"]))
def test_an_infeasible_budget_names_one_that_is_feasible(budget: int | str) -> None:
    with pytest.raises(NoPlanFitsError, match="the smallest budget known to be feasible is") as caught:
        make_plan(GRAPH, COSTS, budget=budget, solver="sqrt")
    error = caught.value
    assert isinstance(error, errors.InfeasibleBudgetError) and error.exit_code == 3 and "\n" not in str(error)
    assert error.minimum_feasible_peak_bytes > GRAPH.total_static_bytes
    assert error.operation in str(error) and error.operation.startswith("aten.")
    report = json.loads(json.dumps(error.report, allow_nan=False))
    assert report["status"] == "infeasible" and report["schema"] == 1
    assert report["minimum_feasible_peak_bytes"] == error.minimum_feasible_peak_bytes
    assert report["proven_minimum_peak_bytes"] > report["budget_bytes"]
    assert set(report["peak_at"]) >= {"operation", "module", "source"}

    # sqrt may not reach it
    smallest = make_plan(GRAPH, COSTS, budget=error.minimum_feasible_peak_bytes, time_limit_seconds=1)
    assert smallest.peak_bytes <= error.minimum_feasible_peak_bytes


def test_an_infeasible_budget_says_when_gradients_alone_break_it() -> None:
    retained_bytes = sum(value.size_bytes for value in GRAPH.values if value.retained)
    with pytest.raises(NoPlanFitsError, match="of gradients and outputs are left when the step ends"):
        make_plan(GRAPH, COSTS, activation_budget=retained_bytes - 64, solver="sqrt")


# Decisions.


@pytest.mark.parametrize("seed", range(1, 10))
def test_decisions_survive_the_plan_file(seed: int) -> None:
    schedule = random_drops(GRAPH, seed)
    problem = make_problem(GRAPH, COSTS, activation_budget=2**40)
    plan = plan_from_solution(problem, by_hand(problem, schedule), compare=False)
    assert Plan.from_json(plan.to_json()).schedule_for(GRAPH) == schedule


def test_a_plan_of_another_model_is_refused_with_what_is_missing(plan: Plan) -> None:
    smaller, _ = transformer(1)
    with pytest.raises(errors.PlanMismatchError, match=r"transformer\.h\.[123]\b.*new plan") as caught:
        plan.schedule_for(smaller)
    assert "\n" not in str(caught.value)


def test_a_plan_that_would_run_backwards_is_refused(plan: Plan) -> None:
    first, last = GRAPH.operations[0].key, GRAPH.operations[-1].key
    with pytest.raises(errors.PlanMismatchError, match="comes first"):
        dataclasses.replace(plan, recomputations={first: (last,)}).schedule_for(GRAPH)


# The JSON of schema 1.


def test_save_and_load(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = dataclasses.replace(plan, cache_seconds=-1e-3)  # a tighter budget may find more in caches
    plan.save(path)
    assert Plan.load(path) == plan == Plan.from_json(plan.to_json()) and "measured" not in plan.report()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_report_is_no_plan_but_says_what_is_missing(plan: Plan) -> None:
    with pytest.raises(errors.PlanFileError, match="fingerprint is missing"):
        Plan.from_json(json.dumps(plan.report()))


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_nothing_half_written(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if moment == "write":
        monkeypatch.setattr(atomic.os, "fdopen", fail)
    else:
        monkeypatch.setattr(atomic.os, moment, fail)
    with pytest.raises(errors.UsageError, match="No space left"):
        plan.save(path)
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_paths_that_cannot_be_written(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing" / "plan.json", tmp_path / "file" / "plan.json", "a\0b", "x" * 5000):
        with pytest.raises(errors.UsageError, match="cannot write"):
            plan.save(path)
        with pytest.raises(errors.UsageError, match="cannot write"):
            atomic.check_writable(path)


def test_a_saved_file_can_be_read_as_the_umask_allows_and_links_stay(plan: Plan, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    mask = os.umask(0o027)
    try:
        plan.save(link)
    finally:
        os.umask(mask)
    assert link.is_symlink() and Plan.load(real) == plan
    assert real.stat().st_mode & 0o777 == 0o640


# Plan files that cannot be trusted.


def refused(text: str) -> str:
    with pytest.raises(errors.PlanFileError) as caught:
        Plan.from_json(text)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 500
    return message


def test_truncated_files(plan: Plan) -> None:
    text = plan.to_json().rstrip()
    for end in range(0, len(text), 211):
        refused(text[:end])
    refused(text[:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "deep"),
        ('{"a":' * 100_000, "deep"),
        ("null", "object"),
        ("{}", "schema is missing"),
        ('{"schema": 2}', "schema 2"),
        ('{"schema": "1"}', "integer"),
        ('{"schema": true}', "integer"),
        ('{"schema": 1, "schema": 1}', "twice"),
        ('{"schema": ' + "9" * 10_000 + "}", "absurd"),
        ('{"schema": NaN}', "NaN"),
        ('{"schema": -Infinity}', "Infinity"),
        ('{"schema": 1, "status": "infeasible"}', "no plan"),
        ("\0", "plan"),
    ],
)
def test_hostile_texts(text: str, message: str) -> None:
    assert message in refused(text)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path to every value in parsed JSON; of a list only its first item."""
    if path:
        yield path
    inner = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def parent_of(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


@pytest.fixture
def small() -> Any:
    """Return a plan as data, as small as one with all parts can be: thousands like it are read."""
    graph, costs = transformer(1)
    made = make_plan(graph, costs, budget="90%", solver="sqrt", origin=PlanOrigin(fingerprint={"class": "Toy"}))
    data = json.loads(made.to_json())
    for line in data["details"]["timeline"].values():
        line["points"] = [max(line["points"], key=lambda point: point["size_bytes"])]
    return data


def test_wrong_types_anywhere_are_refused_or_harmless(small: Any) -> None:
    for path in places(small):
        for wrong in (None, True, -1, 1e308, "\x1b[2J", "x" * 20_000, [[]], {"a": {}}):
            bad = copy.deepcopy(small)
            parent_of(bad, path)[path[-1]] = wrong
            try:
                read = Plan.from_json(json.dumps(bad))
            except errors.PlanFileError as error:
                assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 500
            else:
                read.to_json()
                read.report()


def test_a_missing_field_is_named(small: Any) -> None:
    # What follows from other fields, or need not be there.
    optional = {"activation_budget_bytes", "overhead", "details", "values", "offloaded_bytes", "offloaded"}
    optional.add("proven_minimum_peak_bytes")
    for path in places(small):
        bad = copy.deepcopy(small)
        del parent_of(bad, path)[path[-1]]
        free = path[0] in ("fingerprint", "decisions", "static_bytes") and len(path) > 1
        if free or isinstance(path[-1], int) or path[-1] in optional or "targets" in path[:-1]:
            continue
        if path == ("details", "modules"):  # older files lack it
            assert Plan.from_json(json.dumps(bad)).details.modules == ()
            continue
        assert str(path[-1]) in refused(json.dumps(bad)) or path[1:2] == ("anatomy_bytes",)


def test_infinite_numbers_are_refused(plan: Plan) -> None:
    text = plan.to_json()
    number = json.loads(text)["predicted"]["recompute_seconds"]
    assert "predicted.recompute_seconds" in refused(
        text.replace(f'"recompute_seconds": {number}', '"recompute_seconds": 1e999')
    )


def test_contradictory_numbers_are_refused(plan: Plan) -> None:
    good = json.loads(plan.to_json())
    for path, message in (
        (("predicted", "peak_bytes"), "adds up"),
        (("budget_bytes",), "above the budget"),
        (("static_bytes", "parameters"), "above the peak"),
    ):
        bad = copy.deepcopy(good)
        parent = parent_of(bad, path)
        parent[path[-1]] = 5 if path == ("budget_bytes",) else parent[path[-1]] + 10**12
        assert message in refused(json.dumps(bad))


# Layers and what is done around them.


def layers_of(modules: list[str]) -> tuple[tuple[str, ...], list[str]]:
    operations = tuple(
        Operation(name=str(i), key=str(i), target="t", inputs=(), outputs=(), module=module)
        for i, module in enumerate(modules)
    )
    layers = find_layers(TrainingGraph(operations=operations, values=()))
    return layers.blocks, [name for name in dict.fromkeys(layers.of) if name not in layers.blocks]


@pytest.mark.parametrize(
    ("modules", "blocks", "others"), json.loads((Path(__file__).parent / "layers_of_people.json").read_text())
)
def test_layers_as_people_name_them(modules: list[str], blocks: list[str], others: list[str]) -> None:
    assert layers_of(modules) == (tuple(blocks), others)


def test_identical_layers_collapse() -> None:
    names = ["wte", "0", *(f"h.{i}" for i in range(6)), "conv_1", "conv_2"]
    signatures = ["a", "a", *"bbcbdb", "e", "e"]
    assert collapse(names, signatures) == [
        ("wte", [0]), ("0", [1]), ("h 0-1,3,5 (x4)", [2, 3, 5, 7]), ("h.2", [4]), ("h.4", [6]),
        ("conv 1-2 (x2)", [8, 9]),
    ]  # fmt: skip


def test_what_cannot_be_recomputed_is_kept() -> None:
    operations = tuple(
        dataclasses.replace(op, recomputable="dropout" not in op.target and "gelu" not in op.target)
        for op in GRAPH.operations
    )
    graph = dataclasses.replace(GRAPH, operations=operations)
    schedule = every_nth_layer(graph, 1)
    assert schedule is not None
    simulate(graph, COSTS, schedule)  # raises if one of them runs twice
    with pytest.raises(errors.ScheduleError):
        simulate(graph, COSTS, every_nth_layer(GRAPH, 1) or schedule)


def test_a_model_without_blocks_has_no_layer_baseline() -> None:
    b = Builder()
    x = b.add("aten.mm.default", [], [64], module="a")[0]
    y = b.add("aten.mm.default", [x], [64], module="b")[0]
    b.add("aten.mm.default", [x, y], [64], module="a", phase=Phase.BACKWARD, kind="gradient", retained=True)
    graph = b.graph("flat", {})
    assert every_nth_layer(graph, 1) is None
    plan = make_plan(graph, tuple(b.costs), budget="100%")
    assert {row.name: row.reason for row in plan.baselines}["every layer"] == "the model has no repeated blocks"
