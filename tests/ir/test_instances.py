"""Instances from files: what is read, what is refused and how, and that none of it needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import UsageError
from planner.ir.graph import Phase

SMALL: dict[str, Any] = {
    "name": "small",
    "num_operations": 5,
    "loss_operation": 2,
    "output_kib": [4, 4, 1, 4, 4],
    "cost": [10, 20, 1, 20, 10],
    "edges": [[0, 1], [1, 2], [2, 3], [1, 3], [3, 4], [0, 4]],
    "budget_kib": 12,
    "base_cost": 61,
    "published_cost": 75,
    "best_known_cost": 71,
    "lower_bound_cost": 71,
    "source": "somewhere",
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "instance.json"
    path.write_text(json.dumps({key: x for key, x in {**SMALL, **changes}.items() if x is not ...}))
    return path


def test_an_instance_is_read_as_it_stands(tmp_path: Path) -> None:
    problem, reference = planner.load_instance(write(tmp_path))
    graph = problem.graph
    assert (graph.name, reference.name) == ("small", "small")
    assert [value.size_bytes for value in graph.values] == SMALL["output_kib"]
    assert [cost.seconds for cost in problem.costs] == SMALL["cost"]
    assert problem.budget_bytes == 12
    assert graph.operations[3].inputs == (2, 1)
    assert [operation.phase for operation in graph.operations] == [
        Phase.FORWARD, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD,
    ]  # fmt: skip
    assert (reference.base_cost, reference.published_cost, reference.best_known_cost) == (61, 75, 71)
    assert problem.baseline.seconds == reference.base_cost


def test_an_instance_is_solved(tmp_path: Path) -> None:
    problem, reference = planner.load_instance(write(tmp_path))
    solution = planner.solve(problem)
    assert reference.base_cost + solution.recompute_seconds == reference.best_known_cost
    assert solution.is_optimal
    roomy, _ = planner.load_instance(write(tmp_path, budget_kib=13))
    assert planner.solve(roomy).recompute_seconds == 0


def test_what_is_not_known_may_be_left_out(tmp_path: Path) -> None:
    changes = dict.fromkeys(("name", "base_cost", "published_cost", "best_known_cost", "lower_bound_cost"), ...)
    problem, reference = planner.load_instance(str(write(tmp_path, **changes)))
    assert reference.name == problem.graph.name == "instance"
    assert reference.base_cost == 61
    assert reference.best_known_cost is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_operations": ...}, "num_operations is missing"),
        ({"num_operations": 0}, "num_operations must be an integer from 1"),
        ({"num_operations": True}, "num_operations must be an integer that is not negative, not true"),
        ({"num_operations": 10**12}, "num_operations must be"),
        ({"loss_operation": 5}, "loss_operation must be an integer from 0 to 4, not 5"),
        ({"output_kib": [1, 2]}, "output_kib must have 5 items, one for each operation, not 2"),
        ({"output_kib": {}}, "output_kib must be a list"),
        ({"output_kib": [4, 4, 1, 4.5, 4]}, r"output_kib\[3\] must be an integer .*, not 4.5"),
        ({"output_kib": [4, -4, 1, 4, 4]}, r"output_kib\[1\] must be an integer"),
        ({"cost": [10, "much", 1, 20, 10]}, r"cost\[1\] must be a number .*, not \"much\""),
        ({"cost": [10, float("nan"), 1, 20, 10]}, "contains NaN, and every number must be finite"),
        ({"cost": [10, [], 1, 20, 10]}, r"cost\[1\] must be a number .*, not a list"),
        ({"edges": [[0, 1], [1]]}, r"edges\[1\] must be two operations"),
        ({"edges": [[0, 5]]}, r"edges\[0\]\[1\] must be an integer from 0 to 4, not 5"),
        ({"edges": [[3, 3]]}, r"edges\[0\] goes from operation 3 to 3, against the base order"),
        ({"edges": [[3, 1]]}, "against the base order"),
        ({"budget_kib": "8 GiB"}, "budget_kib must be an integer"),
        ({"base_cost": 60}, "base_cost is 60, but the costs sum up to 61"),
        ({"best_known_cost": 50}, "best_known_cost is 50, less than 61"),
        ({"published_cost": []}, "published_cost must be a number"),
        ({"name": 7}, "name must be text, not 7"),
        ({"name": "a\nb"}, "name contains characters that cannot be printed"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        planner.load_instance(write(tmp_path, **changes))
    assert "instance.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "expecting .* at line 1, column 2"),
        (b"\xff", "not UTF-8"),
        (b"[]", "must be an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"num_operations": ' + b"9" * 5000 + b"}", "absurd length"),
    ],
)
def test_what_is_no_instance_at_all_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=told):
        planner.load_instance(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(UsageError, match="cannot read instance"):
            planner.load_instance(path)


def test_loading_and_solving_import_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys, planner\n"
        f"problem, _ = planner.load_instance({str(write(tmp_path))!r})\n"
        "from planner import solvers\n"
        "for solver in solvers.names():\n"
        "    try:\n"
        "        planner.solve(problem, solver, time_limit_seconds=2)\n"
        "    except planner.errors.InfeasibleBudgetError:\n"
        "        assert solver not in ('auto', 'ilp')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------- the benchmark


def run_benchmark(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    from benchmarks import optimality

    file = folder / "out" / "optimality.json"
    file.parent.mkdir(exist_ok=True)
    exit_code = optimality.main(["--instances", str(folder), "--time-limit", "2", "--json", str(file), *arguments])
    assert str(folder) not in file.read_text() + file.with_suffix(".md").read_text()
    result: dict[str, Any] = json.loads(file.read_text())
    return exit_code, result


def test_the_optimality_benchmark_sets_costs_beside_what_is_known(tmp_path: Path) -> None:
    write(tmp_path)
    exit_code, result = run_benchmark(tmp_path)
    (row,) = result["rows"]
    assert exit_code == 0
    assert (row["name"], row["cost"], row["lower_bound"], row["ratio"]) == ("small", 71, 71, 1)
    assert {"best_known_cost", "published_cost", "seconds", "solver"} <= row.keys()


def test_the_optimality_benchmark_fails_where_a_bound_and_a_cost_contradict_each_other(tmp_path: Path) -> None:
    write(tmp_path, best_known_cost=70, lower_bound_cost=...)
    assert run_benchmark(tmp_path)[0] == 1
    write(tmp_path, best_known_cost=..., published_cost=..., lower_bound_cost=72)
    assert run_benchmark(tmp_path)[0] == 1


def test_the_optimality_benchmark_goes_on_where_there_is_no_plan(tmp_path: Path) -> None:
    write(tmp_path, budget_kib=3)
    exit_code, result = run_benchmark(tmp_path, "--solver", "sqrt")
    assert exit_code == 0
    assert result["rows"][0]["cost"] is None


def test_the_optimality_benchmark_needs_instances(tmp_path: Path) -> None:
    from benchmarks import optimality

    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="--instances"):
            optimality.main(["--instances", str(folder), "--json", "-"])
