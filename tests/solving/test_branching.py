"""Questions about plans: what is decided between few cuts stays so between more."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.problem import Problem
from planner.solving.branch_and_bound import Branching, Kind, Limits, Question
from planner.solving.step_cut import Cut, Model, build
from tests.oracle import random_graph
from tests.solving.plan_columns import columns_of
from tests.solving.test_plan_columns import random_cuts, random_plan


def _questions(branching: Branching, cuts: list[Cut], model: Model) -> list[Question]:
    """Return all questions that a solution may leave open."""
    ends = [*cuts[1:], None]
    found = [
        Question(Kind.RUNS, operation, ends[number], cuts[columns[0][0]])
        for operation, columns in branching.columns_of.items()
        for number, _ in columns
    ]
    for cut, held, begins in zip(cuts, model.held, model.begins, strict=True):
        found += [Question(Kind.HELD, u, cut) for u, column in held.items() if column != model.nothing]
        found += [Question(Kind.BEGINS, operation, cut) for operation in begins]
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_what_a_plan_keeps_between_few_cuts_it_keeps_between_more(seed: int) -> None:
    rng = random.Random(seed)
    graph, costs = random_graph(seed, operations=rng.choice([6, 9, 14]), plain=rng.random() < 0.5)
    # What has no size is always there; a plan that makes it again does so for nothing.
    graph = replace(graph, values=tuple(replace(v, size_bytes=max(v.size_bytes, 1)) for v in graph.values))
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    plan = random_plan(rng, problem)
    problem = replace(problem, budget_bytes=problem.evaluate(plan).peak_bytes)
    cuts = random_cuts(rng, problem)
    few = [cut for cut in cuts if cut.again or rng.random() < 0.6]
    few = [cut for cut in few if not cut.again or {Cut(cut.step - 1), Cut(cut.step)} <= {*few}] or cuts[-1:]
    if few[0].again:
        return
    answers: dict[Question, float] = {}
    known: list[tuple[Question, Limits]] = []
    model, more = build(problem, few), build(problem, cuts)
    assert model is not None and more is not None
    first, second = Branching(problem, few, model), Branching(problem, cuts, more)
    columns, columns_now = columns_of(problem, few, model, plan), columns_of(problem, cuts, more, plan)
    for question in _questions(first, few, model):
        answers[question] = sum(columns[column] for column in first.columns(question))
        sides: tuple[Limits, Limits] = {question: (0.0, answers[question])}, {question: (answers[question], math.inf)}
        known += [(question, second.known(side)) for side in sides]
    for question, limits in known:
        for low, high in limits.values():
            answer = sum(columns_now[column] for column in second.columns(question))
            assert low <= answer <= high, question
