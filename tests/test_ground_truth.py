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


QUICK = [
    "mobilenet_v2-10gb",
    "mobilenet_v2-7gb",
    "mobilenet_v2-8gb",
    "resnet50-10gb",
    "resnet50-8gb",
    "vgg16-10gb",
    "vgg16-8gb",
    "vgg16-9gb",
]


@pytest.mark.parametrize("name", QUICK)
def test_the_ilp_is_as_good_as_the_best_known(name: str) -> None:
    problem, data = load(name)
    solution = solvers.solve(problem, "ilp", time_limit_seconds=20)
    total = data["base_cost"] + solution.recompute_seconds
    bound = data["base_cost"] + solution.lower_bound_seconds
    assert problem.baseline.seconds == data["base_cost"]
    assert solution.peak_bytes <= data["budget_kib"]
    assert total <= 1.0002 * data["best_known_cost"]
    assert bound <= data["best_known_cost"] * (1 + 1e-9)
    assert bound >= 0.999 * data["lower_bound_cost"]


@pytest.mark.parametrize("name", ["mobilenet_v2-5gb", "mobilenet_v2-6gb", "resnet50-6gb"])
def test_tight_instances_get_a_plan_near_the_best_known(name: str) -> None:
    problem, data = load(name)
    solution = solvers.solve(problem, "auto", time_limit_seconds=8)
    assert solution.peak_bytes <= data["budget_kib"]
    assert data["base_cost"] + solution.recompute_seconds <= 1.03 * data["best_known_cost"]
    assert data["base_cost"] + solution.lower_bound_seconds <= data["best_known_cost"] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mobilenet_v2-7gb", "resnet50-10gb"])
def test_segmentation_costs_at_least_the_best_known(name: str) -> None:
    problem, data = load(name)
    solution = solvers.solve(problem, "sqrt")
    assert data["base_cost"] + solution.recompute_seconds >= data["lower_bound_cost"]
