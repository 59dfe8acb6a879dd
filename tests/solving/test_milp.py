"""Programmes through PuLP."""

from __future__ import annotations

import subprocess
import sys

import pytest

from planner.solving.milp import Library
from planner.solving.step_cut import Model


def knapsack() -> Model:
    """Make the cheapest choice of three that weighs at least five: the second and the third, for 5."""
    model = Model()
    cheap, fair, dear = (model.column(cost, integer=True) for cost in (2.0, 1.0, 4.0))
    model.at_least(5.0, (cheap, 1.0), (fair, 2.0), (dear, 3.0))
    return model


def test_a_programme_and_its_relaxation() -> None:
    library = Library(print)
    whole, relaxed = library.minimise(knapsack()), library.minimise(knapsack(), relax=True)
    assert whole.columns == pytest.approx([0.0, 1.0, 1.0]) and whole.bound == pytest.approx(5.0)
    assert relaxed.bound == pytest.approx(5.0, rel=1e-5)
    impossible = knapsack()
    impossible.at_least(7.0, (0, 1.0), (1, 2.0), (2, 3.0))
    assert library.minimise(impossible).infeasible
    counted = library.minimise(knapsack(), turns=1)
    assert counted.bound <= 5.0


def test_nothing_is_said_on_stdout() -> None:
    """A report in JSON must be alone there; HiGHS 1.16 prints its name as soon as one is made."""
    code = "from tests.solving.test_milp import knapsack, Library; Library(print).minimise(knapsack())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout == b""
