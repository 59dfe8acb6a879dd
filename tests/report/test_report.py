"""The report of a plan: its numbers added up again, and what it says at any width and of any plan."""

from __future__ import annotations

import dataclasses
import html
import io
import re
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

import planner
from planner.commands._terminal import encodable
from planner.common.units import format_bytes
from planner.errors import UsageError
from planner.findings.finding import Finding
from planner.ir.graph import Phase
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import simulate
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import EagerStep, Plan, PlanOrigin, Verification
from planner.report import render
from planner.report.verdict import verdict
from tests.example_graphs import transformer
from tests.planned import by_hand, make_plan, make_problem, printed

GOLDEN = Path(__file__).parent.parent / "golden"
"""Reports of the example plan are there; ``test_golden.py`` holds them to what is rendered today."""

WIDTHS = (80, 100, 160)
SCREEN = 40


@cache
def example_plan(*, verified: bool = True) -> Plan:
    """Return a plan that recomputes two things in layers 0 to 4 and one more in layer 2, with fixed times."""
    graph, costs = transformer(8)
    turn = next(i for i, op in enumerate(graph.operations) if op.phase is not Phase.FORWARD)
    dropped = [
        value
        for index, op in enumerate(graph.operations[:turn])
        for value in op.outputs
        if any(f"h.{i}." in op.module for i in range(5))
        and ("gelu" in op.target or "norm" in op.target or (".2." in op.module and "mlp.0" in op.module))
    ]
    schedule = recompute_lazily(graph, {turn: dropped})
    evaluation = simulate(graph, costs, schedule)
    problem = make_problem(graph, costs, activation_budget=evaluation.peak_bytes + 2**19)
    bound_seconds = 0.45 * evaluation.recompute_seconds
    solution = by_hand(problem, schedule, solver="ilp", lower_bound_seconds=bound_seconds, solve_seconds=1.25)
    plan = plan_from_solution(problem, solution, origin=PlanOrigin(capture_seconds=2.5, torch_version="2.13.0"))
    measured = Verification(
        peak_bytes=plan.peak_bytes - 88,
        baseline_peak_bytes=plan.baseline_peak_bytes + 64,
        overhead=plan.overhead + 0.004,
        loss_equal=True,
        gradients_bitwise_equal=True,
        buffers_equal=False,
        differences=("buffer transformer.h.0.count: 1 and 2",),
        steps=3,
    )
    return dataclasses.replace(
        plan,
        baselines=tuple(dataclasses.replace(row, seconds=0.015) for row in plan.baselines),
        verification=measured if verified else None,
    )


def example_eager(plan: Plan) -> EagerStep:
    """Return an eager step that is larger and quicker than the captured one."""
    return EagerStep(peak_bytes=2 * plan.baseline_peak_bytes, step_seconds=plan.baseline_step_seconds / 1.1)


def shown(plan: Plan, width: int, *, full: bool = True) -> str:
    return printed(render, plan, width=width, full=full)


plan = pytest.fixture(scope="module")(example_plan)


# The numbers of a golden report, added up again.


