"""Workspaces of matrix libraries by version and settings, and settings of the allocator that are not simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cost_models
from planner.measure import devices

MIB = 2**20


@pytest.mark.parametrize(
    ("architecture", "settings", "version", "expected"),
    [
        ("sm90", {}, "2.14.1+cu130", [32 * MIB]),
        ("sm90", {}, "2.11.0+cu130", [32 * MIB, MIB]),
        ("sm100", {}, "2.11.0", [8320 * 1024, MIB]),
        ("sm120", {}, "2.14.0", [32 * MIB]),
        ("sm80", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "2.14.0", [32 * MIB]),
        ("sm80", {"CUBLAS_WORKSPACE_CONFIG": ":16:8:4096:2"}, "2.14.0", [8320 * 1024]),
        ("gfx942", {}, "2.14.0", [204 * MIB]),
        ("", {}, "2.14.0", []),
    ],
)  # fmt: skip
def test_each_thread_has_its_own(
    architecture: str, settings: dict[str, str], version: str, expected: list[int]
) -> None:
    assert devices.workspaces(architecture, settings, version) == (*expected, *expected)


def test_what_a_device_file_says_stays() -> None:
    spec = replace(cost_models.device("a100-80"), library_bytes=3 * MIB)
    assert devices.pieces(spec) == (3 * MIB // 2, 3 * MIB // 2)
    assert devices.pieces(replace(spec, library_bytes=0)) == (0, 0)


def test_devices_are_described_under_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = devices.device_spec(torch.device("cpu"), "a100-80")
    assert spec.library_bytes == sum(devices.pieces(spec)) >= 2 * 32 * MIB


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_are_seen(name: str) -> None:
    assert not devices.expandable_segments({}) and not devices.expandable_segments({name: "expandable_segments:False"})
    assert devices.expandable_segments({name: "pinned_use_background_threads:True, expandable_segments:True"})
    assert not devices.not_simulated({name: "backend:native,expandable_segments:True"})


@pytest.mark.parametrize(
    "setting", ["backend:cudaMallocAsync", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2,>:4]"]
)
def test_what_is_not_simulated_is_named(setting: str) -> None:
    found = devices.not_simulated({"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{setting}"})
    assert found == f"PYTORCH_CUDA_ALLOC_CONF sets {setting}"
