"""Pipelines: schedules against a simulation of events, stages against the step unrolled, plans against brute force."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import cli
import planner
from planner.capture.memory import measure_peak
from planner.common.options import Search
from planner.errors import InfeasibleBudgetError, UsageError
from planner.extras.pipelines import plan_pipeline
from planner.extras.pipelines.devices import Device, make_pipeline_plan
from planner.extras.pipelines.plan import PipelinePlan
from planner.extras.pipelines.schedules import Boundary, Pass, PipelineSchedule, left_by, loads, most_in_flight, passes
from planner.extras.pipelines.stages import IN_FLIGHT, Stage, balanced, cut, whole_stage
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import LossPasses, StaticMemory
from planner.plans.plan import PlanOrigin
from tests.example_graphs import transformer
from tests.oracle import cheapest, random_graph
from tests.tiers import tiered

PIPELINES = [
    PipelineSchedule(stages=stages, micro_batches=micro_batches, name=name, chunks=chunks)
    for name, many in (("1f1b", (1,)), ("gpipe", (1,)), ("interleaved", (2, 3)))
    for stages, micro_batches, chunks in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8, 12), many)
    if name != "interleaved" or micro_batches % stages == 0
]


def in_flight_by_events(schedule: PipelineSchedule) -> list[int]:
    """Run the passes of all devices as soon as what they wait for is done, and count what each device holds."""
    last = schedule.stages * schedule.chunks - 1
    queues = [list(passes(schedule, stage)) for stage in range(schedule.stages)]
    done: set[tuple[bool, int, int]] = set()
    held = [0] * schedule.stages
    most = [0] * schedule.stages
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                chunk, micro_batch = queue[0].chunk * schedule.stages + stage, queue[0].micro_batch
                if queue[0].is_backward:
                    needed = {(False, chunk, micro_batch)} | (
                        {(True, chunk + 1, micro_batch)} if chunk < last else set()
                    )
                else:
                    needed = {(False, chunk - 1, micro_batch)} if chunk else set()
                if not needed <= done:
                    break
                held[stage] += not queue[0].is_backward
                most[stage] = max(most[stage], held[stage])
                held[stage] -= queue[0].is_backward
                done.add((queue[0].is_backward, chunk, micro_batch))
                queue.pop(0)
                moved = True
        assert moved, "each device waits for another"
    assert len(done) == 2 * schedule.micro_batches * (last + 1) and not any(held)
    return most


@pytest.mark.parametrize("schedule", PIPELINES, ids=str)
def test_micro_batches_in_flight_are_those_of_the_published_formulas(schedule: PipelineSchedule):
    s, m, v = schedule.stages, schedule.micro_batches, schedule.chunks
    formula = {
        "gpipe": lambda stage: m,
        "1f1b": lambda stage: min(m, s - stage),
        "interleaved": lambda stage: min(2 * (s - stage - 1) + (v - 1) * s + 1, m * v),
    }[schedule.name]
    expected = [formula(stage) for stage in range(s)]
    assert in_flight_by_events(schedule) == expected
    assert [most_in_flight(loads(passes(schedule, stage), schedule.chunks)) for stage in range(s)] == expected


def test_one_micro_batch_has_no_gradients_before_it():
    (one,) = {load.accumulated for load in loads(passes(PipelineSchedule(stages=2, micro_batches=1), 0), 1)}
    assert one == (False,)


@pytest.mark.parametrize(
    "wrong", [{"name": "zero"}, {"stages": 0}, {"micro_batches": 0}, {"chunks": 2}, {"name": "interleaved"}]
)
def test_pipelines_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(UsageError):
        PipelineSchedule(**{"stages": 2, "micro_batches": 4, **wrong})
    with pytest.raises(UsageError, match="no multiple of 2"):
        PipelineSchedule(stages=2, micro_batches=3, name="interleaved", chunks=2)


def test_groups_are_as_equal_as_brute_force_makes_them():
    for row in ([1, 1, 1, 1, 3], [5, 1, 1, 1], [2, 3, 1, 4, 1, 1, 2]):
        for count in range(1, len(row) + 1):
            possible = [(0, *places) for places in itertools.combinations(range(1, len(row)), count - 1)]

            def longest(firsts: Any, row: list[int] = row) -> int:
                return max(sum(row[a:b]) for a, b in zip(firsts, [*firsts[1:], len(row)], strict=True))

            assert longest(balanced(row, count)) == min(map(longest, possible))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_hold_all_operations_and_hand_over_what_others_read(count: int):
    graph, costs = transformer(4)
    stages = cut(graph, costs, count)
    assert sorted(index for stage in stages for index in stage.operations) == list(range(len(graph.operations)))
    assert [layer for stage in stages for layer in stage.layers] == list(
        dict.fromkeys(["transformer.wte", *(f"transformer.h.{i}" for i in range(4)), "transformer.ln_f", "lm_head"])
    )
    assert sum(stage.gradient_bytes for stage in stages) == sum(
        value.size_bytes for value in graph.values if value.kind == "gradient"
    )
    assert sum(cost.seconds for stage in stages for cost in stage.costs) == pytest.approx(sum(c.seconds for c in costs))
    for stage in stages:
        kinds = Counter(value.kind for value in stage.graph.values)
        assert kinds[IN_FLIGHT] == 2
        by_name = {op.name: op for op in stage.graph.operations}
        is_first, is_last = stage is stages[0], stage is stages[-1]
        unit_bytes = 2**20
        received = [stage.graph.values[v].size_bytes for v in by_name["activations received"].outputs]
        assert sorted(received) == ([0, 0] if is_first else [0, 0, unit_bytes])
        assert (not by_name["gradients received"].outputs) == is_last


def test_more_stages_than_layers_are_refused():
    graph, costs = transformer(2)
    with pytest.raises(UsageError, match=r"6 stages need at least as many layers, and toy has 5"):
        cut(graph, costs, 6)


def shared_parameter() -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a step whose first and last layer share a parameter, so that their gradients are summed."""
    rows = [
        # name, module, phase, inputs, sizes, retained gradient
        ("embed", "first", Phase.FORWARD, (), 4, False),
        ("mm", "last", Phase.FORWARD, (0,), 4, False),
        ("loss", "", Phase.LOSS, (1,), 1, False),
        ("grad_weight", "last", Phase.BACKWARD, (2, 0), 16, False),
        ("grad_input", "last", Phase.BACKWARD, (2,), 4, False),
        ("embed_backward", "first", Phase.BACKWARD, (4,), 16, False),
        ("add", "", Phase.BACKWARD, (3, 5), 16, True),
    ]
    operations, values = [], []
    for index, (name, module, phase, inputs, size, retained) in enumerate(rows):
        operations.append(Operation(name=name, key=name, target=name, inputs=inputs, outputs=(index,), phase=phase,
                                    module=module))  # fmt: skip
        values.append(
            Value(name=name, size_bytes=size, retained=retained, kind="gradient" if retained else "activation")
        )
    return TrainingGraph(operations=tuple(operations), values=tuple(values)), (OperationCost(seconds=1.0),) * len(rows)


