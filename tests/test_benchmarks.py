"""Each benchmark at tiny sizes: that it runs, measures something, and writes whole files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import capture, common, exactness, partitioner
from planner.errors import UsageError
from planner.lowering import CPU_RANDOM_STATE_BYTES

TINY = ["--layers", "1", "--seq-len", "32", "--batch-size", "4"]


def _results(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"benchmark", "command", "date", "torch", "python", "threads", "cpus"} <= result.keys()
    assert str(path) not in path.read_text() + path.with_suffix(".md").read_text()
    return result


def test_exactness_runs_real_steps_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "exactness.json"
    arguments = ["--models", "minimind-26m", *TINY, "--budgets", "10", "--steps", "1", "--json", str(file)]
    assert exactness.main(arguments) == 0
    rows = _results(file)["rows"]
    kept = [row for row in rows if row["status"] != "infeasible"]
    assert {row["status"] for row in rows} > {"infeasible"}
    assert all(row["bitwise_equal"] and row["measured_peak_bytes"] <= row["budget_bytes"] for row in kept)
    assert rows[-1]["kind"] == "smallest feasible"

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a row that is there was run again")

    monkeypatch.setattr("planner.api.verify", never)
    assert exactness.main([*arguments, "--resume"]) == 0
    assert [row for row in _results(file)["rows"] if row["status"] != "infeasible"] == kept


def test_exactness_fails_where_a_promise_is_broken() -> None:
    row = {"status": "optimal", "kind": "budget", "bitwise_equal": True, "measured_peak_bytes": 10, "budget_bytes": 10}
    assert not exactness._broken(row)
    assert exactness._broken({**row, "measured_peak_bytes": 11})
    assert exactness._broken({**row, "bitwise_equal": False})
    assert exactness._broken({"status": "error"})


def test_capture_reads_what_a_child_process_used() -> None:
    idle = capture.finish([sys.executable, "-c", "print(1)"])
    hungry = capture.finish([sys.executable, "-c", "x = bytearray(2**28); print(len(x))"])
    assert (idle.exit_code, idle.output.strip()) == (0, "1")
    assert idle.peak_resident_bytes < 2**26  # nothing of what this process holds
    assert 2**28 <= hungry.peak_resident_bytes < 2**29


def test_capture_stops_what_takes_too_long() -> None:
    assert capture.finish([sys.executable, "-c", "import time; time.sleep(60)"], limit_seconds=0.2).exit_code == 124


def test_capture_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {
        "capture_seconds": 1.0,
        "solver": {"name": "ilp", "seconds": 0.5},
        "status": "optimal",
        "operations": [{}] * 3,
        "budget_bytes": 2**30,
        "activation_budget_bytes": 2**29,
        "baseline": {"peak_bytes": 2**31},
        "predicted": {"peak_bytes": 2**30, "overhead": 0.1},
        "lower_bound": {"overhead": 0.1},
    }
    finished = capture.Finished(
        exit_code=0, seconds=5.0, cpu_seconds=4.0, peak_resident_bytes=2**30, output=json.dumps(plan), errors=""
    )
    monkeypatch.setattr(capture, "finish", lambda _: finished)
    file = tmp_path / "capture.json"
    assert capture.main(["--models", "bert-large", "--json", str(file)]) == 0
    assert _results(file)["rows"][0]["operations"] == 3
    assert "| bert-large | 5.0 | 4.0 | 1.00 | met |" in file.with_suffix(".md").read_text()


def test_partitioner_is_read_back_whole(tmp_path: Path) -> None:
    file = tmp_path / "partitioner.json"
    arguments = [
        "--models",
        "gpt2",
        "--layers",
        "1",
        "--seq-len",
        "64",
        "--batch-size",
        "2",
        "--points",
        "60,20",
        "--devices",
        "a100-80",
    ]
    exit_code = partitioner.main([*arguments, "--json", str(file)])
    result = _results(file)
    assert exit_code == (0 if result["geometric_mean"] <= 0.65 and result["worst"] <= 1.0 else 1)
    tables = result["tables"]
    assert [table["case"] for table in tables] == list(partitioner.CASES)
    for row in (row for table in tables for row in table["rows"]):
        assert row["recomputed"] > 0
        random_state_bytes = row["peak_bytes"] - row["own_peak_bytes"]
        assert 0 <= random_state_bytes <= row["recomputed"] * CPU_RANDOM_STATE_BYTES
        assert row["planned"] is None or row["planned"]["peak_bytes"] <= row["peak_bytes"]


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        common.ratios("80,much")
    with pytest.raises(UsageError):
        common.chosen("gpt3", ["gpt2"])
    with pytest.raises(UsageError):
        common.check_destination(str(tmp_path))
    with pytest.raises(UsageError):
        exactness.main(["--resume", "--json", "-"])
    assert common._without_destination(["--json", "x", "--resume", "--models", "a", "--json=y"]) == ["--models", "a"]


def test_a_usage_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["capture", "--models", "gpt3"])
    assert common.run(capture.main) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: unknown name 'gpt3'") and errors.count("\n") == 1
