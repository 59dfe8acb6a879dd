"""Both kinds of study take the same questions, and neither passes over one in silence."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.analysis.study import Study
from planner.common.options import grouped
from planner.errors import UsageError
from tests.models import WIDTH

RUNTIMES = ("graph", "modules")


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                           for _ in range(4)))  # fmt: skip


@cache
def studied(runtime: str) -> Study:
    return planner.study(blocks(), torch.randn(64, WIDTH), runtime=runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_misspelt_is_refused(runtime: str) -> None:
    with pytest.raises(TypeError, match="time_limit_second"):
        studied(runtime).plan(budget="90%", time_limit_seconds=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "every-2", "offload": True}, "leave offload out"),
        ({"strategy": "evry-2"}, "did you mean 'every-N'"),
        ({}, "give one budget"),
        ({"budget": "90%", "solver": "chian-dp"}, "did you mean 'chain-dp'"),
    ],
)
def test_what_means_nothing_here_is_refused(runtime: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        studied(runtime).plan(**grouped(**options))


def test_a_choice_of_modules_has_no_other_solver() -> None:
    step = studied("modules")
    for how in ({"budget": "90%"}, {"budget": "90%", "offload": True}, {"budget": planner.Budget(strategy="every-2")}):
        with pytest.raises(UsageError, match="'chain-dp' decides on a whole graph"):
            step.plan(search="chain-dp", **how)
    assert step.plan(budget="90%", search="auto").recomputations
