"""Established systems as schedules: each rule by hand on small graphs, and what all of them promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cost_models
from planner import strategies
from planner.analysis.audit import audit_study
from planner.analysis.study import Study
from planner.analysis.trade_off import answers as ways
from planner.common.options import Search
from planner.errors import UsageError
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.host import Host
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.plans.comparison import every_nth_layer
from planner.report.comparisons import render_audit
from planner.solving.segmentations import turning_point
from planner.strategies import _rules
from tests.example_graphs import Builder, transformer
from tests.planned import printed, study_of

GRAPH, COSTS = transformer(4)
HOST = Host(bytes_per_second=1e11, budget_bytes=2**62, least_bytes=1)


def on_h100(graph: TrainingGraph = GRAPH, costs: tuple[OperationCost, ...] = COSTS) -> Study:
    return replace(study_of(graph, costs), device=cost_models.device("h100"))


# Blocks of four operations: 4i to 4i+3 is block i, and ``backward(i)`` the first of its backward.


def chain(blocks: int = 4) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    b, unit = Builder(), 64
    x = b.add("given", [], [0], seconds=0.0, recomputable=False, module="")[0]
    made = []
    for i in range(blocks):
        n = b.add("aten.native_layer_norm.default", [x], [unit], module=f"h.{i}.norm")[0]
        u = b.add("aten.mm.default", [n], [4 * unit], module=f"h.{i}.up")[0]
        g = b.add("aten.gelu.default", [u], [4 * unit], module=f"h.{i}.act")[0]
        made.append((x, n, u, g))
        x = b.add("aten.mm.default", [g], [unit], module=f"h.{i}.down")[0]
    d = b.add("tangent", [x], [unit], phase=Phase.LOSS, kind="tangent", retained=True, seconds=0.0)[0]
    for i in reversed(range(blocks)):
        for target, module, saved, size in (
            ("mm", "down", made[i][3], 4),
            ("gelu_backward", "act", made[i][2], 4),
            ("mm", "up", made[i][1], 1),
            ("norm_backward", "norm", made[i][0], 1),
        ):
            d = b.add(f"aten.{target}.default", [d, saved], [size * unit], module=f"h.{i}.{module}",
                      phase=Phase.BACKWARD)[0]  # fmt: skip
    return b.graph("chain", {}), tuple(b.costs)


def backward(block: int, blocks: int = 4) -> int:
    return 2 + 4 * blocks + 4 * (blocks - 1 - block)


def forward(block: int, *which: int) -> tuple[int, ...]:
    return tuple(1 + 4 * block + index for index in which)


def recomputed(name: str) -> dict[int, tuple[int, ...]]:
    return strategies.schedule(name, *chain()).recomputations()


ALL = range(4)
BY_HAND: dict[str, dict[int, tuple[int, ...]]] = {
    # What a block's backward needs runs again when it first needs any of it; the product at its end does not.
    "pytorch-checkpoint": {backward(i): forward(i, 0, 1, 2) for i in ALL},
    "every-layer": {backward(i): forward(i, 0, 1, 2) for i in ALL},
    "every-2": {backward(i): forward(i, 0, 1, 2) for i in (0, 2)},
    "every-3": {backward(i): forward(i, 0, 1, 2) for i in (0, 3)},
    "chunked-2": {backward(i + 1): forward(i, *range(7)) for i in (0, 2)},
    "chunked-3": {backward(2): forward(0, *range(11)), backward(3): forward(3, 0, 1, 2)},
    # The last segment is left as it is, and takes what does not divide.
    "checkpoint-sequential-2": {backward(1): forward(0, *range(7))},
    "checkpoint-sequential-3": {backward(i): forward(i, 0, 1, 2) for i in (0, 1)},
    "checkpoint-sequential-1": {},
    # All that is not kept runs again at the block's first need, not each at its own.
    "selective": {backward(i): forward(i, 0, 2) for i in ALL},
    "torchtitan-selective": {backward(i): forward(i, 0, 2) for i in ALL},
    # Where autograd is entered anew, the product at the end runs again too.
    "megatron-uniform-2": {backward(i + 1): forward(i, *range(8)) for i in (0, 2)},
    "megatron-block-1": {backward(0): forward(0, *ALL)},
    "megatron-block-9": {backward(i): forward(i, *ALL) for i in ALL},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_runs_again_and_when(name: str) -> None:
    assert recomputed(name) == BY_HAND[name]


def test_figures_by_hand() -> None:
    """The peak is while the first gradient of the last block is made, from its g."""
    graph, costs = chain()
    held = simulate(graph, costs, Schedule.keep_all(graph))
    found = simulate(graph, costs, strategies.schedule("pytorch-checkpoint", graph, costs))
    boundaries, tangent, block, gradient = 3, 1, 1 + 4 + 4, 4
    assert held.peak_bytes == 64 * (boundaries + tangent + 4 * block + gradient)
    assert found.peak_bytes == 64 * (boundaries + tangent + block + gradient)
    assert found.recompute_seconds == pytest.approx(4 * 3e-3)


def test_the_baselines_are_the_same_thing() -> None:
    for name, n in (("pytorch-checkpoint", 1), ("every-2", 2), ("every-3", 3)):
        assert strategies.schedule(name, GRAPH, COSTS) == every_nth_layer(GRAPH, n)


def test_torchtitan_keeps_every_second_product() -> None:
    before = strategies.schedule("torchtitan-selective", GRAPH, COSTS).recomputations()
    again = {GRAPH.operations[index].module.rpartition("h.0.")[2] for index in before[max(before)]}
    assert {"attn.c_proj", "ln_1", "mlp.1", "ln_2"} <= again
    assert again.isdisjoint({"attn", "attn.c_attn", "mlp.0", "mlp.2"})


# What waits on the host: by the operation that makes it, before which operation it leaves, and before which it returns.


def moves(name: str) -> dict[int, tuple[int, int]]:
    graph, costs = chain()
    schedule = strategies.schedule(name, graph, costs, HOST)
    simulate(graph, costs, schedule, HOST)
    return {
        graph.producer[o.value]: (schedule.order[o.leaves], schedule.order[o.returns[0]]) for o in schedule.offloads
    }


INPUTS = {4 * i: (2 + 4 * i, 1 + 4 * i) for i in (1, 2, 3)}
"""Of each block but the first, which is given its own: away from its first operation to that one's second run."""


