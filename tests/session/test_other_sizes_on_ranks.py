"""Ranks whose sizes data decide, and that must run the same modules again: which choice they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.analysis.study import Study
from planner.capture.inputs import Inputs
from planner.common.options import Budget, Runtime
from planner.errors import InfeasibleBudgetError
from planner.plans.module_choices import modules_of
from planner.plans.plan import Plan
from planner.session import eager_study
from planner.session.step import Options
from tests.models import Stack, rows

OTHER_PEAK_BYTES = 10**9


def planned(monkeypatch: pytest.MonkeyPatch, fits_there: Callable[[bool], bool], *others: Plan) -> Plan:
    """Plan a step whose sizes data decide, beside another rank that made such plans, and says whether one fits."""
    model, inputs = Stack(4), Inputs.of(rows())
    options = Options(budget=Budget(activations="85%"), runtime=Runtime("modules"))
    study: Study = replace(eager_study.study_eager(model, inputs, options), varies=True)

    def made_by_all(make: Callable[[], Any], doing: str, _group: Any) -> list[Any]:
        if doing == "planned its step":
            return [make(), *(plan.to_json() for plan in others)]
        own = make()
        return [own, (OTHER_PEAK_BYTES, fits_there(own[1]))]

    monkeypatch.setattr(eager_study, "who_agrees", lambda *_: [None])
    monkeypatch.setattr(eager_study, "made_by_all", made_by_all)
    return eager_study.plan_alike(model, study, options)


def test_the_strictest_choice_is_taken_that_every_rank_keeps_its_budget_with(monkeypatch: pytest.MonkeyPatch) -> None:
    more = planned_within("60%")
    own = planned(monkeypatch, lambda fits: fits)
    assert set(modules_of(more)) - set(modules_of(own))
    assert modules_of(planned(monkeypatch, lambda fits: fits, more)) == modules_of(more)
    tries = iter([False, False, False, True])  # the other rank has no room for the first choices
    tighter = planned(monkeypatch, lambda _: next(tries))
    assert tighter.recompute_seconds > own.recompute_seconds


def planned_within(activation_budget: str) -> Plan:
    options = Options(budget=Budget(activations=activation_budget), runtime=Runtime("modules"))
    return eager_study.plan_eager(Stack(4), Inputs.of(rows()), options)


def test_where_none_fits_all_a_budget_is_named_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleBudgetError, match="choice of modules keeps") as caught:
        planned(monkeypatch, lambda _: False)
    assert caught.value.minimum_feasible_peak_bytes == OTHER_PEAK_BYTES
