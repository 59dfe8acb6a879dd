"""Solutions cached on disk, so that planning the same step again takes no search.

Only what a solver proposes is kept, under a digest of all that it was given: capturing needs the model's code, of
which nobody can say cheaply whether it changed. What comes out of the cache is held against the simulator like any
solver's claim, and a file that is damaged, or of something else, is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from planner.common import cache_folder
from planner.common.json_reader import parse, to_data
from planner.common.limits import SolveLimits
from planner.errors import UsageError
from planner.ir.problem import Problem, Solution, confirm

KIND = "solutions"

LIMIT_BYTES = 256 << 20
"""How large all solutions together may become; then those go that were used longest ago."""

FROM_CACHE = " (from the cache)"
"""What the name of a solver ends with if its solution was found before."""

_LARGEST_ENTRY_BYTES = 16 << 20
_ROOMS = ("common", "ir", "findings", "solving", "solvers")
"""Solvers import nothing of the planner beyond these; the contract on rooms holds them to it."""

_LIBRARIES = ("highspy", "numba")


def key_of(problem: Problem, solver: str, effort: SolveLimits) -> str:
    """Return a digest of everything that decides what a solver proposes."""
    graph = problem.graph
    digest = hashlib.sha256()
    sum_bytes = sum(v.size_bytes for v in graph.values)  # what is free beyond that changes from minute to minute
    for part in (
        _versions(),
        (solver, effort.time_limit_seconds, effort.deterministic, effort.seed, effort.enough, problem.budget_bytes),
        [(v.size_bytes, v.retained) for v in graph.values],
        [(o.inputs, o.outputs, o.phase, o.module, o.recomputable, o.state_bytes, o.region) for o in graph.operations],
        [(c.seconds, c.workspace_bytes) for c in problem.costs],
        problem.host and replace(problem.host, budget_bytes=min(problem.host.budget_bytes, sum_bytes)),
    ):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def find(problem: Problem, key: str) -> Solution | None:
    """Return the cached solution of a key, if it is intact and its claim holds for this problem."""
    begun = time.perf_counter()
    if key in _remembered:
        return _solution(problem, key, _remembered[key])
    solution = cache_folder.find(KIND, key, partial(_solution, problem, key), _LARGEST_ENTRY_BYTES)
    if solution is None:
        return None
    return replace(solution, solver=solution.solver + FROM_CACHE, solve_seconds=time.perf_counter() - begun)


def keep(key: str, solution: Solution, *, on_disk: bool = True) -> None:
    """Cache a solution under a key; ignored if the folder cannot be written."""
    content = {"key": key, **to_data(solution)}
    text = json.dumps({"digest": _digest(content), "solution": content})
    if _collected is not None:
        _collected[key] = text
    if on_disk:
        cache_folder.keep(KIND, key, text, LIMIT_BYTES)


_remembered: dict[str, str] = {}
"""Solutions that another process found for this one, by key, as they are in files."""

_collected: dict[str, str] | None = None


def collect() -> Mapping[str, str]:
    """Return where all solutions of this process will be, by key, as :func:`remember` takes them."""
    global _collected
    _collected = {}
    return _collected


def remember(solutions: Mapping[str, str]) -> None:
    """Remember what another process found, in place of what the last one did."""
    _remembered.clear()
    _remembered.update(solutions)


def digest_of_source(package: Path) -> str:
    """Return a digest of the source files that solutions depend on."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (package / room).rglob("*.py")):
        digest.update(f"{path.relative_to(package)} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> str:
    """Identify the solvers by a digest of their source and the versions of their libraries."""
    found = [digest_of_source(Path(__file__).parents[1])]
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{library} {metadata.version(library)}")
    return " ".join(found)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _solution(problem: Problem, key: str, text: str) -> Solution:
    root = parse(text, "solution")
    content, graph = root["solution"], problem.graph
    if root["digest"].read(str) != _digest(content.value) or content["key"].read(str) != key:
        raise UsageError("not what was written")
    solution = content.read(Solution)
    schedule = solution.schedule
    if max(schedule.order, default=-1) >= len(graph.operations):
        raise UsageError("there is no such operation")
    if any(offload.value >= len(graph.values) for offload in schedule.offloads):
        raise UsageError("that is no offload of this step")
    schedule.recomputations()  # in base order, or a ScheduleError
    confirm(problem, solution)
    return solution
