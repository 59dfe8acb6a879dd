"""Devices of a pipeline: peaks against the step unrolled, plans against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from planner.common.options import Search
from planner.extras.pipelines import StagePlan
from planner.extras.pipelines.devices import Device
from planner.extras.pipelines.schedules import Boundary, Pass, left_by, loads, most_in_flight, passes
from planner.extras.pipelines.stages import Stage, whole_stage
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import LossPasses, StaticMemory
from planner.plans.plan import Plan, PlanOrigin
from tests.example_graphs import transformer
from tests.oracle import cheapest, random_graph
from tests.tiers import tiered

TWO_CHUNKS = [
    Pass(*one)
    for one in [(False, 0, 0), (False, 1, 0), (False, 0, 1), (True, 1, 0), (True, 0, 0), (False, 1, 1), (True, 1, 1),
                (True, 0, 1)]
]  # fmt: skip
"""How a device runs two micro-batches through two chunks."""


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_one_more_than_the_warm_up_is_in_flight(micro_batches: int, warm_up: int):
    order = passes(micro_batches, min(warm_up, micro_batches))
    assert sorted(one.micro_batch for one in order) == sorted([*range(micro_batches)] * 2)
    assert most_in_flight(loads(order, 1)) == min(warm_up + 1, micro_batches)


def test_one_micro_batch_has_no_gradients_before_it():
    (one,) = {load.accumulated for load in loads(passes(1, warm_up=1), 1)}
    assert one == (False,)


def stage_of(graph: TrainingGraph, costs: Sequence[OperationCost], loss: LossPasses | None = None) -> Stage:
    gradient_bytes = sum(value.size_bytes for value in graph.values if value.kind == "gradient")
    return whole_stage(graph, costs, gradient_bytes=gradient_bytes, input_gradients=(), received=(), loss=loss)


def planned(device: Device, budget_bytes: int, seconds: float = 1.0) -> StagePlan | None:
    return device.planned(budget_bytes, Search(time_limit_seconds=seconds), [PlanOrigin()] * len(device.chunks))


def unrolled_peak(chunks: Sequence[Stage], plans: Sequence[Plan], device_order: Sequence[Pass]) -> int:
    """Write out all passes of a device as one step, each run an operation of its own, and simulate that."""
    operations: list[Operation] = []
    values: list[Value] = []
    costs: list[OperationCost] = []
    current: dict[tuple[int, int, int], int] = {}
    has_gradients: set[int] = set()
    for number, done in enumerate(device_order):
        part = chunks[done.chunk]
        order = plans[done.chunk].schedule_for(part.graph).order
        turn = order.index(part.wait)
        first = {index: position for position, index in reversed(list(enumerate(order)))}
        last = {index: position for position, index in enumerate(order)}
        made_here: list[int] = []
        for position in range(turn, len(order)) if done.is_backward else range(turn):
            operation = part.graph.operations[order[position]]

            def at(value: int, done: Any = done) -> tuple[int, int, int]:
                return done.chunk, done.micro_batch, value

            index = order[position]
            inputs = [current[at(value)] for value in operation.inputs]
            outputs = []
            for value in operation.outputs:
                kept = part.graph.values[value]
                is_again = position > first[index]
                if not (is_again and kept.retained):
                    current[at(value)] = len(values)
                # Gradients of later passes are added to the first ones when the pass ends.
                is_held = (
                    kept.retained and not is_again and not (kept.kind == "gradient" and done.chunk in has_gradients)
                )
                if kept.retained and not is_again:
                    made_here.append(len(values))
                is_held = is_held and kept.kind == "gradient"
                outputs.append(len(values))
                values.append(replace(kept, name=f"{number} {position} {kept.name}", retained=is_held))
            if last[index] > first[index] and operation.state_bytes:
                state = (done.chunk, done.micro_batch, -1 - index)
                if position == first[index]:
                    current[state] = len(values)
                    outputs.append(len(values))
                    values.append(Value(name=f"{number} state {index}", size_bytes=operation.state_bytes))
                else:
                    inputs.append(current[state])
            operations.append(replace(operation, name=f"{number} {position}", key=f"{number} {position}",
                                      inputs=tuple(inputs), outputs=tuple(outputs), recomputable=False,
                                      state_bytes=0))  # fmt: skip
            costs.append(part.costs[index])
        if done.is_backward:
            kept_to_the_end = [
                copy
                for value, kept in enumerate(part.graph.values)
                if kept.retained and (copy := current[done.chunk, done.micro_batch, value]) is not None
            ]
            operations[-1] = replace(operations[-1], inputs=(*operations[-1].inputs, *kept_to_the_end))
            has_gradients.add(done.chunk)
    graph = TrainingGraph(operations=tuple(operations), values=tuple(values))
    return simulate(graph, costs, Schedule.keep_all(graph)).peak_bytes


@pytest.mark.parametrize("percent", [100, 75])
@pytest.mark.parametrize("order", [passes(2, warm_up=1), passes(8, warm_up=2), passes(3, warm_up=3), TWO_CHUNKS])
def test_the_peak_of_a_device_is_that_of_all_its_passes_written_out(order: Sequence[Pass], percent: int):
    chunks = [stage_of(*transformer(3 + chunk)) for chunk in range(1 + max(one.chunk for one in order))]
    device = Device(0, chunks, StaticMemory(static_bytes={"parameters": 1000}), loads(order, len(chunks)))
    made = planned(device, device.keep_all.peak_bytes * percent // 100)
    assert made is not None
    peak_bytes = unrolled_peak(chunks, made.plans, order) + 1000
    assert max(part.peak_bytes for part in made.plans) == peak_bytes <= device.keep_all.peak_bytes * percent // 100
    for part in made.plans:
        assert sum(part.anatomy.values()) == part.peak_bytes
    assert (made.recompute_seconds > 0) == (percent < 100)
    assert made.lower_bound_seconds <= made.recompute_seconds


def test_what_is_left_of_finished_micro_batches():
    boundary = Boundary(sent_bytes=10, returned_bytes=3, kept_bytes=1)
    gpipe = passes(2, warm_up=2)
    assert left_by(gpipe, [boundary]) == [0, 0, 0, 14, 28]
    one_by_one = passes(4, warm_up=1)  # F0 F1 B0 F2 B1 F3 B2 B3
    assert left_by(one_by_one, [boundary], warm_up=2) == [0, 0, 0, 14, 14, 15, 15, 6, 4]
    last = passes(2, warm_up=0)  # F0 B0 F1 B1
    assert left_by(last, [Boundary(output_bytes=7, kept_bytes=1)], warm_up=1) == [0, 0, 8, 1, 2]


def test_what_runs_again_before_a_stage_waits_does_so_after_it():
    graph, costs = transformer(2)
    stage = stage_of(graph, costs)
    again = next(index for index, operation in enumerate(stage.graph.operations) if operation.recomputable)
    order = list(range(len(stage.graph.operations)))
    order.insert(stage.wait, again)
    found = stage.as_run(Schedule(tuple(order))).order
    assert found.index(again, again + 1) == stage.wait + 1 and stage.as_run(Schedule(found)).order == found


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_module_captured_alone_is_planned_as_a_stage(has_loss: bool):
    graph, costs = transformer(4)
    loss = LossPasses(saved_bytes=5000, held_bytes=64, forward_bytes=300, backward_bytes=700) if has_loss else None
    stage = stage_of(graph, costs, loss)
    device = Device(0, [stage], StaticMemory(), loads(passes(3, warm_up=3), 1))
    budget_bytes = device.keep_all.peak_bytes * 3 // 4
    made = planned(device, budget_bytes)
    assert made is not None and made.micro_batches_in_flight == 3
    (plan,) = made.plans
    again = plan.schedule_for(graph)  # its keys are those of the module, and of nothing that was put around it
    assert len(again.order) > len(graph.operations) and made.peak_bytes <= budget_bytes
    waits_bytes = made.saved_bytes[0] - (5064 if has_loss else 0)
    turn = again.order.index(graph.loss_index)
    freed = sum(graph.values[v].size_bytes for v in graph.operations[graph.loss_index].outputs)
    assert simulate(graph, costs, again).timeline_bytes[turn] - freed == waits_bytes


@pytest.mark.parametrize("seed", tiered(range(4), quick=(3,)))
def test_plans_of_small_graphs_are_optimal(seed: int):
    graph, costs = random_graph(seed, operations=9, plain=True)
    turn = len(graph.operations) // 2
    loss = replace(graph.operations[turn], phase=Phase.LOSS, recomputable=False)
    stage = stage_of(replace(graph, operations=(*graph.operations[:turn], loss, *graph.operations[turn + 1 :])), costs)
    in_flight = 3
    order = passes(in_flight, warm_up=in_flight)
    device = Device(0, [stage], StaticMemory(), loads(order, 1))
    feasible = 0
    for budget in range(device.keep_all.peak_bytes - 1, device.keep_all.peak_bytes // 2, -6):
        # Others hold as much as this one may: the best over all bounds is the best plan there is.
        bounds = [(in_flight - 1) * most for most in range(budget // in_flight + 1)]
        problems = [stage.problem(budget, (beside, 0, beside, 0), beside // (in_flight - 1)) for beside in bounds]
        exact = min((found[0] for problem in problems if (found := cheapest(problem)) is not None), default=None)
        made = planned(device, budget, seconds=5)
        if made is None:
            assert exact is None and device.no_plan_fits(budget).minimum_feasible_peak_bytes > budget
            continue
        assert exact is not None
        assert made.lower_bound_seconds <= exact + 1e-9
        assert made.recompute_seconds == pytest.approx(exact)
        # Also what runs again between forward and backward has the other micro-batches beside it.
        assert unrolled_peak([stage], made.plans, order) == made.plans[0].peak_bytes <= budget
        feasible += 1
    assert feasible