def test_each_stage_keeps_its_share_of_a_shared_gradient():
    first, last = cut(*shared_parameter(), 2)
    assert (first.gradient_bytes, last.gradient_bytes) == (16, 16)
    assert "add" not in {op.name for op in (*first.graph.operations, *last.graph.operations)}
    sent = next(op for op in last.graph.operations if op.name == "gradients sent")
    assert sum(last.graph.values[v].size_bytes for v in sent.inputs) == 4


def unrolled_peak(chunks: list[Stage], schedules: list[Schedule], pipeline: PipelineSchedule, stage: int) -> int:
    """Write out all passes of a device as one step, each run an operation of its own, and simulate that."""
    operations: list[Operation] = []
    values: list[Value] = []
    costs: list[OperationCost] = []
    current: dict[tuple[int, int, int], int] = {}
    has_gradients: set[int] = set()
    for number, done in enumerate(passes(pipeline, stage)):
        part, order = chunks[done.chunk], schedules[done.chunk].order
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


def plan_toy(pipeline: PipelineSchedule, budget: str, layers: int = 6) -> tuple[PipelinePlan, list[list[Stage]]]:
    graph, costs = transformer(layers)
    parts = cut(graph, costs, pipeline.stages * pipeline.chunks)
    devices = [list(parts[index :: pipeline.stages]) for index in range(pipeline.stages)]
    around = [StaticMemory(static_bytes={"parameters": 1000 * (index + 1)}) for index in range(pipeline.stages)]
    return make_pipeline_plan(devices, around, pipeline, budget=budget, search=Search(time_limit_seconds=1)), devices


