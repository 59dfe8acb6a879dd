"""Programmes through HiGHS, and through CBC without it."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import pytest

from planner.solving import milp
from planner.solving.milp import minimise
from planner.solving.step_cut import Model


def knapsack() -> Model:
    """Make the cheapest choice of three that weighs at least five: the second and the third, for 5."""
    model = Model()
    cheap, fair, dear = (model.column(cost, integer=True) for cost in (2.0, 1.0, 4.0))
    model.at_least(5.0, (cheap, 1.0), (fair, 2.0), (dear, 3.0))
    return model


def test_nothing_is_said_on_stdout() -> None:
    """A report in JSON must be alone there; HiGHS 1.16 prints its name as soon as one is made."""
    code = "from tests.solving.test_milp import knapsack, minimise; minimise(knapsack())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout == b""


@pytest.mark.parametrize("has_highs", [True, False])
def test_optima_and_bounds_are_those_of_trying_everything(has_highs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_highs:
        monkeypatch.setattr(milp, "_highspy", lambda: None)
    rng = random.Random(0)
    for _ in range(40 if has_highs else 4):
        model = Model()
        for _ in range(6):
            model.column(float(rng.randint(0, 5)), integer=True)
        for _ in range(5):
            terms = [(column, float(rng.randint(-2, 4))) for column in rng.sample(range(6), 3)]
            model.at_least(float(rng.randint(-1, 4)), *terms)
        kept = [
            sum(cost * x for cost, x in zip(model.cost, xs, strict=True))
            for xs in product((0, 1), repeat=6)
            if all(sum(weight * xs[column] for column, weight in terms) >= least for terms, least in model.rows)
        ]
        answer, relaxed = minimise(model), minimise(model, relax=True)
        assert minimise(model, turns=1).bound <= answer.bound + 1e-9 or answer.infeasible
        assert answer.infeasible == (not kept)
        if kept:
            assert answer.bound == pytest.approx(min(kept)) and relaxed.bound <= min(kept) + 1e-9
            assert answer.columns is not None
            paid = sum(cost * round(x) for cost, x in zip(model.cost, answer.columns, strict=True))
            assert paid == pytest.approx(min(kept))
