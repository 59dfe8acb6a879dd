"""Files of schema 1, most of an earlier version: each is read, says what it said, and is carried out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import PlanMismatchError, RuntimeUnsupportedError
from planner.plans import device_file
from planner.plans.plan import PlanOrigin
from planner.plans.reuse import check_same_step
from planner.report import render
from tests import schema1
from tests.tiers import tiered

FILES = Path(__file__).parent.parent / "data" / "schema1"
GONE = {"lossy", "rounding_error"}
"""Fields of what plans could do once: whoever reads a file passes them over."""


def load(name: str) -> planner.Plan:
    return planner.Plan.load(FILES / f"{name}.plan")


@pytest.mark.parametrize("name", schema1.PLANS)
def test_a_plan_says_what_it_said(name: str) -> None:
    without_gone = lambda fields: {key: value for key, value in fields.items() if key not in GONE}  # noqa: E731
    written = json.loads((FILES / f"{name}.plan").read_text(encoding="utf-8"), object_hook=without_gone)
    plan = load(name)
    assert json.loads(plan.to_json()) == written
    assert plan.report().keys() == written.keys() - {"decisions", "fingerprint", "values"}
    assert plan.runtime == schema1.PLANS[name]["runtime"] and plan.verification is not None
    console = Console(file=StringIO(), width=100)
    render(plan, console, full=True)
    assert console.file.getvalue().startswith("FITS ")  # type: ignore[attr-defined]
    assert plan.peak_bytes <= plan.budget_bytes
    assert (plan.offloading is not None) == ("offload" in schema1.PLANS[name])


@pytest.mark.parametrize("name", tiered(schema1.PLANS, quick=["graph", "graph_offload", "modules"]))
def test_a_plan_is_carried_out(name: str) -> None:
    plan = load(name)
    before = plan.verification
    try:
        proof = planner.verify(schema1.model(), schema1.inputs(), plan, timed_steps=1)
    except PlanMismatchError:
        assert not torch.__version__.startswith("2.13"), "only another torch may trace another graph"
        return
    assert proof.agrees, proof.differences
    assert before is not None and proof.exact == before.exact
    assert proof.peak_bytes <= plan.peak_bytes


def test_a_plan_that_no_runtime_carries_out_is_refused() -> None:
    plan = replace(load("modules"), offloading=load("graph_offload").offloading)
    for run in (
        lambda: planner.verify(schema1.model(), schema1.inputs(), plan),
        lambda: planner.auto_wrap(schema1.model(), schema1.inputs(), budget=plan),
        lambda: planner.auto_wrap(schema1.model(), schema1.inputs(), budget=planner.Budget(plan=plan, replan=True)),
    ):
        with pytest.raises(RuntimeUnsupportedError, match="the plan offloads, and the runtime 'modules' does not offl"):
            run()


@pytest.mark.parametrize("name", tiered(schema1.PLANS, quick=["graph", "modules"]))
def test_a_plan_of_another_model_is_refused(name: str) -> None:
    other = schema1.model()
    other.blocks[1].rise = nn.Linear(schema1.WIDTH, 4 * schema1.WIDTH, bias=False)
    with pytest.raises(PlanMismatchError):
        planner.auto_wrap(other, schema1.inputs(), budget=load(name))


def fields(data: Any, path: str = "") -> Iterator[str]:
    """Return where there is a number, a text, a truth or nothing, whatever it is."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from fields(value, f"{path}.{key}")
    elif isinstance(data, list):
        for value in data:
            yield from fields(value, f"{path}[]")
    else:
        yield f"{path}: {'number' if type(data) in (int, float) else type(data).__name__}"


def test_answers_have_the_fields_that_they_had() -> None:
    for name, report in schema1.reports(schema1.make_plan("graph")).items():
        written = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
        assert set(fields(written)) - set(fields(json.loads(json.dumps(report)))) == set(), name


def test_explanations_of_plan_files_are_the_same() -> None:
    report, written = planner.explain(load("graph")).report(), json.loads((FILES / "explain.json").read_text("utf-8"))
    assert without_wording(json.loads(json.dumps(report))) == without_wording(written)


def without_wording(report: dict[str, Any]) -> dict[str, Any]:
    """Leave of sentences the verdict and the figures: how they say it may change."""
    for value in report.get("values", ()):
        verdict, _, rest = value["reason"].partition(":")
        value["reason"] = [verdict, *re.findall(r"[\d.]+ (?:[KMG]iB|B|us|ms|s|operations|runs)", rest)]
    return report


def test_builds_of_one_version_of_torch_are_the_same() -> None:
    plan = load("graph")
    version = str(plan.fingerprint["torch"]).split("+")[0]
    origin = PlanOrigin(fingerprint=plan.fingerprint)
    check_same_step(replace(plan, fingerprint={**plan.fingerprint, "torch": f"{version}+cu130"}), origin)
    with pytest.raises(PlanMismatchError, match=r"torch is '2\.0\.0"):
        check_same_step(replace(plan, fingerprint={**plan.fingerprint, "torch": "2.0.0+cpu"}), origin)


def test_a_profile_is_planned_with() -> None:
    profile = replace(planner.load_profile(FILES / "toy.profile"), torch=torch.__version__)
    plan = planner.plan(schema1.model(), schema1.inputs(), **grouped(budget="100%", profile=profile, compare=False))
    assert plan.cost_model == "measured" and profile.model == "toy"


def test_a_device_is_planned_for() -> None:
    path = FILES / "device.json"
    device = device_file.load(path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"schema": 1, **asdict(device)}
    asked = grouped(budget="100%", device=str(path), compare=False)
    assert planner.plan(schema1.model(), schema1.inputs(), **asked).device
