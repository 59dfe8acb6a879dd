"""The files of schema 1 in ``tests/data/schema1``, as they were made: ``python -m tests.schema1 FOLDER``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cost_models
import planner
from planner.common.options import grouped

PLANS: dict[str, dict[str, Any]] = {
    "graph": {"runtime": "graph"},
    "graph_offload": {"runtime": "graph", "offload": True, "offload_at_least": 256},
    "graph_chunk": {"runtime": "graph", "chunk": 4},
    "modules": {"runtime": "modules"},
    "regional": {"runtime": "regional"},
    "inductor": {"runtime": "inductor"},
}
"""What each plan file was asked for, beside its budget."""

BUDGET = "70%"
ROWS, WIDTH = 96, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(self.dropout(torch.nn.functional.gelu(self.rise(x))))


class Toy(nn.Module):
    """Three blocks alike, so that every runtime can plan them, and a head with its loss, which can be chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x), labels)


def model() -> Toy:
    torch.manual_seed(0)
    return Toy()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=numbers), torch.randint(8 * WIDTH, (ROWS,), generator=numbers)


def make_plan(name: str) -> planner.Plan:
    return planner.plan(
        model(), inputs(), name="toy", **grouped(activation_budget=BUDGET, deterministic=True, **PLANS[name])
    )


def reports(plan: planner.Plan) -> dict[str, dict[str, Any]]:
    """Return what ``--json`` writes of questions that are asked of the toy and of its plans."""
    limits: dict[str, Any] = {"deterministic": True, "time_limit_seconds": 0.2}
    return {
        "what_if": planner.what_if(model(), inputs(), budgets=4, **grouped(**limits)).report(),
        "audit": planner.audit(model(), inputs(), current="every-layer", **grouped(runtime="graph", **limits)).report(),
        "explain": planner.explain(plan).report(),
        "check": planner.check(model(), inputs()).report(),
        "export": planner.export(plan, to="fsdp", study=planner.study(model(), inputs(), runtime="modules")).report(),
    }


def main(folder: Path) -> None:
    """Write every file anew."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = {name: make_plan(name) for name in PLANS}
    for name, plan in plans.items():
        proof = planner.verify(model(), inputs(), plan, timed_steps=1)
        dataclasses.replace(plan, verification=proof).save(folder / f"{name}.plan")
    for name, report in reports(plans["graph"]).items():
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    planner.save_profile(planner.profile(model(), inputs(), time_limit_seconds=5.0, name="toy"), folder / "toy.profile")
    device = {"schema": 1, **dataclasses.asdict(cost_models.device("a100-80"))}
    (folder / "device.json").write_text(json.dumps(device, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
