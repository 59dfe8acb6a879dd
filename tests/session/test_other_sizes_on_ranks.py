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


def planned(monkeypatch: pytest.MonkeyPatch, tried: Callable[[list[Any]], list[Any]], *others: Plan) -> Plan:
    """Plan a step whose sizes data decide, beside another rank, which made such plans and finds so much of all."""
    model, inputs = Stack(4), Inputs.of(rows())
    options = Options(budget=Budget(activations="85%"), runtime=Runtime("modules"))
    study: Study = replace(eager_study.study_eager(model, inputs, options), varies=True)

    def made_by_all(make: Callable[[], Any], doing: str, _group: Any) -> list[Any]:
        if doing == "planned its step":
            return [make(), *(plan.to_json() for plan in others)]
        own = make()
        return [own, (OTHER_PEAK_BYTES, tried(own[1]))]

    monkeypatch.setattr(eager_study, "who_agrees", lambda *_: [None])
    monkeypatch.setattr(eager_study, "made_by_all", made_by_all)
    return eager_study.plan_alike(model, study, options)


def test_a_choice_is_taken_that_every_rank_keeps_its_budget_with(monkeypatch: pytest.MonkeyPatch) -> None:
    more = planned_within("60%")
    own = planned(monkeypatch, lambda seconds: seconds)
    # The other rank's plan runs more modules again, and is the only one that fits there.
    assert set(modules_of(more)) - set(modules_of(own))
    both = planned(monkeypatch, lambda seconds: [None, seconds[1]], more)
    assert modules_of(both) == modules_of(more)
    # Where both fit on both, the cheaper one is taken.
    assert modules_of(planned(monkeypatch, lambda seconds: seconds, more)) == modules_of(own)


def planned_within(activation_budget: str) -> Plan:
    options = Options(budget=Budget(activations=activation_budget), runtime=Runtime("modules"))
    return eager_study.plan_eager(Stack(4), Inputs.of(rows()), options)


def test_where_none_fits_all_a_budget_is_named_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleBudgetError, match="none of the choices of modules") as caught:
        planned(monkeypatch, lambda seconds: [None] * len(seconds))
    assert caught.value.minimum_feasible_peak_bytes == OTHER_PEAK_BYTES
