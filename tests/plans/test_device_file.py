"""Devices that a file describes, and what a driver tells of one that no table has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cli
import cost_models
from cost_models.devices import unknown_gpu
from planner.errors import DeviceFileError, UsageError
from planner.measure import calibration
from planner.plans import device_file

LEAST = {
    "name": "my card",
    "kind": "cuda",
    "memory_bytes": 2**34,
    "bandwidth_bytes_per_second": 1e12,
    "flops_per_second": {"float32": 1e13, "bfloat16": 1e14},
}


def written(path: Path, data: Any) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


@pytest.mark.parametrize("name", cost_models.devices.device_names())
def test_a_round_trip(name: str, tmp_path: Path) -> None:
    spec = cost_models.device(name)
    path = tmp_path / "device.json"
    device_file.save(spec, path)
    assert device_file.find(str(path)) == spec


def test_what_a_person_must_know_is_enough(tmp_path: Path) -> None:
    spec = device_file.load(written(tmp_path / "d.json", LEAST))
    assert (spec.alignment_bytes, spec.architecture, spec.cores) == (512, "sm80", 1)
    assert spec.library_bytes == cost_models.device("a100-80").library_bytes
    assert spec.peak_flops_per_second("float16") == 1e13
    cpu = device_file.load(written(tmp_path / "c.json", {**LEAST, "kind": "cpu"}))
    assert (cpu.alignment_bytes, cpu.architecture, cpu.library_bytes) == (64, "", 0)


@pytest.mark.parametrize("key", LEAST)
def test_a_missing_field_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceFileError, match=f"{key} is missing"):
        device_file.load(written(tmp_path / "d.json", {k: v for k, v in LEAST.items() if k != key}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tpu"}, "kind must be 'cpu' or 'cuda'"),
        ({"memory_bytes": "24GiB"}, "memory_bytes must be an integer"),
        ({"bandwidth_bytes_per_second": 0}, "above zero"),
        ({"bandwidth_bytes_per_second": -1.0}, "not negative"),
        ({"flops_per_second": {"bfloat16": 1e14}}, "float32 is missing"),
        ({"flops_per_second": {"float32": 1e14, "int8": 1e15}}, "int8"),
        ({"flops_per_second": {"float32": 0}}, "float32 must be above zero"),
        ({"launch_seconds": 0}, "launch_seconds must be above zero"),
        ({"bandwith": 3}, "bandwith is no field of a device"),
        ({"schema": 2}, "schema 2"),
        ({"name": "a\x1b[31m"}, "cannot be printed"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceFileError, match=message.replace("[", r"\[")):
        device_file.load(written(tmp_path / "d.json", {**LEAST, **change}))


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'h1000': did you mean h100.*calibrate"):
        device_file.find("h1000")


def test_a_card_that_no_table_has() -> None:
    spec = unknown_gpu(
        "NVIDIA GeForce RTX 4060", architecture="sm89", memory_bytes=2**33, multiprocessors=24, clock_hertz=2.46e9,
        memory_bits_per_second=17e9 * 128,
    )  # fmt: skip
    assert spec.peak_flops_per_second("float32") == pytest.approx(15.1e12, rel=0.01)  # what its data sheet says
    assert spec.bandwidth_bytes_per_second == 272e9
    assert spec.peak_flops_per_second("bfloat16") == 4 * spec.peak_flops_per_second("float32")


def test_calibrate_writes_a_file_that_device_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibration._SIZES, "cpu", 64)
    monkeypatch.setitem(calibration._STREAM_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(calibration, "_LEAST_SECONDS", 0.001)
    path = str(tmp_path / "mine.json")
    assert cli.main(["calibrate", "--output", path]) == 0
    assert capsys.readouterr().out.startswith(f"CALIBRATED cpu · plan for it with --device {path}\n")
    spec = device_file.find(path)
    table = cost_models.device("cpu")
    assert (spec.compute_efficiency, spec.bandwidth_efficiency) == (1.0, 1.0)
    assert spec.source.startswith("measured with torch")
    changed = ("flops_per_second", "bandwidth_bytes_per_second", "launch_seconds", "source")
    same = {key: getattr(spec, key) for key in (*changed, "compute_efficiency", "bandwidth_efficiency")}
    assert replace(table, **same) == spec
    assert cli.main(["calibrate", "--output", str(tmp_path / "mine.txt")]) == 2
    assert "ends in .json" in capsys.readouterr().err


def test_plans_for_a_device_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "d.json", LEAST)
    arguments = ["plan", "minigpt", "--layers", "1", "--seq-len", "16", "--budget", "100%"]
    assert cli.main([*arguments, "--device", path, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "my card"
    assert cli.main([*arguments, "--device", str(tmp_path / "none.json")]) == 2
    assert "cannot read device file" in capsys.readouterr().err
