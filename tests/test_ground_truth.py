"""Published instances whose optima are known, read from a folder beside the repository if it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from planner import solvers
from planner.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.problem import Problem

FOLDER = Path(
    os.environ.get("CHECKPOINT_PLANNER_INSTANCES")
    or Path(__file__).resolve().parent.parent.parent / "shared" / "ground_truth"
)


def load(name: str) -> tuple[Problem, dict[str, Any]]:
    """Read an instance as a problem in KiB and hundredths of milliseconds, with its known costs."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no instance {path}; set CHECKPOINT_PLANNER_INSTANCES to the folder that has it")
    data = json.loads(path.read_text())
    count, loss = data["num_operations"], data["loss_operation"]
    inputs: list[list[int]] = [[] for _ in range(count)]
    for source, reader in data["edges"]:
        inputs[reader].append(source)
    graph = TrainingGraph(
        operations=tuple(
            Operation(
                name=f"op{index}",
                key=f"op{index}",
                target="",
                inputs=tuple(inputs[index]),
                outputs=(index,),
                phase=Phase.FORWARD if index < loss else Phase.LOSS if index == loss else Phase.BACKWARD,
            )
            for index in range(count)
        ),
        values=tuple(Value(name=f"v{u}", size_bytes=size) for u, size in enumerate(data["output_kib"])),
        name=name,
    )
    costs = tuple(OperationCost(seconds=float(cost)) for cost in data["cost"])
    return Problem(graph=graph, costs=costs, budget_bytes=data["budget_kib"]), data
