"""RecomputeSearch values again: what is promised of room, of what was held, and of the moment."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.graph import OperationCost, TrainingGraph
from planner.solving.recompute_search import RecomputeSearch, members, set_of
from tests.example_graphs import Builder
from tests.oracle import random_graph


def _needs(
    graph: TrainingGraph, costs: Sequence[OperationCost], runs: Sequence[int], held: set[int], wanted: set[int]
) -> int:
    """Follow runs from what is held to what is wanted; give the most that must be there beside what is retained."""
    live, most = set(wanted), 0
    for index in reversed(runs):
        operation = graph.operations[index]
        there = live | {*operation.inputs, *operation.outputs}
        again = sum(graph.values[u].size_bytes for u in operation.outputs if graph.values[u].retained)
        own = sum(graph.values[u].size_bytes for u in there if not graph.values[u].retained)
        most = max(most, own + again + costs[index].workspace_bytes)
        live = live - {*operation.outputs} | {*operation.inputs}
    missing = {u for u in live - held if graph.values[u].size_bytes and not graph.values[u].retained}
    assert not missing, "it begins with what is there"
    return most


@settings(max_examples=300)
@given(seed=st.integers(0, 10**6))
def test_runs_make_the_value_and_keep_the_room_and_what_was_held(seed: int) -> None:
    graph, costs = random_graph(seed, operations=9, plain=seed % 2 == 0)
    rng = random.Random(seed)
    search = RecomputeSearch(graph, costs)
    ran = rng.randint(1, len(graph.operations))
    made = [u for u, maker in enumerate(graph.producer) if maker < ran]
    again = [u for u in made if search.counts >> u & 1 and graph.operations[graph.producer[u]].recomputable]
    lasting = {u for u in made if not graph.operations[graph.producer[u]].recomputable}
    if not again:
        return
    value = rng.choice(again)
    held = {*rng.sample(made, rng.randint(0, len(made))), *lasting} - {value}
    room_bytes = rng.choice([8, 12, 16, 24, 100])
    runs = search.runs(value, set_of(held), ran, room_bytes)
    if runs is not None:
        assert all(index < ran and graph.operations[index].recomputable for index in runs)
        assert _needs(graph, costs, runs, held, held | {value}) <= room_bytes
    if room_bytes == 100:
        assert runs is not None, "there is always a way where there is room for everything"


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6))
def test_a_value_can_be_made_in_its_room(seed: int) -> None:
    graph, costs = random_graph(seed, operations=9, plain=True)
    search = RecomputeSearch(graph, costs)
    for value in members(search.counts):
        runs = search.runs(value, 0, len(graph.operations), search.rooms[value])
        assert runs is not None
        assert _needs(graph, costs, runs, set(), {value}) <= search.rooms[value]


def test_what_can_be_made_later_makes_room_meanwhile() -> None:
    """Beside what is held there is no room for the large one: it goes, and is made of nothing again."""
    builder = Builder()
    (easy,) = builder.add("easy", [], [128])
    (large,) = builder.add("large", [], [256])
    (value,) = builder.add("value", [large], [64])
    search = RecomputeSearch(builder.graph("room", {}), tuple(builder.costs))
    assert search.runs(value, 1 << easy, 3, 256 + 64 + 128) == [1, 2]
    assert search.runs(value, 1 << easy, 3, 256 + 64) == [1, 2, 0]
    assert search.runs(value, 1 << easy, 3, 256 + 64 - 1) is None
