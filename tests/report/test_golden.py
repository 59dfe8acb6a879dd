"""What reports look like, held against files at the widths of terminals.

Set ``UPDATE_GOLDEN=1`` to write the files anew, and read the difference before committing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from planner.analysis.explain import explain
from planner.analysis.trade_off.answers import Answers
from planner.plans.plan import NoPlanFitsError
from planner.report import render, render_infeasible
from planner.report.explain import render as render_explanation
from planner.report.what_if import render as render_what_if
from tests.analysis.test_explain import plan_with_drops
from tests.analysis.test_what_if import fixed_curve
from tests.example_graphs import transformer
from tests.planned import make_plan, printed
from tests.report.test_report import example_plan

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def no_plan_fits() -> NoPlanFitsError:
    with pytest.raises(NoPlanFitsError) as caught:
        make_plan(*transformer(8), budget="64MiB", solver="sqrt", deterministic=True, time_limit_seconds=0.5)
    return caught.value


REPORTS: dict[str, tuple[Callable[[Console], object], tuple[int, ...]]] = {
    "plan": (lambda console: render(example_plan(), console, full=True), (80, 100, 160)),
    "screen": (lambda console: render(example_plan(verified=False), console), (80, 100)),
    "screen_measured": (lambda console: render(example_plan(), console), (100,)),
    "infeasible": (lambda console: render_infeasible(no_plan_fits().report, console), (80, 100, 160)),
    "explain": (lambda console: render_explanation(explain(plan_with_drops()), console, largest=6), (80,)),
    "explain_module": (lambda c: render_explanation(explain(plan_with_drops(), "transformer.h.2"), c), (80,)),
    "what_if": (lambda console: render_what_if(Answers(curve=fixed_curve()), console), (80,)),
}


FILES = [(name, width) for name, (_, widths) in REPORTS.items() for width in widths]


@pytest.mark.parametrize(("name", "width"), FILES)
def test_golden_report(name: str, width: int) -> None:
    text = printed(lambda _, console: REPORTS[name][0](console), None, width=width)
    path = GOLDEN / f"{name}_{width}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert all(len(line) <= width for line in text.splitlines()[1:]), "only the verdict may be longer"


def test_every_file_is_of_a_report() -> None:
    expected = {f"{name}_{width}.txt" for name, width in FILES}
    assert {path.name for path in GOLDEN.iterdir()} == expected