@pytest.mark.parametrize("name", ["deepspeed-cpu-checkpointing", "offloaded-checkpoint"])
def test_inputs_of_blocks_wait_on_the_host(name: str) -> None:
    assert moves(name) == INPUTS
    graph, costs = chain()
    ways = {"deepspeed-cpu-checkpointing": "megatron-block-9", "offloaded-checkpoint": "pytorch-checkpoint"}
    assert strategies.schedule(name, graph, costs, HOST).order == strategies.schedule(ways[name], graph, costs).order


def test_unsloth_keeps_the_last_input_and_small_ones_and_fetches_a_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moves("unsloth") == {}
    monkeypatch.setattr(_rules, "_UNSLOTH_MOVES_ABOVE_BYTES", 63)
    assert moves("unsloth") == {4 * i: (2 + 4 * i, 5 + 4 * i) for i in (1, 2)}


def test_save_on_cpu_sends_all_that_the_backward_reads() -> None:
    graph, _ = chain()
    turn = turning_point(graph)
    read = {graph.producer[v] for op in graph.operations[turn:] for v in op.inputs if graph.producer[v] < turn}
    assert moves("save-on-cpu").keys() == {index for index in read if index and graph.operations[index].name}
    graph, costs = chain()
    assert not strategies.schedule("save-on-cpu", graph, costs, HOST).recomputations()


def test_without_a_link_to_the_host_nothing_is_offloaded() -> None:
    study = study_of(GRAPH, COSTS)
    assert study.strategy("every-2").recomputations()
    with pytest.raises(UsageError, match="link"):
        study.strategy("save-on-cpu")