@pytest.mark.parametrize("budget", ["100%", "75%"])
@pytest.mark.parametrize(
    "pipeline",
    [
        PipelineSchedule(stages=2, micro_batches=2),
        PipelineSchedule(stages=3, micro_batches=8),
        PipelineSchedule(stages=2, micro_batches=3, name="gpipe"),
        PipelineSchedule(stages=2, micro_batches=4, name="interleaved", chunks=2),
    ],
    ids=str,
)
def test_the_peak_of_a_stage_is_that_of_all_its_passes_written_out(pipeline: PipelineSchedule, budget: str):
    plan, devices = plan_toy(pipeline, budget)
    for made, chunks in zip(plan.stages, devices, strict=True):
        schedules = [part.schedule_for(stage.graph) for part, stage in zip(made.plans, chunks, strict=True)]
        peak_bytes = unrolled_peak(chunks, schedules, pipeline, made.index) + 1000 * (made.index + 1)
        assert max(part.peak_bytes for part in made.plans) == peak_bytes <= plan.budget_bytes
        for part in made.plans:
            assert sum(part.anatomy.values()) == part.peak_bytes
    assert (plan.overhead > 0) == (budget != "100%") or plan.stages[plan.slowest_stage].recompute_seconds == 0
    assert any(stage.recompute_seconds for stage in plan.stages) == (budget != "100%")
    assert plan.lower_bound_overhead <= plan.overhead


def test_what_is_left_of_finished_micro_batches():
    boundary = Boundary(sent_bytes=10, returned_bytes=3, kept_bytes=1)
    gpipe = passes(PipelineSchedule(stages=2, micro_batches=2, name="gpipe"), 0)
    assert left_by(gpipe, [boundary]) == [0, 0, 0, 14, 28]
    one_by_one = passes(PipelineSchedule(stages=2, micro_batches=4), 0)  # F0 F1 B0 F2 B1 F3 B2 B3
    assert left_by(one_by_one, [boundary], warm_up=2) == [0, 0, 0, 14, 14, 15, 15, 6, 4]
    last = passes(PipelineSchedule(stages=2, micro_batches=2), 1)  # F0 B0 F1 B1
    assert left_by(last, [Boundary(output_bytes=7, kept_bytes=1)], warm_up=1) == [0, 0, 8, 1, 2]


def test_what_one_chunk_hands_to_another_has_a_place_for_each_micro_batch():
    order = [Pass(*one) for one in [(False, 0, 0), (False, 1, 0), (False, 0, 1), (True, 1, 0), (True, 0, 0)]]
    order += [Pass(*one) for one in [(False, 1, 1), (True, 1, 1), (True, 0, 1)]]
    boundaries = [Boundary(handed_bytes=5), Boundary(sent_bytes=100)]
    # Two places, of which micro-batches in flight have one or two themselves.
    assert left_by(order, boundaries) == [10, 5, 5, 0, 100, 105, 105, 205, 210]


