"""Solutions that were kept are forgotten when anything changes that solving depends on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from planner.solving.solution_cache import digest_of_source

ROOT = Path(__file__).parents[2]

SOLVES = """
import sys
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.solvers import names, solve
from tests.example_graphs import transformer
graph, costs = transformer(2)
peak_bytes = simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes
for name in names():
    try:
        solve(Problem(graph=graph, costs=costs, budget_bytes=peak_bytes * 3 // 4), name, time_limit_seconds=0.5)
    except Exception as error:
        assert type(error).__name__ in ("InfeasibleBudgetError", "SolverUnavailableError"), error
for module in list(sys.modules.values()):
    if module.__name__.startswith("planner."):
        print(module.__file__)
"""


def test_whatever_is_loaded_to_solve_is_in_the_digest(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SOLVES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = [Path(line).relative_to(ROOT / "planner") for line in done.stdout.splitlines()]
    names = {str(path) for path in loaded} - {"errors.py"}  # what they say changes no solution
    assert {"solving/peak_bounds.py", "solving/repair.py", "ir/simulator.py", "solvers/ilp.py"} <= names
    copy = tmp_path / "planner"
    shutil.copytree(ROOT / "planner", copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_of_source(copy)
    assert before == digest_of_source(ROOT / "planner")
    for name in names:
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content + b"# changed\n")
        assert digest_of_source(copy) != before, name
        (copy / name).write_bytes(content)


def test_sub_folders_and_names_of_files_are_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "solvers" / "inner").mkdir(parents=True)
    empty = digest_of_source(tmp_path)
    one = tmp_path / "solvers" / "inner" / "moves.py"
    one.write_text("")
    named = digest_of_source(tmp_path)
    one.rename(one.with_name("steps.py"))
    assert len({empty, named, digest_of_source(tmp_path)}) == 3
