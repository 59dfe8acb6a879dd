"""The folders of extras may be removed, all or each: the core still imports, plans and lists what is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
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


def test_the_core_runs_without_them(tmp_path: Path) -> None:
    for package in ("planner", "cost_models"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "extras"))
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"plan", "what-if", "fsdp", "huggingface"} <= set(done.stdout.split())
