"""What a present set-up costs: figures held against the simulator, the verdict, refusals, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import cli
import planner
from planner.analysis.audit import Audit, audit_study, check_current
from planner.analysis.study import Study
from planner.common.options import Search
from planner.errors import UsageError
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans.comparison import every_nth_layer
from planner.plans.plan import NoPlanFitsError
from planner.report.comparisons import render_audit
from tests.example_graphs import transformer
from tests.planned import printed, study_of
from tests.strategies.test_strategies import FACTORY

GRAPH, COSTS = transformer(4)
STATIC = GRAPH.total_static_bytes


def audited(study: Study, current: Any, budget: Any = None, **search: Any) -> Audit:
    return audit_study(study, current, Search(**search), budget)


def answer(audit: Audit) -> str:
    return printed(render_audit, audit)


@pytest.mark.parametrize(("current", "n"), [("none", 0), ("every-layer", 1), ("every-2", 2), ("every-3", 3)])
def test_the_figures_are_those_of_the_simulator(current: str, n: int) -> None:
    schedule = every_nth_layer(GRAPH, n) if n else Schedule.keep_all(GRAPH)
    assert schedule is not None
    found = simulate(GRAPH, COSTS, schedule)
    step_seconds = found.seconds - found.recompute_seconds
    audit = audited(study_of(GRAPH, COSTS), current, budget="75%", time_limit_seconds=1.0)
    assert audit.now.peak_bytes == found.peak_bytes + STATIC
    assert audit.now.overhead == pytest.approx(found.recompute_seconds / step_seconds)
    best = simulate(GRAPH, COSTS, audit.best.schedule_for(GRAPH))
    assert best.peak_bytes <= found.peak_bytes and audit.best.recompute_seconds == best.recompute_seconds
    assert audit.best.lower_bound_overhead <= audit.best.overhead <= audit.now.overhead
    assert audit.fits == (audit.now.peak_bytes <= (audit.budget_bytes or 0))
    assert audit.within_budget is not None and audit.within_budget.peak_bytes <= (audit.budget_bytes or 0)
    assert audit.report()["current"]["recompute_seconds"] == found.recompute_seconds


def test_the_verdict() -> None:
    audit = audited(study_of(GRAPH, COSTS), "every-layer", time_limit_seconds=1.0)
    first = answer(audit).splitlines()[0]
    percent = r"\+(\d+\.\d)%"
    found = re.fullmatch(
        rf"you pay {percent}, {percent} would do at the same peak \(proven: no plan pays less than {percent}\)", first
    )
    assert found is not None, first
    pays, would_do, bound = map(float, found.groups())
    assert pays == pytest.approx(audit.now.overhead * 100, abs=0.05)
    assert would_do == pytest.approx(audit.best.overhead * 100, abs=0.05)
    assert audit.best.lower_bound_overhead * 100 - 0.1 <= bound <= audit.best.lower_bound_overhead * 100 + 1e-9
    assert bound <= would_do < pays
    assert f"--budget {audit.best.budget_bytes}" in " ".join(answer(audit).split())


def test_the_verdict_at_a_budget() -> None:
    none = audited(study_of(GRAPH, COSTS), "none", budget="75%", time_limit_seconds=1.0)
    assert re.match(r"you pay nothing; it does not fit .* MiB, where \+\d", answer(none))
    roomy = audited(study_of(GRAPH, COSTS), "none", budget="100%", time_limit_seconds=1.0)
    assert "it fits" in answer(roomy) and "where nothing better is known" in answer(roomy)
    tight = audited(study_of(GRAPH, COSTS), "every-layer", budget="38%", time_limit_seconds=1.0)
    assert tight.no_plan_fits is not None and "and no plan is known that does" in answer(tight)
    assert tight.report()["budget"]["no_plan_fits"]["status"] == "infeasible"
    unproven = audited(study_of(GRAPH, COSTS), "every-layer", solver="sqrt")
    assert "no lower bound proven" in answer(unproven)


def test_where_a_solver_finds_nothing_better_the_set_up_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    error = NoPlanFitsError("", report={}, minimum_feasible_peak_bytes=0, operation="")
    monkeypatch.setattr(Study, "plan", Mock(side_effect=error))
    audit = audited(study_of(GRAPH, COSTS), "every-2")
    assert audit.best.recompute_seconds == audit.now.recompute_seconds > 0
    assert "nothing better is known at the same peak" in answer(audit)


def test_the_optimizers_step_counts() -> None:
    audit = audited(study_of(GRAPH, COSTS, optimizer_step_bytes=2**28), "every-layer", time_limit_seconds=1.0)
    assert audit.now.whole_step_peak_bytes == audit.now.optimizer_peak_bytes > audit.now.peak_bytes
    assert audit.best.budget_bytes == audit.now.optimizer_peak_bytes and audit.best.overhead == 0


def test_set_ups_that_are_not_known() -> None:
    refused = {"every-leyer": "did you mean 'every-layer'", "every-0": "every-2", "all": "none, every-layer"}
    for wrong, words in refused.items():
        with pytest.raises(UsageError, match=re.escape(words)):
            check_current(wrong)


# Real models.


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(FACTORY, encoding="utf-8")
    arguments = ["audit", "own.py:make", "--current", "every-layer", "--time-limit", "1"]
    assert cli.main([*arguments, "--budget", "90%", "--json", "audit.json"]) == 0
    shown = capsys.readouterr().out
    report = json.loads(Path("audit.json").read_text(encoding="utf-8"))
    assert shown.startswith(f"you pay +{report['current']['overhead'] * 100:.1f}%")
    assert report["same_peak"]["overhead"] <= report["current"]["overhead"]
    assert report["same_peak"]["peak_bytes"] <= report["current"]["peak_bytes"]
    assert report["budget"]["plan"]["peak_bytes"] <= report["budget"]["budget_bytes"]

    assert cli.main([*arguments, "--budget", "1KiB", "--json", "-"]) == 3
    streams = capsys.readouterr()
    assert json.loads(streams.out)["budget"]["plan"] is None
    assert re.search(r"smallest (feasible budget|budget known)", streams.err)


def test_a_model_that_checkpoints_itself_is_told_what_to_do() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.gradient_checkpointing = True  # type: ignore[assignment]
    model.disable_gradient_checkpointing = model.train  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"model\.disable_gradient_checkpointing\(\).*current='every-layer'.*already"):
        planner.audit(model, torch.randn(4, 8), current="none")
