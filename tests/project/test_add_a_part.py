"""The files that ``docs/add-a-*.md`` show: each dropped into a folder beside the built-in ones, found and used."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import cli
import cost_models
import planner
from planner import commands, exporters, runtimes, solvers, strategies

DOCS = Path(__file__).parent.parent.parent / "docs"
GRAPH_PLAN = Path(__file__).parent.parent / "data" / "schema1" / "graph.plan"
PLAN = ("plan", "minigpt", "--budget", "90%")
X = torch.randn(512, 32)


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Drop the file that a page shows into a new folder of a package."""
    dropped: list[ModuleType] = []

    def forget(package: ModuleType) -> None:
        for cached in vars(package).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()

    def drop_file(page: str, package: ModuleType, name: str) -> None:
        text = (DOCS / page).read_text(encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[0], "utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        forget(package)
        dropped.append(package)

    yield drop_file
    monkeypatch.undo()
    for package in dropped:
        forget(package)


def listed(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> bool:
    """Say whether the command line, asked for a name that is not quite one, tells this one."""
    assert cli.main([*arguments, f"{name}x"]) == 2
    return re.search(rf"\b{name}\b", capsys.readouterr().err) is not None


def test_a_solver(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-a-solver.md", solvers, "greedy")
    plan = planner.plan(net(), X, budget="80%", search="greedy")
    assert plan.solver == "greedy" and plan.recomputations and plan.peak_bytes <= plan.budget_bytes
    assert listed("greedy", capsys, *PLAN, "--solver")


def test_a_cost_model(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-a-cost-model.md", cost_models, "traffic")
    assert planner.plan(net(), X, budget="80%", target=planner.Target(cost_model="traffic")).cost_model == "traffic"
    assert listed("traffic", capsys, *PLAN, "--cost-model")


def test_a_runtime(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-a-runtime.md", runtimes, "counting")
    model = planner.auto_wrap(net(), X, budget="80%", runtime="counting")
    model(X).sum().backward()
    assert planner.plan_of(model).recomputations
    assert listed("counting", capsys, *PLAN, "--runtime")


def test_an_exporter(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-an-exporter.md", exporters, "lines")
    step = planner.study(net(), X, runtime="modules")
    export = planner.export(step.plan(budget=planner.Budget(activations="85%")), to="lines", study=step)
    assert export.text.splitlines()[-1].startswith("- ")
    assert listed("lines", capsys, "export", "minigpt", str(GRAPH_PLAN), "--to")


def test_a_strategy(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-a-strategy.md", strategies, "first_half")
    assert planner.plan(net(), X, budget=planner.Budget(strategy="first-half")).solver == "first-half"
    assert listed("first-half", capsys, *PLAN, "--strategy")


def test_a_command(drop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drop("add-a-command.md", commands, "models_of_cost")
    assert cli.main(["cost-models"]) == 0
    assert "roofline" in capsys.readouterr().out.split()
