"""What FSDP2 allocates around units, where two processes on a CPU cannot show it: shares in the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.capture.sharding import ROOT, SHARES, WHOLE, Parameter, Sharding, StepBuilder, Unit, Units, resident
from planner.ir.builder import StepContext
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory

RANKS, SIZE = 2, 1000
WHOLE_BYTES = 4 * SIZE
SHARE_BYTES = WHOLE_BYTES // RANKS


def unit(name: str, **settings: object) -> Unit:
    sizes = {"item_bytes": 4, "share_item_bytes": 4, "spread_item_bytes": 4}
    return Unit(parameters=(Parameter(name=name, shape=(SIZE,), trainable=True, **sizes),), **settings)


def step_of(units: Units) -> TrainingGraph:
    """Return a step on a GPU, of blocks that hold nothing but parameters and their gradients."""
    builder = StepBuilder(StepContext(alignment_bytes=1, on_cpu=False))
    gradients: dict[str, int] = {}
    sharding = Sharding(builder, units, RANKS, gradients.get)
    blocks = [path for path in units if path]
    sharding.begin()
    for path in blocks:
        sharding.before_forward(path)
        sharding.after_forward(path)
    sharding.end_forward()
    builder.add_loss((), ())
    sharding.before_backward(ROOT)
    for path in reversed(blocks):
        sharding.before_backward(path)
        gradients[path] = builder.add_value(f"gradient of {path}", WHOLE_BYTES, kind="gradient")
        builder.add_once("backward", path, (), [gradients[path]])
        sharding.turn(path, is_entered=False, is_forward=False)
    gradients[ROOT] = builder.add_value("gradient", WHOLE_BYTES, kind="gradient")
    builder.add_once("backward", ROOT, (), [gradients[ROOT]])
    sharding.end()
    return builder.finish()


def units_with(**settings: object) -> Units:
    return {ROOT: unit(ROOT, stays=True, **settings), "a": unit("a", **settings), "b": unit("b", **settings)}


def peak_bytes(graph: TrainingGraph) -> int:
    return simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), Schedule.keep_all(graph)).peak_bytes


def left_bytes(graph: TrainingGraph) -> int:
    return sum(value.size_bytes for value in graph.values if value.retained)


def test_shares_in_the_memory_of_the_host_are_on_the_device_while_they_are_gathered():
    here, away = step_of(units_with()), step_of(units_with(is_on_host=True))
    assert left_bytes(here) == 3 * SHARE_BYTES and left_bytes(away) == 0
    assert peak_bytes(here) - peak_bytes(away) == SHARE_BYTES  # of b's gradient, at the peak in the backward of a
    gathers = [operation for operation in away.operations if operation.target == "all-gather"]
    sizes = [sorted(away.values[value].size_bytes for value in gather.outputs) for gather in gathers]
    assert sizes == [[SHARE_BYTES, WHOLE_BYTES]] * len(gathers)


@pytest.mark.parametrize("share_of_units", [3, 1])
def test_the_optimizer_is_on_the_host_where_all_shares_are(share_of_units: int):
    kinds = {"parameters": 3 * SHARE_BYTES, "inputs": 7, "optimizer": 100, "communication buffers": 50}
    around = StaticMemory(static_bytes=kinds, optimizer_step_bytes=20, gradient_shards=RANKS)
    units = units_with()
    for path in list(units)[:share_of_units]:
        units = {**units, path: replace(units[path], is_on_host=True)}
    found = resident(around, units, 1)
    assert found.static_bytes["parameters"] == (3 - share_of_units) * SHARE_BYTES
    expected = (0, 0) if share_of_units == 3 else (20, 100)
    assert (found.optimizer_step_bytes, found.static_bytes.get("optimizer", 0)) == expected


def test_gradients_of_earlier_backwards_wait_whole_or_in_shares():
    plain = step_of(units_with())
    waiting = step_of(units_with(sends=False))
    adding = step_of(units_with(sends=False, finds=frozenset({WHOLE})))
    last = step_of(units_with(finds=frozenset({WHOLE})))
    each = step_of(units_with(finds=frozenset({SHARES})))
    assert [left_bytes(graph) for graph in (plain, each)] == [3 * SHARE_BYTES] * 2
    assert left_bytes(adding) == 3 * WHOLE_BYTES
    assert (waiting.found_bytes, adding.found_bytes, each.found_bytes) == (0, 3 * WHOLE_BYTES, 3 * SHARE_BYTES)
    assert left_bytes(last) == 3 * SHARE_BYTES and last.found_bytes == 3 * WHOLE_BYTES
