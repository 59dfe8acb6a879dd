"""Time of recompute, time of waiting for transfers, and both together have one name each, whoever says them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner import solvers
from planner.common import cache_folder
from planner.common.limits import SolveLimits
from planner.errors import ClaimMismatchError
from planner.ir.host import Host
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.simulator import Evaluation
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import Plan
from planner.solving import solution_cache
from planner.solving.incumbent import Incumbent
from tests.example_graphs import transformer
from tests.planned import problem_at

GRAPH, COSTS = transformer(2)
OFFLOADING = [name for name in solvers.names() if solvers.get(name).offloads]
EFFORT = SolveLimits(time_limit_seconds=0.25, deterministic=True)


def slow_link() -> Problem:
    """Pose a step that must recompute, and must wait for transfers too."""
    return replace(problem_at((GRAPH, COSTS), 0.3), host=Host(bytes_per_second=5e8, budget_bytes=2**40))


@cache
def proposed(name: str) -> Solution:
    return solvers.get(name).solve(slow_link(), effort=EFFORT)


def assert_same(one: Solution | Evaluation | Plan, found: Evaluation) -> None:
    assert one.recompute_seconds == pytest.approx(found.recompute_seconds, rel=1e-9)
    assert one.added_seconds == pytest.approx(found.added_seconds, rel=1e-9)
    assert one.added_seconds > one.recompute_seconds > 0
    if not isinstance(one, Plan):
        assert one.stall_seconds == pytest.approx(found.stall_seconds, rel=1e-9)


@pytest.mark.parametrize("name", OFFLOADING)
def test_a_solver_tells_them_apart_as_the_simulator_does(name: str) -> None:
    solution = proposed(name)
    assert_same(solution, slow_link().evaluate(solution.schedule))


def test_so_does_whoever_keeps_the_best_plan() -> None:
    incumbent = Incumbent(slow_link())
    assert incumbent.added_seconds == incumbent.evaluation.recompute_seconds == float("inf")
    incumbent.update(proposed("offload_search").schedule, "offload_search")
    assert_same(incumbent.evaluation, slow_link().evaluate(proposed("offload_search").schedule))


def test_so_does_a_plan_and_its_file() -> None:
    plan = plan_from_solution(slow_link(), proposed("offload_search"), compare=False)
    assert_same(plan, slow_link().evaluate(proposed("offload_search").schedule))
    assert Plan.from_json(plan.to_json()) == plan
    told = plan.report()
    assert told["predicted"]["recompute_seconds"] == plan.recompute_seconds
    assert told["predicted"]["overhead"] == pytest.approx(plan.added_seconds / plan.baseline_step_seconds)


def test_so_does_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    problem, solution = slow_link(), proposed("offload_search")
    key = solution_cache.key_of(problem, "offload_search", EFFORT)
    solution_cache.keep(key, solution)
    found = solution_cache.find(problem, key)
    assert found is not None
    assert replace(found, solver=solution.solver, solve_seconds=0.0) == replace(solution, solve_seconds=0.0)
    # What was written before the two were told apart is searched for anew.
    (path,) = (tmp_path / "solutions").glob("*.json")
    content = json.loads(path.read_text())["solution"]
    content["recompute_seconds"] += content.pop("stall_seconds")
    path.write_text(json.dumps({"digest": solution_cache._digest(content), "solution": content}))
    assert solution_cache.find(problem, key) is None and not path.exists()


class SumsUp:
    """A solver that is no part of the planner: what it claims is what the step takes longer, under one name."""

    name, summary, offloads = "sums-up", "claims one time", True
    too_much_seconds = 0.0

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Any = None) -> Solution:
        schedule = proposed("offload_search").schedule
        found = problem.evaluate(schedule)
        return Solution(
            solver=self.name,
            schedule=schedule,
            peak_bytes=found.peak_bytes,
            recompute_seconds=found.added_seconds + self.too_much_seconds,
        )


def test_a_solver_that_does_not_is_held_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "get", lambda name: SumsUp())
    problem = slow_link()
    solution = solvers.solve(problem, "sums-up")
    assert_same(solution, problem.evaluate(solution.schedule))
    monkeypatch.setattr(SumsUp, "too_much_seconds", 1e-3)
    with pytest.raises(ClaimMismatchError, match="s of recompute and waiting, but simulation"):
        solvers.solve(problem, "sums-up")


def test_waiting_counts_against_the_bound() -> None:
    schedule = proposed("offload_search").schedule
    found = slow_link().evaluate(schedule)
    claim = Solution.simulated(found, schedule, "x", lower_bound_seconds=found.recompute_seconds)
    assert not claim.is_optimal
    assert replace(claim, lower_bound_seconds=found.added_seconds).is_optimal
    assert confirm(slow_link(), claim) == found
    with pytest.raises(ClaimMismatchError):
        confirm(slow_link(), replace(claim, stall_seconds=0.0))
