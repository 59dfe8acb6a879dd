"""What holds for every test: threads, random numbers, generated examples."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from planner.report import progress
from planner.solvers import search
from planner.solving import lowest_known

# Nobody's own cache: a test that wants one names its folder.
os.environ["CHECKPOINT_PLANNER_CACHE"] = "off"

# On a busy machine anything may be slow; what tests read of standard error must not depend on that.
progress.QUICK_SECONDS = 3600.0

# Where Python is told to keep no bytecode, each of the many processes of the tests would compile torch anew, for ten
# seconds: here they keep it. Workers and what they start inherit this.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Torch reads this when it is first imported, and so do processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # For more, Inductor would start processes that import torch each.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready() -> None:
    """Let one process compile the kernels of annealing while workers import: on a fresh clone each compiled them."""
    search.SOLVER.prepare(iter((False, True)).__next__, lambda _: None)  # started, not waited for


@pytest.fixture(autouse=True)
def _as_if_no_test_had_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every test from the same random state and without plans of others.

    What earlier tests imported and hold is kept out of collections of garbage: a measured peak asks for one each.
    """
    monkeypatch.setattr(lowest_known, "_here", {})
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        gc.collect()
        gc.freeze()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[tuple[Any, ...]]]:
    """Return a function by which a test watches another, which does what it does: a list grows by its arguments."""

    def watched(owner: Any, name: str) -> list[tuple[Any, ...]]:
        seen: list[tuple[Any, ...]] = []
        honest = getattr(owner, name)

        def noting(*given: Any, **options: Any) -> Any:
            seen.append(given)
            return honest(*given, **options)

        monkeypatch.setattr(owner, name, noting)
        return seen

    return watched


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Let torch forget what it has compiled, before a test and after it."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def captures(calls: Callable[[Any, str], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Return what grows by one for each program that Dynamo captures, for planning or for running."""
    from planner.capture.joint_capture import Backend

    return calls(Backend, "__call__")


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of collections of garbage to come: each walks a million objects of torch.

    What torch does beside a capture for services that watch it is left out. Kernels are waited for: workers that met
    them uncompiled would each compile them.
    """
    search.SOLVER.prepare(lambda: False, lambda _: None)
    if "torch" in sys.modules:
        import torch._dynamo.config  # the larger half of them

        from planner.capture import capture_speedups
        from planner.measure import costing

        # Dynamo would collect garbage after every capture.
        torch._dynamo.config.run_gc_after_compile = False
        # Pytest listens to every log, and reads none of the graphs that AOTAutograd would write out for it.
        capture_speedups._are_read = lambda: False
        # What a plan decides is to be the same on every machine: tests of measured costs take this back.
        costing._measured_for_a_moment = lambda lowered, costs, *_: costing.Costing(tuple(costs), "roofline")
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # most of what a capture makes lives until it ends, and is walked in vain
