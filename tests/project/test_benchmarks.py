"""Each benchmark at tiny sizes: that it runs, measures something, and writes whole files."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import planner
from benchmarks import capture, common, compare, comparison, coverage, full_save, gpu, libraries, peers, trial
from benchmarks.libraries import architectures
from planner.errors import UsageError
from planner.zoo import ZooModel
from tests.models import Layers, Stack, linear, rows


def _results(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"benchmark", "command", "date", "torch", "python", "threads", "cpus"} <= result.keys()
    assert str(path) not in path.read_text() + path.with_suffix(".md").read_text()
    return result


def test_capture_reads_what_a_child_process_used() -> None:
    idle = capture.finish([sys.executable, "-c", "print(1)"])
    hungry = capture.finish([sys.executable, "-c", "x = bytearray(2**28); print(len(x))"])
    assert (idle.exit_code, idle.output.strip()) == (0, "1")
    assert idle.peak_resident_bytes < 2**26  # nothing of what this process holds
    assert 2**28 <= hungry.peak_resident_bytes < 2**29


def test_capture_stops_what_takes_too_long() -> None:
    assert capture.finish([sys.executable, "-c", "import time; time.sleep(60)"], limit_seconds=0.2).exit_code == 124


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        common.ratios("80,much")
    with pytest.raises(UsageError):
        common.chosen("gpt3", ["gpt2"])
    with pytest.raises(UsageError):
        common.check_destination(str(tmp_path))
    with pytest.raises(UsageError):
        full_save.main(["--resume", "--json", "-"])
    assert common._without_destination(["--json", "x", "--resume", "--models", "a", "--json=y"]) == ["--models", "a"]
    for arguments, is_said in ((["--resume"], True), ([], False)):
        page = common.page("Title", common.environment("full_save", arguments))
        assert ("kept what earlier runs had found" in page) is is_said


@pytest.mark.parametrize("module", sorted(path.stem for path in Path(common.__file__).parent.glob("*.py")))
def test_every_benchmark_can_be_started(module: str) -> None:
    found = importlib.import_module(f"benchmarks.{module}")
    if hasattr(found, "main") and module != "gpu_cases":  # gpu starts that one, with a case for an argument
        with pytest.raises(SystemExit, match="0"):
            found.main(["--help"])


@pytest.mark.slow
def test_compare_runs_all_ways_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "compare.json"
    options = ["--ratios", "50", "--shares", "90", "--seconds", "1", "--time-limit", "1", "--json", str(file)]
    compare.main(["--models", "minimind-26m", *options])
    (entry,) = _results(file)["models"]
    ran = [row for row in entry["rows"] if row["status"] == "run"]
    assert {"eager", "planned at 90% of eager's"} <= {row["way"] for row in ran} and all(
        row["time_ratio"] > 0 for row in ran
    )
    assert (tmp_path / "compare" / "minimind-26m.svg").exists()


def test_compiled_ways_run_beside_plans() -> None:
    """What a plan leaves in a model that it is taken out of must not be in the way of what others compile."""
    model, x = Stack(2), rows()
    expected = model(x)
    planner.auto_wrap(model, budget=planner.Budget(activations="90%"), search=planner.Search(time_limit_seconds=0.5))
    model(x).backward()
    compare._take_out(ZooModel(name="", model=model, example_args=(x,)))
    compiled = torch.compile(peers._own_call(model), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)


def test_alternatives_are_compared_at_the_same_or_a_lower_peak():
    def row(
        way: str, peak: int, ratio: float, predicted: float | None = None, gradients: str = "equal"
    ) -> common.Result:
        return {"way": way, "ours": predicted is not None, "status": "run", "peak_bytes": peak, "time_ratio": ratio,
                "predicted_overhead": predicted, "gradients": gradients}  # fmt: skip

    rows = [
        row("eager", 100, 1.0),
        row("every layer", 40, 1.30),
        row("every second layer", 70, 1.01),  # within the noise
        row("partitioner dp 0.5", 60, 1.20, gradients="wrong"),
        row("planned a", 60, 1.02, 0.02),
        row("planned b", 40, 1.12, 0.11),
        row("planned c", 39, 1.10, 0.12),  # measured to be faster, and not to be trusted to be
    ]
    found = comparison.against(rows)
    (point,) = found["compared"]
    assert point["way"] == "every layer" and point["ours"] == pytest.approx(0.12)
    assert point["quotient"] == pytest.approx(0.4)
    assert found["lowest_peak_bytes"] == {"ours": 39, "theirs": 40}
    (layer,) = (row for row in comparison.summary([{"model": "m", **found}]) if row["kind"] == "every layer")
    assert layer["met"] and layer["points"] == 1


def test_a_plan_is_worse_where_it_pays_more_by_over_twice_the_error():
    def worse(paid: float, error: float) -> bool:
        shared = {"status": "run", "gradients": "equal", "time_ratio_error": error}
        eager = {"way": "eager", "ours": False, "peak_bytes": 100, "time_ratio": 1.0, **shared}
        theirs = {"way": "every layer", "ours": False, "peak_bytes": 50, "time_ratio": 1.1, **shared}
        times = {"time_ratio": paid, "predicted_overhead": 0.1}
        ours = {"way": "planned", "ours": True, "peak_bytes": 50, **times, **shared}
        entry = {"model": "m", **comparison.against([eager, theirs, ours])}
        (row,) = (row for row in comparison.summary([entry]) if row["kind"] == "every layer")
        return bool(row["worse"])

    assert worse(1.2, 0.03) and not worse(1.2, 0.04) and not worse(1.05, 0.0)
    assert comparison.error_of([1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx(1.2533 * 0.3 / 1.349 / 5**0.5)


class Dropping(Layers, first=linear(8, 8), second=linear(8, 8)):
    """Dropout, which eager draws on a CPU as a mask of floats and a captured step as one of truths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.first(x))).sum()


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks know one model only, of that name."""
    model = ZooModel(name="dropping", model=Dropping(), example_args=(torch.randn(512, 8),))
    monkeypatch.setattr(full_save, "CASES", {"dropping": None})
    monkeypatch.setattr(full_save, "build", lambda name: model)


@pytest.mark.usefixtures("dropping")
def test_full_save_holds_a_captured_step_against_eager(tmp_path: Path) -> None:
    file = tmp_path / "full_save.json"
    full_save.main(["--seconds", "0.1", "--json", str(file)])
    (entry,) = _results(file)["models"]
    assert entry["bitwise_equal"] and entry["peak_ratio"] < 1.0 and entry["time_ratio"] > 0
    assert "1 models of the zoo and near it: " in file.with_suffix(".md").read_text()


class Dying(nn.Module):
    """Ends the process, as what runs out of memory does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(3)