def test_what_runs_again_before_a_stage_waits_does_so_after_it():
    graph, costs = transformer(2)
    stage = whole_stage(graph, costs, gradient_bytes=0, input_gradients=(), received=(), loss=None)
    again = next(index for index, operation in enumerate(stage.graph.operations) if operation.recomputable)
    order = list(range(len(stage.graph.operations)))
    order.insert(stage.wait, again)
    found = stage.as_run(Schedule(tuple(order))).order
    assert found.index(again, again + 1) == stage.wait + 1 and stage.as_run(Schedule(found)).order == found


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_module_captured_alone_is_planned_as_a_stage(has_loss: bool):
    graph, costs = transformer(4)
    loss = LossPasses(saved_bytes=5000, held_bytes=64, forward_bytes=300, backward_bytes=700) if has_loss else None
    stage = whole_stage(graph, costs, gradient_bytes=1000, input_gradients=(), received=(), loss=loss)
    pipeline = PipelineSchedule(stages=1, micro_batches=3, name="gpipe")
    device = Device(0, [stage], StaticMemory(), loads(passes(pipeline, 0), 1))
    budget_bytes = device.keep_all.peak_bytes * 3 // 4
    made = device.planned(budget_bytes, Search(time_limit_seconds=1), [PlanOrigin()])
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
    graph, costs = random_graph(seed, operations=8, plain=True)
    (stage,) = cut(graph, costs, 1)
    in_flight = 3
    pipeline = PipelineSchedule(stages=1, micro_batches=in_flight, name="gpipe")
    whole = make_pipeline_plan([[stage]], [StaticMemory()], pipeline, budget="100%", search=Search()).stages[0]
    feasible = 0
    for budget in range(whole.peak_bytes - 1, whole.peak_bytes // 2, -6):
        exact = None
        for most in range(budget // in_flight + 1):
            # Others hold as much as this one may: the best over all bounds is the best plan there is.
            found = cheapest(bounded(stage, budget, most, in_flight - 1))
            if found is not None and (exact is None or found[0] < exact):
                exact = found[0]
        try:
            plan = make_pipeline_plan(
                [[stage]], [StaticMemory()], pipeline, budget=budget, search=Search(time_limit_seconds=5)
            )
        except InfeasibleBudgetError as error:
            assert exact is None and error.minimum_feasible_peak_bytes > budget
            continue
        assert exact is not None
        assert plan.stages[0].lower_bound_seconds <= exact + 1e-9
        assert plan.stages[0].recompute_seconds == pytest.approx(exact)
        (made,) = plan.stages[0].plans
        # Also what runs again between forward and backward has the other micro-batches beside it.
        written_out_bytes = unrolled_peak([stage], [made.schedule_for(stage.graph)], pipeline, 0)
        assert written_out_bytes == made.peak_bytes <= budget
        feasible += 1
    assert feasible


def bounded(stage: Stage, budget: int, most: int, others: int) -> Problem:
    """Return the problem in which each of the others holds what this micro-batch may hold."""
    beside = others * most
    return stage.problem(budget, (beside, 0, beside, 0), most)


class Halves(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(3)))


class Send(torch.autograd.Function):
    """Sends an activation away, and gets its gradient when the backward begins."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor) -> torch.Tensor:
        ctx.shape = activation.shape
        return activation.new_zeros(())

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape)


@pytest.mark.parametrize("micro_batches", tiered([1, 2, 4], slow=[2]))
def test_the_predicted_peak_of_a_stage_is_the_measured_one(micro_batches: int):
    torch.manual_seed(0)
    model = Halves()
    plan = plan_pipeline(
        model,
        torch.randn(256, 96),
        loss_fn=lambda output: output.square().mean(),
        budget="100%",
        stages=3,
        micro_batches=micro_batches,
        schedule="gpipe",
    )
    middle = plan.stages[1]
    assert middle.layers == (("1",),)
    stage = planner.auto_wrap(model[1], torch.randn(256, 96, requires_grad=True), budget="1GiB",
                              loss_fn=lambda output: output.sum())  # fmt: skip

    def step() -> None:
        waiting = []
        for _ in range(micro_batches):
            received = torch.randn(256, 96).requires_grad_()
            waiting.append(Send.apply(stage(received)))
        while waiting:
            waiting.pop(0).backward()

    step()  # what torch allocates once is there
    model.zero_grad(set_to_none=True)
    measured_bytes, _ = measure_peak(step, torch.device("cpu"))
    predicted_bytes = middle.peak_bytes - middle.plans[0].total_static_bytes
    handles_bytes = 4 * (micro_batches + 1)  # what Send gives, and the gradient of one of them
    assert measured_bytes == predicted_bytes + handles_bytes


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = cli.main(["pipeline", "minigpt", "--layers", "2", "--seq-len", "64", "--batch-size", "2", *options])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_names_the_stage_that_binds(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "--stages", "2", "--micro-batches", "4", "--budget", "98%", "--time-limit", "2")
    assert code == 0, err
    assert "stage 0 of 2 binds, 2 micro-batches in flight" in out.splitlines()[0]
    assert "Stages of the 1f1b schedule, 4 micro-batches" in out
    code, out, _ = run(capsys, "--stages", "2", "--micro-batches", "4", "--budget", "1GiB",
                       "--schedule", "interleaved", "--optimizer", "adamw", "--json", "-")  # fmt: skip
    report = json.loads(out)
    assert code == 0 and report["pipeline"]["chunks"] == 2
    assert [stage["micro_batches_in_flight"] for stage in report["stages"]] == [5, 3]
    assert all(chunk["static_bytes"]["optimizer"] > 0 for stage in report["stages"] for chunk in stage["chunks"])


def test_the_command_says_which_stage_has_no_plan(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "--stages", "2", "--micro-batches", "4", "--budget", "1MiB")
    assert code == 3
    assert out.startswith("DOES NOT FIT 1.0 MiB") and "bound by stage" in out
    assert "no plan was found that fits 1.0 MiB: stage" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--micro-batches", "4"], "required: --stages"),
        (["--stages", "2"], "required: --micro-batches"),
        (["--stages", "2", "--micro-batches", "0"], "'0' is not a whole number above zero"),
        (["--stages", "99", "--micro-batches", "4"], "99 stages need at least as many layers"),
        (["--stages", "2", "--micro-batches", "4", "--schedule", "1fb1"], "did you mean 1f1b?"),
        (["--stages", "2", "--micro-batches", "3", "--schedule", "interleaved"], "3 is no multiple of 2"),
        (["--stages", "2", "--micro-batches", "4", "--verify"], "unrecognized arguments: --verify"),
        (
            ["--stages", "2", "--micro-batches", "4", "--data-parallel", "fsdp2", "--ranks", "2"],
            "fsdp2 inside",
        ),
    ],
)
def test_wrong_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "--budget", "1GiB", *options)
    assert code == 2 and said in err


def test_every_parameter_is_on_the_devices_that_read_it():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plan = plan_pipeline(
        model,
        torch.randn(32, 64),
        training="adamw",
        loss_fn=lambda output: output.sum(),
        budget="1GiB",
        stages=2,
        micro_batches=4,
    )
    half_bytes = 2 * (64 * 64 + 64) * 4
    for stage, inputs_bytes in zip(plan.stages, (4 * 32 * 64 * 4, 0), strict=True):
        static_bytes = stage.plans[0].static_bytes
        assert static_bytes["parameters"] == half_bytes
        assert static_bytes["inputs"] == inputs_bytes
        assert 2 * half_bytes <= static_bytes["optimizer"] <= 2 * half_bytes + 4 * 64
