"""Strategies of established systems as plans: carried out for real, with the peak and the bits that are predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cli
import planner
from planner import strategies
from planner.analysis.audit import audit_study
from planner.analysis.study import Study
from planner.common.options import Search, grouped
from planner.errors import InfeasibleBudgetError, UsageError
from planner.plans.module_choices import modules_of
from tests.models import SEQUENCES as X
from tests.models import Transformer
from tests.runtimes.steps import Left, assert_same, measured_bytes, train, verified
from tests.strategies.test_strategies import FACTORY
from tests.tiers import tiered

QUICK = ("every", "save-on-cpu", "selective", "unsloth")
"""One of each kind of rule; the others are tried by the slow tier."""


@pytest.fixture(scope="module")
def step() -> Study:
    """Return the captured step, of which every strategy is a schedule."""
    return planner.study(Transformer(2), X)


def same_model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(2)


@pytest.fixture(scope="module")
def kept() -> Left:
    """Return what the step without a plan leaves behind."""
    return train(same_model(), X)


@pytest.mark.parametrize("name", tiered(strategies.known(), quick=QUICK))
def test_every_strategy_runs(name: str, step: Study, kept: Left) -> None:
    plan = step.plan(budget=planner.Budget(strategy=name), search=planner.Search(compare=False))
    assert plan.runtime == "graph" and plan.solver == name
    assert plan.recomputations or plan.offloading is not None
    model = planner.auto_wrap(same_model(), budget=plan)
    peak_bytes = measured_bytes(model, X) + plan.total_static_bytes
    assert_same(kept, train(model, X))
    assert 0.999 * plan.peak_bytes <= peak_bytes <= plan.peak_bytes == plan.budget_bytes


@pytest.mark.parametrize("name", tiered(["every-layer", "every-2"], quick=["every-2"]))
def test_choices_of_modules_run_as_such(name: str) -> None:
    plan = planner.plan(Transformer(2), X, **grouped(strategy=name, runtime="modules", compare=False))
    assert plan.runtime == "modules" and len(modules_of(plan)) == (2 if name == "every-layer" else 1)
    verified(Transformer(2), X, plan)
    assert plan.peak_bytes == plan.budget_bytes


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_what_a_strategy_could_not_pay_less_than_is_proven(runtime: str, step: Study) -> None:
    if runtime == "modules":
        step = planner.study(Transformer(2), X, runtime="modules")
    plan = step.plan(budget=planner.Budget(strategy="every-layer"), search=planner.Search(time_limit_seconds=0.5))
    assert 0 < plan.lower_bound_overhead < plan.overhead
    best = step.plan(budget=plan.budget_bytes, search=planner.Search(time_limit_seconds=0.5))
    assert plan.lower_bound_overhead <= best.overhead < plan.overhead
    assert any(row.name == "this plan" for row in plan.baselines)


def test_a_bound_is_of_plans_that_may_offload_what_the_strategy_does(step: Study) -> None:
    plan = step.plan(budget=planner.Budget(strategy="save-on-cpu"), search=planner.Search(time_limit_seconds=0.5))
    assert plan.offloading is not None
    assert max(value.size_bytes for value in plan.offloading.values) < 2**20, "none would be offloaded by default"
    found = audit_study(step, "save-on-cpu", Search(time_limit_seconds=0.5))
    assert found.now.peak_bytes == plan.peak_bytes and found.best.offloading is not None
    assert max(plan.lower_bound_overhead, found.best.lower_bound_overhead) <= found.best.overhead <= plan.overhead


def test_within_a_budget_or_not_at_all(step: Study) -> None:
    own = step.plan(budget=planner.Budget(strategy="every-2"), search=planner.Search(compare=False))
    above = step.plan(
        budget=planner.Budget(own.peak_bytes + 4096, strategy="every-2"), search=planner.Search(compare=False)
    )
    assert (above.peak_bytes, above.budget_bytes) == (own.peak_bytes, own.peak_bytes + 4096)
    with pytest.raises(InfeasibleBudgetError, match=rf"'every-2' needs .* \({own.peak_bytes} bytes\)") as caught:
        step.plan(budget=planner.Budget(own.peak_bytes - 64, strategy="every-2"))
    assert caught.value.minimum_feasible_peak_bytes == own.peak_bytes
    wrapped = planner.auto_wrap(Transformer(2), budget=planner.Plan.from_json(own.to_json()))
    wrapped(X).backward()
    assert planner.plan_of(wrapped).recomputations == own.recomputations


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"strategy": "every-2", "offload": True}, "decides itself what is offloaded"),
        ({"strategy": "every-2", "chunk": 4}, "in one piece"),
        ({"strategy": "every-2", "runtime": "regional"}, "not 'regional'"),
        ({"strategy": "selective", "runtime": "modules"}, "and 'every-N', not"),
        ({"strategy": "evry-2"}, "did you mean"),
        ({}, "give one budget"),
        ({"strategy": "every-2", "budget": "50%", "activation_budget": "50%"}, "give one budget"),
    ],
)
def test_what_does_not_go_together(told: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planner.plan(Transformer(), X, **grouped(**told))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(FACTORY, encoding="utf-8")
    asked = ["plan", "own.py:make", "--strategy", "every-2", "--time-limit", "0.5"]
    assert cli.main([*asked, "--verify", "--save", "own.plan", "--json", "own.json"]) == 0
    report = json.loads(Path("own.json").read_text(encoding="utf-8"))
    assert report["solver"]["name"] == "every-2"
    assert report["predicted"]["overhead"] > report["lower_bound"]["overhead"] > 0
    assert "gap-to-bound" not in capsys.readouterr().out
    assert cli.main([*asked, "--budget", "10%"]) == 3
    assert "'every-2' needs" in capsys.readouterr().err
    for arguments, words in (
        (["verify", "own.py:make"], "--strategy NAME, --plan FILE"),
        (["verify", "own.py:make", "--plan", "own.plan", "--strategy", "every-2"], "exclude each other"),
    ):
        assert cli.main(arguments) == 2
        streams = capsys.readouterr()
        assert words in streams.err and streams.err.count("\n") == 1 and not streams.out
