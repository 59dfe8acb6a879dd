"""Published instances whose optima are known, read from a folder beside the repository if it is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner import solvers
from planner.ir.instances import Reference, load_instance
from planner.ir.problem import Problem
from tests.tiers import tiered

FOLDER = Path(
    os.environ.get("CHECKPOINT_PLANNER_INSTANCES") or Path(__file__).resolve().parents[3] / "shared" / "ground_truth"
)


def load(name: str) -> tuple[Problem, Reference]:
    """Read an instance as a problem in KiB and hundredths of milliseconds, with its known costs."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no instance {path}; set CHECKPOINT_PLANNER_INSTANCES to the folder that has it")
    return load_instance(path)


QUICK = {"mobilenet_v2": (7, 8, 10), "resnet50": (8, 10), "vgg16": (8, 9, 10)}
"""By their budgets in GB."""


@pytest.mark.parametrize("name", [f"{model}-{size}gb" for model, sizes in QUICK.items() for size in sizes])
def test_the_ilp_is_as_good_as_the_best_known(name: str) -> None:
    problem, known = load(name)
    solution = solvers.solve(problem, "ilp", time_limit_seconds=20)
    total = known.base_cost + solution.recompute_seconds
    bound = known.base_cost + solution.lower_bound_seconds
    assert problem.baseline.seconds == known.base_cost
    assert solution.peak_bytes <= problem.budget_bytes
    assert total <= 1.0002 * known.best_known_cost
    assert bound <= known.best_known_cost * (1 + 1e-9)
    assert bound >= 0.999 * known.lower_bound_cost


@pytest.mark.parametrize(
    "name", tiered(["mobilenet_v2-5gb", "mobilenet_v2-6gb", "resnet50-6gb"], slow=["resnet50-6gb"])
)
def test_tight_instances_get_a_plan_near_the_best_known(name: str) -> None:
    problem, known = load(name)
    solution = solvers.solve(problem, "auto", time_limit_seconds=30)
    assert solution.peak_bytes <= problem.budget_bytes
    assert known.base_cost + solution.recompute_seconds <= 1.005 * known.best_known_cost
    assert known.base_cost + solution.lower_bound_seconds <= known.best_known_cost * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mobilenet_v2-7gb", "resnet50-10gb"])
def test_segmentation_costs_at_least_the_best_known(name: str) -> None:
    problem, known = load(name)
    solution = solvers.solve(problem, "sqrt")
    assert known.base_cost + solution.recompute_seconds >= known.lower_bound_cost
