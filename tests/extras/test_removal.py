"""The folders of extras may be removed, all or each: the core still imports, plans and lists what is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXTRAS = sorted(path.parent.name for path in (ROOT / "planner" / "extras").glob("*/__init__.py"))

PROGRAM = """
import torch, planner
from planner import exporters
from planner.commands import commands

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
planner.auto_wrap(model, torch.randn(256, 64), budget="100%")
plan = planner.plan(model, torch.randn(64, 64), budget="100%", runtime="modules")
assert planner.export(plan, to="fsdp").text
print(*(command.name for command in commands()), *exporters.targets())
"""


@pytest.mark.parametrize("removed", [EXTRAS, *(pytest.param([name], marks=pytest.mark.slow) for name in EXTRAS)])
def test_the_core_runs_without_them(removed: list[str], tmp_path: Path) -> None:
    for package in ("planner", "cost_models"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in removed:
        shutil.rmtree(tmp_path / "planner" / "extras" / name)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert {"plan", "what-if", "fsdp", "huggingface"} <= found
    assert ("megatron" in found) == ("exporters" not in removed)
