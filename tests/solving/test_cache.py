"""Solutions that are kept: found again, never trusted, safe to share, and bounded."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.common import cache_folder
from planner.common.limits import SolveLimits
from planner.ir.host import Host
from planner.ir.problem import Problem
from planner.plans.plan import Plan
from planner.solving import solution_cache
from planner.solving.solution_cache import FROM_CACHE
from tests.example_graphs import transformer
from tests.planned import make_plan

GRAPH, COSTS = transformer(4)
EFFORT = SolveLimits(time_limit_seconds=1.0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    return tmp_path / "solutions"


def plan(budget: str = "60%", solver: str = "sqrt") -> Plan:
    return make_plan(GRAPH, COSTS, budget=budget, solver=solver, compare=False)


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_planning_again_takes_the_solution_that_was_found(folder: Path) -> None:
    first, second = plan(), plan()
    assert not first.solver.endswith(FROM_CACHE)
    assert second.solver == first.solver + FROM_CACHE
    same = replace(second, solver=first.solver, solve_seconds=first.solve_seconds)
    assert same == first


def test_what_waits_on_the_host_is_kept_too(folder: Path) -> None:
    host = Host(bytes_per_second=1e10, budget_bytes=2**30)

    def offloading(host: Host) -> Plan:
        return make_plan(GRAPH, COSTS, activation_budget="50%", host=host, time_limit_seconds=1, compare=False)

    first, second = offloading(host), offloading(host)
    assert first.offloading is not None and first.offloading.values
    assert second.solver == first.solver + FROM_CACHE and second.offloading == first.offloading
    for other in (replace(host, bytes_per_second=2e10), replace(host, budget_bytes=first.offloading.host_bytes)):
        assert not offloading(other).solver.endswith(FROM_CACHE)


def test_another_question_has_another_answer(folder: Path) -> None:
    plan()
    assert not plan("61%").solver.endswith(FROM_CACHE)
    assert not plan(solver="chain-dp").solver.endswith(FROM_CACHE)
    problem = Problem(graph=GRAPH, costs=tuple(COSTS), budget_bytes=10**6)
    key = solution_cache.key_of(problem, "ilp", EFFORT)
    slower = tuple(replace(cost, seconds=2 * cost.seconds) for cost in COSTS)
    for other in (
        solution_cache.key_of(replace(problem, costs=slower), "ilp", EFFORT),
        solution_cache.key_of(replace(problem, budget_bytes=10**6 + 1), "ilp", EFFORT),
        solution_cache.key_of(problem, "auto", EFFORT),
        solution_cache.key_of(problem, "ilp", replace(EFFORT, seed=1)),
        solution_cache.key_of(problem, "ilp", replace(EFFORT, deterministic=True)),
    ):
        assert other != key
    assert solution_cache.key_of(replace(problem), "ilp", EFFORT) == key


def test_off_means_off(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, "off")
    plan(), plan()
    assert cache_folder.folder(solution_cache.KIND) is None and not folder.exists()


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "taken"))
    assert plan().recomputations == plan().recomputations


def test_the_usual_folder_is_that_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache_folder.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder.folder("solutions") == tmp_path / "checkpoint-planner" / "solutions"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder.folder("solutions") == Path.home() / ".cache" / "checkpoint-planner" / "solutions"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (
        cache_folder.folder(solution_cache.KIND)
        == Path.home() / "Library" / "Caches" / "checkpoint-planner" / "solutions"
    )


def changed(text: str, **fields: object) -> str:
    """Change fields of a solution, and sign it again: only the simulator can tell."""
    content = json.loads(text)["solution"] | fields
    return json.dumps({"digest": solution_cache._digest(content), "solution": content})


ONCE = list(range(len(GRAPH.operations)))


def order_with(index: int) -> dict[str, object]:
    """Return the schedule that runs every operation once, and one right after the loss."""
    after = GRAPH.loss_index + 1
    return {"order": [*ONCE[:after], index, *ONCE[after:]], "offloads": []}


HOSTILE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "one digit": lambda text: text.replace('"recompute_seconds": 0', '"recompute_seconds": 1'),
    "no text": lambda text: "\udcff",
    "not a number": lambda text: changed(text, peak_bytes="many"),
    "a lower peak": lambda text: changed(text, peak_bytes=1),
    "less time": lambda text: changed(text, recompute_seconds=0.0, lower_bound_seconds=0.0),
    "an unknown operation": lambda text: changed(text, schedule=order_with(10**6)),
    "a negative operation": lambda text: changed(text, schedule=order_with(-1)),
    "an operation that cannot run again": lambda text: changed(text, schedule=order_with(GRAPH.loss_index)),
    "another base order": lambda text: changed(text, schedule={"order": [1, 0, *ONCE[2:]], "offloads": []}),
    "another key": lambda text: changed(text, key="0" * 64),
    "a schedule that breaks the budget": lambda text: changed(text, schedule={"order": ONCE, "offloads": []}),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_damage_is_as_good_as_nothing(folder: Path, damage: str) -> None:
    expected = plan()
    path = the_file(folder)
    text = path.read_text()
    path.write_bytes(HOSTILE[damage](text).encode("utf-8", "surrogateescape"))
    again = plan()
    assert not again.solver.endswith(FROM_CACHE)
    assert again.recomputations == expected.recomputations
    assert plan().solver.endswith(FROM_CACHE)  # the damaged file was replaced


def test_links_and_folders_in_the_place_of_a_file_are_not_followed(folder: Path, tmp_path: Path) -> None:
    plan()
    path = the_file(folder)
    elsewhere = tmp_path / "precious"
    elsewhere.write_text(path.read_text())
    path.unlink()
    path.symlink_to(elsewhere)
    before = elsewhere.read_text()
    assert not plan().solver.endswith(FROM_CACHE)
    assert elsewhere.read_text() == before and not path.is_symlink()
    path.unlink()
    path.mkdir()
    assert not plan().solver.endswith(FROM_CACHE)


def test_an_enormous_file_is_not_read(folder: Path) -> None:
    plan()
    path = the_file(folder)
    with open(path, "r+b") as stream:
        stream.truncate(10 * 2**30)  # sparse
    begun = time.monotonic()
    assert not plan().solver.endswith(FROM_CACHE)
    assert time.monotonic() - begun < 60.0


def test_what_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    plan("60%")
    oldest = the_file(folder)
    os.utime(oldest, (1.0, 1.0))
    abandoned = folder / ".half.tmp"
    abandoned.write_text("killed while it wrote")
    os.utime(abandoned, (1.0, 1.0))
    monkeypatch.setattr(solution_cache, "LIMIT_BYTES", int(1.5 * oldest.stat().st_size))
    plan("70%")
    assert not oldest.exists() and not abandoned.exists()
    assert len(list(folder.glob("*.json"))) == 1


def _plan_often(number: int) -> list[bool]:
    return [plan(f"{60 + step % 3}%").peak_bytes > 0 for step in range(6)]


def test_two_processes_share_a_cache(folder: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert all(all(found) for found in pool.map(_plan_often, range(2)))
    assert len(list(folder.glob("*.json"))) == 3
    assert plan("60%").solver.endswith(FROM_CACHE)


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from planner.common import atomic
number = 0
while True:
    number += 1
    atomic.write_text({path!r}, ("%09d" % number) * 200_000)
    if number == 1:
        print("writing", flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    """Plans, profiles, devices and solutions are all written by ``atomic.write_text``."""
    path, draw = tmp_path / "file", random.Random(7)
    script = _WRITER.format(root=str(Path(__file__).parent.parent.parent), path=str(path))
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        time.sleep(0.05 * draw.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        text = path.read_text()
        assert text == text[:9] * 200_000