def test_a_plan_beside_what_offloads_may_offload_as_much() -> None:
    names = ("save-on-cpu", "deepspeed-cpu-checkpointing")
    found = [audit_study(on_h100(), name, Search(time_limit_seconds=0.5)) for name in names]
    for audit in found:
        assert audit.now.offloading is not None
        assert audit.report()["current"]["host_bytes"] == audit.now.offloading.host_bytes > 0
        assert 0 <= audit.best.lower_bound_overhead <= audit.best.overhead <= audit.now.overhead
        text = printed(render_audit, audit, width=100)
        assert "host" in text and "the plans beside it may offload as much" in " ".join(text.split())
    assert max(audit.now.overhead - audit.best.overhead for audit in found) > 0.05


# What every strategy promises.


ELSEWHERE = {
    "sqrt",  # a rule that is tested with the solvers
    "save-on-cpu", "deepspeed-cpu-checkpointing", "offloaded-checkpoint", "unsloth",
}  # fmt: skip
"""Those that have tests of their own."""


def test_every_strategy_is_listed_here() -> None:
    listed = {strategies.get(name).strategy.name for name in BY_HAND}
    assert listed | ELSEWHERE == strategies.known().keys()
    assert all(strategy.summary for strategy in strategies.known().values())


def test_no_bound_is_above_a_strategy() -> None:
    graph, costs = transformer(2)
    study, search = on_h100(graph, costs), Search(time_limit_seconds=0.02, deterministic=True)
    host = study.unlimited_host()
    found = {name: audit_study(study, name, search) for name in strategies.known()}
    for name, audit in found.items():
        assert 0 <= audit.best.lower_bound_overhead <= audit.best.overhead <= audit.now.overhead
        evaluation = simulate(graph, costs, strategies.schedule(name, graph, costs, host), host)
        assert audit.now.peak_bytes == evaluation.peak_bytes + graph.total_static_bytes
        assert (audit.now.offloading.host_bytes if audit.now.offloading else 0) == evaluation.host_bytes
        assert audit.now.overhead == pytest.approx(evaluation.added_seconds / audit.now.baseline_step_seconds)
    assert max(audit.now.overhead - audit.best.overhead for audit in found.values()) > 0.1
    for name in ("every", "save-on-cpu", "unsloth"):
        assert audit_study(on_h100(graph, costs), name, search).report() == found[name].report()


def test_what_does_not_apply_says_why() -> None:
    b = Builder()
    x = b.add("aten.mm.default", [], [64], module="a")[0]
    b.add("aten.mm.default", [x], [64], module="a", phase=Phase.BACKWARD, kind="gradient", retained=True)
    flat = on_h100(b.graph("flat", {}), tuple(b.costs))
    with pytest.raises(UsageError, match=r"^flat has no repeated blocks$"):
        flat.strategy("pytorch-checkpoint")
    with pytest.raises(UsageError, match="cannot be cut"):
        flat.strategy("sqrt")
    with pytest.raises(UsageError, match="chain has 4 blocks, too few for 5"):
        recomputed("checkpoint-sequential-5")


# Names.


def test_names_with_numbers() -> None:
    assert strategies.get("megatron-block").number_among(4) == 2
    assert strategies.get("megatron-block-3").number_among(4) == 3
    assert strategies.get("every-layer").strategy.name == "pytorch-checkpoint"
    assert {"every-N", "selective"} <= set(strategies.names())
    for wrong in ("every-0", "every-", "selective-2", "every-x", "every-99999", "-2", ""):
        assert strategies.find(wrong) is None
    with pytest.raises(UsageError, match=r"no strategy 'megatron-blok'; did you mean .*'megatron-block-N'"):
        strategies.get("megatron-blok")


def test_audit_and_what_if_take_every_name() -> None:
    audit = audit_study(on_h100(), "chunked-2", Search("sqrt"))
    assert audit.current == "chunked-2" and audit.now.recompute_seconds > 0
    ways.check(["megatron-block-3", "sqrt", "every-layer"])
    assert ways.is_strategy("megatron-block-3") and not ways.is_strategy("sqrt")


FACTORY = """
import torch


def make():
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(1024, 64), lambda output: output.square().mean()
"""