def section(text: str, title: str, head: int = 2) -> list[str]:
    """Return the lines of a table below its head."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + head
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return lines[start:end]


def golden(width: int) -> str:
    return (GOLDEN / f"plan_{width}.txt").read_text(encoding="utf-8")


def rows_of(width: int, title: str, row: str, head: int = 2) -> list[re.Match[str]]:
    """Return the rows of a table of a golden report."""
    return [found for line in section(golden(width), title, head) if (found := re.search(row, line.strip()))]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_anatomy_adds_up_in_bytes_and_as_shown(width: int) -> None:
    found = rows_of(width, "Peak memory", r"^(\S.*?)  +([\d.,]+) (\w+)  +([\d,]+)  +([\d.]+)%(  █*)?$")
    *parts, total = found
    assert total[1] == "peak" and len(parts) >= 6
    assert len({match[3] for match in found}) == 1, "one unit in a column"
    assert sum(int(match[4].replace(",", "")) for match in parts) == int(total[4].replace(",", ""))
    assert sum(float(match[2]) for match in parts) == pytest.approx(float(total[2]), abs=0.05 * len(found))
    assert sum(float(match[5]) for match in parts) == pytest.approx(100, abs=0.05 * len(found))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_placement_adds_up_as_shown(plan: Plan, width: int) -> None:
    number = r"(-?[\d.,]+) MiB"
    found = rows_of(width, "Placement", rf"{number}  +{number}  +(\d+)  +(-|[\d.]+ ms|\d+ us)")
    *parts, total = found
    assert len(parts) < len(plan.placement), "identical layers are shown as one"
    for column in (1, 2, 3):
        expected = float(total[column])
        assert sum(float(match[column]) for match in parts) == pytest.approx(expected, abs=0.05 * len(found))
    assert float(total[1]) * 2**20 == pytest.approx(sum(x.saved_bytes for x in plan.placement), abs=0.05 * 2**20)
    assert f" {total[3]} ops recomputed" in golden(width).splitlines()[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_way_shows_its_distance_to_the_bound(plan: Plan, width: int) -> None:
    row = r"^(\S.*?)  +([\d.]+) MiB  +(yes|no)  +\+([\d.]+)%  +(-|\+[\d.]+%)"
    found = rows_of(width, "Beside other ways", row, head=1)
    names = ["none", "every layer", "every second layer", "sqrt(L)", "chain DP", "this plan"]
    assert [match[1] for match in found] == names
    for match in found:
        fits = float(match[2]) * 2**20 <= plan.budget_bytes + 0.05 * 2**20
        assert (match[3] == "yes") == fits == (match[5] != "-")
        if fits:
            bound = 100 * plan.lower_bound_overhead
            assert float(match[4]) - float(match[5].strip("+%")) == pytest.approx(bound, abs=0.11)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_chart_stands_where_the_bytes_are(plan: Plan, width: int) -> None:
    lines = section(golden(width), "Memory over the step", head=1)
    rows = [line.partition("│")[2] for line in lines if re.match(r"\s*([\d.]+ MiB)? *│", line)]
    assert lines[0].startswith(f"{plan.baseline_peak_bytes / 2**20:.1f} MiB │")
    assert any(line.startswith(f"{plan.budget_bytes / 2**20:.1f} MiB │─") for line in lines)
    cell_bytes = plan.baseline_peak_bytes / len(rows)

    def top_bytes(drawn: str) -> float:
        """Return how high the highest column stands that is drawn with some characters."""
        for number, row in enumerate(rows):
            if parts := [drawn.index(cell) + 1 for cell in row if cell in drawn]:
                return cell_bytes * (len(rows) - number - 1 + max(parts) / len(drawn))
        return 0.0

    assert top_bytes("▁▂▃▄▅▆▇█") == pytest.approx(plan.peak_bytes, abs=cell_bytes / 8)
    assert top_bytes("░") == pytest.approx(plan.baseline_peak_bytes, abs=cell_bytes)


def test_ascii_stands_for_what_an_encoding_lacks(plan: Plan) -> None:
    text = shown(plan, 80)
    assert encodable(text, "utf-8") == text
    plain = encodable(text, "ascii")
    assert plain.isascii() and "?" not in plain and "|" in plain and "####" in plain and "...." in plain


# The verdict.


def test_the_verdict_is_the_first_line_whole_at_any_width(plan: Plan) -> None:
    line = r"FITS [\d.]+ of [\d.]+ [KMG]iB · \+[\d.]+% step time \(no plan below \+[\d.]+%\) · 16 ops recomputed"
    for width in (1, 10, 40, 80, 400):
        assert re.fullmatch(line, shown(plan, width).splitlines()[0])


def test_the_verdict_rounds_the_bound_down_and_never_boasts(plan: Plan) -> None:
    baseline = 1.0
    plan = dataclasses.replace(
        plan, baseline_step_seconds=baseline, recompute_seconds=0.0844, lower_bound_seconds=0.0839
    )
    assert "+8.4% step time (no plan below +8.3%)" in verdict(plan)
    exact = dataclasses.replace(plan, recompute_seconds=0.083, lower_bound_seconds=0.083)
    assert "+8.3% step time (no plan below +8.3%)" in verdict(exact)
    unproven = dataclasses.replace(plan, lower_bound_seconds=0.0)
    assert "(no lower bound proven)" in verdict(unproven)


def test_the_verdict_where_nothing_is_recomputed() -> None:
    graph, costs = transformer(2)
    line = verdict(make_plan(graph, costs, budget="200%"))
    assert line.endswith("· +0.0% step time · nothing recomputed")


def test_the_verdict_counts_gigabytes() -> None:
    plan = dataclasses.replace(example_plan(), peak_bytes=int(22.9 * 2**30), budget_bytes=24 * 2**30)
    assert verdict(plan).startswith("FITS 22.9 of 24.0 GiB · ")


# One screen.


@pytest.mark.parametrize("width", [80, 100, 400])
def test_the_report_is_one_screen(plan: Plan, width: int) -> None:
    many = tuple(Finding(rule=f"rule-{n}", evidence="seen " * 40, cause="why", fix="what") for n in range(4))
    for shown_plan in (plan, dataclasses.replace(plan, verification=None, warnings=many, eager=example_eager(plan))):
        lines = shown(shown_plan, width, full=False).splitlines()
        assert len(lines) <= SCREEN and max(map(len, lines[1:])) <= min(width, 100)
        assert len(lines[0]) <= 100


def test_the_screen_names_every_byte_of_the_peak_and_hides_no_warning(plan: Plan) -> None:
    many = tuple(Finding(rule=f"rule-{n}", evidence="seen", cause="why", fix="what") for n in range(4))
    lines = shown(dataclasses.replace(plan, warnings=many), 100, full=False).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Peak memory, "))
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines[start + 1 : start + 4]]  # type: ignore[index]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert sum("[rule-" in line for line in lines) == 2 and any("2 more warnings" in line for line in lines)


def test_the_report_as_an_object_is_the_screen_or_a_page(plan: Plan) -> None:
    made = planner.report(plan)  # type: ignore[operator]
    assert str(made) == repr(made) and str(made).startswith("FITS ") and "What to do next" in str(made)
    page = made._repr_html_()
    assert page.startswith("<iframe srcdoc=") and html.unescape(page).count("<!DOCTYPE html>") == 1
    with pytest.raises(UsageError, match="is not wrapped"):
        planner.report(object())  # type: ignore[operator]


# Odd circumstances.


@pytest.mark.parametrize("width", [1, 20, 40, 79, 1000])
@pytest.mark.parametrize("terminal", [True, False])
def test_any_width_and_any_output(plan: Plan, width: int, terminal: bool) -> None:
    stream = io.StringIO()
    colour = "truecolor" if terminal else None
    console = Console(file=stream, width=width, force_terminal=terminal, highlight=False, color_system=colour)
    render(plan, console, full=True)
    assert ("\x1b[" in stream.getvalue()) == terminal


def test_names_with_brackets_are_shown_as_they_are(plan: Plan) -> None:
    odd = dataclasses.replace(
        plan,
        peak_at=dataclasses.replace(plan.peak_at, module="[bold]x[/bold]"),
        placement=tuple(dataclasses.replace(layer, module="m[0]") for layer in plan.placement[:1]),
    )
    text = shown(odd, 100)
    assert "[bold]x[/bold]" in text and "m[0]" in text


def bare(plan: Plan) -> Plan:
    """Return a plan without its parts."""
    return dataclasses.replace(
        plan, baselines=(), placement=(), warnings=(), verification=None, anatomy={}, details=None
    )


def test_a_plan_without_parts_can_be_shown(plan: Plan) -> None:
    assert shown(bare(plan), 80).startswith("FITS")


def test_warnings_name_rule_cause_and_fix() -> None:
    graph, costs = transformer(4, vocabulary=64)
    graph = dataclasses.replace(graph, static_bytes={"parameters": 2**31})
    plan = make_plan(graph, costs, activation_budget="80%", solver="sqrt")
    assert {warning.rule for warning in plan.warnings} == {"static-dominates", "logits-dominate"}
    lines = [line.strip() for line in shown(plan, 400).splitlines()]
    for warning in plan.warnings:
        at = lines.index(f"warning [{warning.rule}] {warning.evidence}")
        assert lines[at + 1 : at + 3] == [warning.cause, f"fix: {warning.fix}"]
    keep_all = simulate(graph, costs, Schedule.keep_all(graph))
    assert not make_plan(graph, costs, activation_budget=keep_all.peak_bytes).warnings


def test_what_people_have_is_what_a_plan_is_held_against(plan: Plan) -> None:
    """The first line with its bound, the methods and the budgets are of eager's step."""
    eager = example_eager(plan)
    plan = dataclasses.replace(plan, eager=eager, recompute_seconds=0.1 * plan.baseline_step_seconds)
    plan = dataclasses.replace(plan, lower_bound_seconds=plan.recompute_seconds)
    assert plan.over_eager(plan.overhead) == pytest.approx(1.1 * 1.1 - 1)
    said = "+21.0% step time vs eager (no plan below +21.0%)"  # recompute alone adds 10%
    text = shown(plan, 100)
    assert said in text.splitlines()[0]
    assert f"Eager's is {format_bytes(eager.peak_bytes)}: the plan is" in text
    first, *_, last = section(text, "Beside other ways", head=1)
    assert first.split()[0] == "eager" and "+0.0%" in first
    assert "+10.0%" in next(line for line in section(text, "Beside other ways", head=1) if line.startswith("none"))
    assert "this plan" in last
    assert dataclasses.replace(plan, eager=None).over_eager(0.25) == 0.25
