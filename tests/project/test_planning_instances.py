"""The checker of the public planning instances: what it computes, and which lies it finds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from benchmarks import instances, instances_check, tight
from planner.common.limits import SolveLimits
from planner.ir.simulator import simulate
from planner.zoo import ZooModel
from tests.ir.test_simulate import random_schedule
from tests.models import Stack, rows
from tests.oracle import random_graph

if find_spec("scipy") is None:
    del instances.TORCH["torch ilp"]
LIMITS = SolveLimits(time_limit_seconds=0.1, deterministic=True)


@cache
def planned(seed: int) -> Any:
    return json.loads(json.dumps(instances.instance("random", tight.random_step(40, seed=seed), LIMITS)))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_checker_computes_what_the_simulator_does(seed: int) -> None:
    graph, costs = random_graph(seed, operations=9)
    schedule = random_schedule(graph, random.Random(seed))
    found = simulate(graph, costs, schedule)
    data = {**instances.written(graph, costs), "name": "random", "resident_bytes": 5, "budgets": []}
    instance = instances_check.Instance(json.loads(json.dumps(data)))
    assert instance.peak(schedule.order) == 5 + found.peak_bytes
    assert instance.added("", {"order": [*schedule.order]}) == pytest.approx(found.recompute_seconds)


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_of_an_instance_is_as_the_checker_finds_it(seed: int) -> None:
    data = planned(seed)
    assert 3 == len(data["budgets"]) <= len(data["plans"]) == len([*instances_check.checked(data)])


LIES: dict[str, tuple[str, Any]] = {
    "claims a peak": ("plan", lambda plan: {"peak_bytes": plan["peak_bytes"] - 1}),
    "claims to add": ("plan", lambda plan: {"added_seconds": 0.9 * plan["added_seconds"]}),
    "above the budget": ("plan", lambda plan: {"order": sorted(set(plan["order"]))}),
    "never runs": ("plan", lambda plan: {"order": plan["order"][:-1]}),
    "before operation 0 has run": ("plan", lambda plan: {"order": plan["order"][1:]}),
    "has -1": ("plan", lambda plan: {"order": [-1, *plan["order"]]}),
    "order is None": ("plan", lambda plan: {"order": None}),
    "the budgets of the instance": ("plan", lambda plan: {"budget_bytes": plan["budget_bytes"] + 1}),
    "is not recomputable": ("data", lambda d: {"operations": [{**o, "recomputable": False} for o in d["operations"]]}),
    "refutes the bound": ("data", lambda d: {"budgets": [{**b, "lower_bound_seconds": 1.0} for b in d["budgets"]]}),
    "and finite": ("data", lambda d: {"operations": [{**o, "seconds": float("nan")} for o in d["operations"]]}),
    "before it is made": ("data", lambda d: {"operations": d["operations"][::-1]}),
    "no operation makes value": ("data", lambda d: {"values": [*d["values"], d["values"][0]]}),
    "without recompute it claims": ("data", lambda d: {"peak_bytes": d["peak_bytes"] + 1}),
}


@pytest.mark.parametrize("complaint", LIES)
def test_every_kind_of_lie_is_found(complaint: str) -> None:
    data, (where, lie) = planned(0), LIES[complaint]
    plans = [{**plan, **lie(plan)} for plan in data["plans"][:1]] if where == "plan" else None
    with pytest.raises(instances_check.Wrong, match=complaint):
        list(instances_check.checked(data if plans else {**data, **lie(data)}, plans))


def test_an_archive_checks_itself_and_plans_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ZooModel(name="tiny", model=Stack(4), example_args=(rows(),))
    monkeypatch.setattr(instances, "MODELS", {"tiny": lambda: made})
    monkeypatch.setattr(instances, "find_spec", lambda name: True)
    archive, options = tmp_path / "out.zip", ["--time-limit", "0.2", "--json", str(tmp_path / "found.json")]
    instances.main([str(archive), *options])
    monkeypatch.setattr(instances, "instance", None)  # what is there is not made again
    instances.main([str(archive), "--resume", *options])
    zipfile.ZipFile(archive).extractall(tmp_path)
    mine = json.loads((tmp_path / "instances" / "tiny.json").read_text())["plans"][0]
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    (tmp_path / "lie.json").write_text(json.dumps({**mine, "peak_bytes": 0}))

    def run(*arguments: str) -> int:
        return subprocess.run([sys.executable, "-I", "-S", "check.py", *arguments], cwd=tmp_path).returncode

    assert (run(), run("instances/tiny.json", "mine.json"), run("instances/tiny.json", "lie.json")) == (0, 0, 1)
