"""Measured costs: every distinct operation once, kept as data, never taken for another step's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import cli
import planner
from cost_models.measured import Measurement, Profile
from planner.capture import fake_mode, operands
from planner.common.options import grouped
from planner.errors import ProfileFileError, ProfileMismatchError, UsageError
from planner.measure import profiling
from tests.models import Trained

BATCH = 512


def net(depth: int = 6) -> Trained:
    return Trained(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(depth)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return planner.profile(net(), torch.randn(BATCH, 64), name="net")


def planned(profile: Profile | None, batch: int = BATCH, **options: Any) -> planner.Plan:
    asked = {"activation_budget": "80%", "compare": False, "profile": profile, **options}
    return planner.plan(net(), torch.randn(batch, 64), **grouped(**asked))


def test_what_repeats_is_measured_once(profile: Profile) -> None:
    known = {operation.signature for operation in profile.operations} - {""}
    assert known == set(profile.measurements)
    assert len(known) < len([o for o in profile.operations if o.signature]) / 2
    assert all(0 < m.seconds < 1 and m.runs >= 1 for m in profile.measurements.values())
    assert profile.inputs == ((BATCH, 64),)
    assert (profile.device, profile.torch, profile.model) == ("cpu", torch.__version__, "net")


def test_the_random_state_is_left_alone() -> None:
    model, data = net(2), torch.randn(4, 64)
    before = torch.get_rng_state()
    planner.profile(model, data)
    assert torch.equal(before, torch.get_rng_state())


def test_a_file_gives_back_the_same_profile(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    planner.save_profile(profile, path)
    assert planner.load_profile(path) == profile


def test_plans_take_their_times_from_it(profile: Profile) -> None:
    plan = planned(profile)
    assert plan.cost_model == "measured"
    once = sum(profile.measurements[o.signature].seconds for o in profile.operations if o.signature)
    assert plan.baseline_step_seconds == pytest.approx(once)
    slow = replace(
        profile,
        measurements={
            s: replace(m, seconds=m.seconds * (1000 if "tanh" in s else 1)) for s, m in profile.measurements.items()
        },
    )
    again = [row for row in planned(slow).operations if row.operation == "aten.tanh.default"]
    assert all(row.runs == 1 for row in again), "what is measured to be slow is not run twice"


def test_measured_by_name_does_the_same_on_the_spot() -> None:
    plan = planned(None, cost_model="measured")
    assert plan.cost_model == "measured" and plan.baseline_step_seconds > 0
    with pytest.raises(UsageError, match="cannot be measured here"):
        planned(None, cost_model="measured", device="h100")


def test_a_measured_plan_is_applied_without_measuring_again(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = planned(profile), tmp_path / "plan.json"
    plan.save(path)
    monkeypatch.setattr(profiling, "measure", None)
    wrapped = planner.auto_wrap(net(), budget=planner.Plan.load(path))
    wrapped(torch.randn(BATCH, 64)).backward()
    used = planner.plan_of(wrapped)
    assert used is not None
    assert (used.cost_model, used.overhead, used.status) == ("measured", plan.overhead, plan.status)


def test_another_step_device_or_version_is_refused(profile: Profile) -> None:
    with pytest.raises(ProfileMismatchError, match="another step"):
        planner.plan(net(depth=3), torch.randn(2 * BATCH, 64), **grouped(activation_budget="80%", profile=profile))
    with pytest.raises(ProfileMismatchError, match="another step"):
        planned(profile, batch=4 * BATCH)
    with pytest.raises(ProfileMismatchError, match="profile is of cpu, the plan for h100"):
        planned(profile, device="h100")
    with pytest.raises(ProfileMismatchError, match=r"torch 1\.0"):
        planned(replace(profile, torch="1.0"))


def test_what_cannot_be_run_alone_falls_back_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_known", {})
    time_one = profiling._time

    def out_of_memory(called: Any, *others: Any) -> Measurement:
        if "tanh" in str(called.node.target):
            raise RuntimeError("not enough memory: you tried to allocate a lot")
        return time_one(called, *others)

    monkeypatch.setattr(profiling, "_time", out_of_memory)
    plan = planned(None, cost_model="measured")
    (warning,) = [warning for warning in plan.warnings if warning.rule == "not-measured"]
    assert "aten.tanh.default" in warning.evidence


def test_time_is_bounded_and_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_known", {})
    some = planner.profile(net(), torch.randn(BATCH, 64), time_limit_seconds=1e-9)
    assert len(some.measurements) < 2
    assert {operation.signature for operation in some.operations if operation.signature} - some.measurements.keys()
    with pytest.raises(UsageError, match="time limit"):
        planner.profile(net(), torch.randn(BATCH, 64), time_limit_seconds=0)


def spoilt(profile: Profile, change: Any, path: Path) -> Path:
    planner.save_profile(profile, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema=99), "schema 99"),
        (lambda data: data.update(kind="plan"), "this is no profile"),
        (lambda data: data["measurements"][0].update(seconds=-1.0), "seconds"),
        (lambda data: data["operations"][0].update(measurement=10**6), "names measurement"),
    ],
)
def test_damaged_files_are_refused(profile: Profile, change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileFileError, match=message):
        planner.load_profile(spoilt(profile, change, tmp_path / "bad.json"))


def test_the_command_line_records_and_uses_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def make(depth=3, width=64):\n"
        "    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(depth)]\n"
        "    return torch.nn.Sequential(*layers), torch.ones(256, width)\n"
        "def other():\n"
        "    return make(4, 32)\n"
    )
    model, file = ["--model", f"{tmp_path / 'net.py'}:make"], str(tmp_path / "profile.json")
    assert cli.main(["profile", *model, "--output", file]) == 0
    assert capsys.readouterr().out.startswith("MEASURED ")
    assert cli.main(["plan", *model, "--activation-budget", "90%", "--profile", file, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["cost_model"] == "measured"
    assert cli.main(["plan", f"{tmp_path / 'net.py'}:other", "--budget", "80%", "--profile", file]) == 2
    assert "another step" in capsys.readouterr().err
    assert cli.main(["plan", *model, "--budget", "80%", "--cost-model", "guess"]) == 2
    assert "roofline" in capsys.readouterr().err
    assert cli.main(["profile", *model, "--output", str(tmp_path / "no" / "where")]) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a switch of glibc")
def test_kept_memory_is_not_taken_from_the_system_again() -> None:
    """In a process of its own, since the switch stays."""
    program = """
import resource, torch
from planner.capture.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(2)))
assert keep_freed_memory()
print(min(faults() for _ in range(5)))  # the first ones make the heap as large as it has to be
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    by_default, kept = map(int, done.stdout.split())
    assert kept < 2_000 < 20_000 < by_default


def test_indices_spread_over_what_they_index() -> None:
    """All zeros would meet at one place: the worst that a gradient of an index can be given."""
    graph = fx.Graph()
    with fake_mode():
        values = {"table": torch.empty(100, 7, 8), "rows": torch.empty(64, dtype=torch.int64)}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    call = graph.call_function(torch.ops.aten.index.Tensor, (nodes["table"], [nodes["rows"], nodes["rows"]]))
    with operands.running_alone(torch.device("cpu")):
        (table, (rows, columns)), _ = operands.arguments(call, torch.device("cpu"))
        assert table[rows, columns].shape == (64, 8)
    assert sorted(set(rows.tolist())) == list(range(7))
