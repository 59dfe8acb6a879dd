"""Values that no cheapest plan need hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.solving import step_cut
from planner.solving.milp import minimise
from planner.solving.presolve import dominated_values
from planner.solving.step_cut import Cut, build
from tests.oracle import random_graph, resnet_like
from tests.planned import problem_at
from tests.tiers import tiered


def test_a_value_with_one_reader_that_makes_no_more_of_it_is_never_held() -> None:
    graph, _ = resnet_like(2)
    names = {graph.operations[each.maker].target: each for each in dominated_values(graph)}
    assert "block0.relu1" not in names, "the backward reads it, too"
    larger = replace(graph, values=tuple(replace(value, size_bytes=i + 1) for i, value in enumerate(graph.values)))
    assert not [each for each in dominated_values(larger) if each.results], (
        "where what is made of a value is larger, the value is worth holding"
    )
    for each in names.values():
        assert graph.readers[each.value] == (each.reader,)
        assert each.maker not in {other.maker for other in dominated_values(graph, apart={each.maker})}


@pytest.mark.parametrize("seed", tiered(range(150), quick=range(50)))
def test_programmes_have_the_same_optimum_where_all_values_may_be_held(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = random.Random(seed).choice([0.4, 0.5, 0.6, 0.7])
    problem = problem_at(random_graph(seed, operations=12, plain=seed % 3 > 0), share)
    cuts = [Cut(step) for step in range(4, 12)]
    made = build(problem, cuts)
    monkeypatch.setattr(step_cut, "dominated_values", lambda *_: [])
    all_held = build(problem, cuts)
    if made is None or all_held is None:
        assert made is all_held
        return
    one, other = minimise(made), minimise(all_held)
    assert one.infeasible == other.infeasible
    assert one.bound == pytest.approx(other.bound)