def _dying() -> trial.Case:
    return trial.Case(Dying(), lambda: ((torch.randn(2),), {}))


def test_every_architecture_can_be_sent_to_a_process_of_its_own() -> None:
    diffused = dict(libraries._diffusers())  # built only where diffusers is installed
    for name, make in (architectures() | diffused).items():
        assert pickle.loads(pickle.dumps(make)).func is make.func, name


def test_coverage_fails_where_a_promise_is_broken() -> None:
    step = {"measured_bytes": 10, "predicted_bytes": 10, "budget_bytes": 10}
    row = {"status": "run", "wrong": [], "eager_repeats_itself": True, "steps": [step], "warnings": [], "errors": ""}
    assert not coverage.failures(row)
    over = {**row, "steps": [step, {**step, "measured_bytes": 11}]}
    assert "1 steps over the budget, by up to 10.0%" in coverage.failures(over)[0]
    assert not coverage.failures({**over, "warnings": ["UserWarning: some steps of M break the budget"]})
    assert coverage.failures({**row, "wrong": ["step 1: loss or outputs differ"]})
    assert coverage.failures({**row, "touched": ["the random state is another"]})
    assert coverage.failures({**row, "errors": "Traceback (most recent call last):"})
    assert coverage.failures({"status": "crashed", "reason": "KeyError: 1"})
    assert not coverage.failures({"status": "refused", "reason": "CaptureError: no"})


@pytest.mark.slow
def test_coverage_outlives_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "coverage.json"
    monkeypatch.setattr(coverage, "architectures", lambda: {"dying": _dying})
    assert coverage.main(["--json", str(file)]) == 1
    (row,) = _results(file)["models"]
    assert (row["status"], row["reason"]) == ("crashed", "the process ended with exit code 3")


_ROW = {
    "case": "model", "model": "gpt2", "what": "planned for 60%", "seconds": 0.02, "status": "optimal",
    "budget_bytes": 101 * 2**20, "predicted_overhead": 0.1,
    "predicted_allocated_bytes": 100 * 2**20, "measured_allocated_bytes": 100 * 2**20,
    "predicted_reserved_bytes": 200 * 2**20, "measured_reserved_bytes": 200 * 2**20,
}  # fmt: skip


def test_gpu_fails_where_a_prediction_does_not_hold() -> None:
    assert not gpu._misses(_ROW)
    assert gpu._misses({**_ROW, "measured_allocated_bytes": 100.6 * 2**20})
    assert gpu._misses({**_ROW, "budget_bytes": 99 * 2**20})
    assert gpu._misses({**_ROW, "measured_reserved_bytes": 207 * 2**20})
    for broken in (
        {"status": "error", "error": "x"},
        {"within_control": False},
        {"attention_differences": 3},
        {"same_step": False},
        {"status": "out of memory"},
    ):
        assert gpu._misses({"case": "any", **broken})


_CHILD = """
import json, sys, time
what = json.loads(sys.argv[1])
print("working", file=sys.stderr, flush=True)
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps({"row": 1}), flush=True)
if what["case"] == "hangs":
    time.sleep(60)
if what["case"] == "dies":
    raise SystemExit(3)
"""


def test_gpu_outlives_what_hangs_or_dies(tmp_path: Path) -> None:
    found: list[tuple[str, Any]] = []
    chosen = [gpu.Case({"case": name}, 0.5) for name in ("hangs", "dies", "works")]
    gpu.run_all(
        chosen,
        time.monotonic() + 60,
        lambda case, row: found.append((case.title, row.get("error", row.get("row")))),
        tmp_path / "log",
        command=(sys.executable, "-c", _CHILD),
    )
    assert found == [
        ("hangs", 1),
        ("hangs", "cut off after 1 rows; see the log"),
        ("dies", 1),
        ("dies", "exit code 3 after 1 rows; see the log"),
        ("works", 1),
    ]
    assert (tmp_path / "log").read_text().count("working") == 3
