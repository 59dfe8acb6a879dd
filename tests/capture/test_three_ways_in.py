"""One model through all three ways in: captured whole, recorded as eager runs it, and block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.ir.checkpoints import NOT_OF_THE_STEP
from planner.ir.graph import Phase, TrainingGraph
from planner.measure import loss
from planner.plans.plan import Plan
from planner.runtimes.regional import lower_regional
from planner.session.step import Options, lower_as_run, study_eager

LOSS_BEFORE = "|the loss and what runs outside the captured graph|l0"
"""What recorded steps called the loss in plan files written before the three ways in had one key for it."""

WIDTH = 64

LossFunction = Callable[[torch.Tensor], torch.Tensor]


class Perceptron(nn.Module):
    """Normalised, widened and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@dataclass(frozen=True)
class Graphs:
    """The step of one model by each way in."""

    captured: TrainingGraph
    recorded: TrainingGraph
    blocks: TrainingGraph

    def all(self) -> tuple[TrainingGraph, TrainingGraph, TrainingGraph]:
        return self.captured, self.recorded, self.blocks


def three_ways(model: nn.Module, *args: torch.Tensor, loss_fn: LossFunction | None = None) -> Graphs:
    inputs = Inputs.of(args, None)
    options = Options(loss=loss.memory_of(model, inputs, loss_fn) if loss_fn is not None else None)
    return Graphs(
        captured=lower_as_run(model, capture(model, inputs), options).lowered.graph,
        recorded=study_eager(model, inputs, replace(options, runtime="modules")).graph,
        blocks=lower_regional(model, inputs, options)[0].lowered.graph,
    )


def perceptrons(rows: int = 32) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Perceptron() for _ in range(3))), torch.randn(rows, WIDTH)


def mean_of_squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


# The loss.


@pytest.mark.parametrize("loss_fn", [None, mean_of_squares], ids=["none known", "known"])
def test_the_loss_is_one_operation_whichever_way_a_step_came_in(loss_fn: LossFunction | None) -> None:
    model, x = perceptrons()
    losses = [graph.operations[graph.loss_index] for graph in three_ways(model, x, loss_fn=loss_fn).all()]
    assert {(op.key, op.name, op.target, op.module, op.phase, op.recomputable, op.dtype) for op in losses} == {
        ("|loss|l0", "loss", losses[0].target, "", Phase.LOSS, False, "")
    }


def test_the_loss_takes_the_same_memory_whichever_way_a_step_came_in() -> None:
    model, x = perceptrons()
    held = []
    for graph in three_ways(model, x, loss_fn=mean_of_squares).all():
        made = [graph.values[value] for value in graph.operations[graph.loss_index].outputs]
        held.append([(value.name, value.size_bytes, value.kind) for value in made if value.name.startswith("loss")])
    assert held[0] == held[1] == held[2] and len(held[0]) == 2


def digest_before(graph: TrainingGraph, loss_sizes: list[int], scalar_bytes: int) -> str:
    """Give the digest of a recorded step as fingerprints had it when the loss had a key of its own there."""
    digest = hashlib.sha256()
    for operation in graph.operations:
        if operation.target in NOT_OF_THE_STEP:
            continue
        sizes = [graph.values[v].size_bytes for v in operation.outputs]
        key = operation.key
        if operation.phase is Phase.LOSS:
            key, sizes = LOSS_BEFORE, loss_sizes
        elif key in ("|aten.new_zeros.default|b0", "|aten.ones_like.default|b0"):
            sizes = [scalar_bytes]
        digest.update(f"{key} {operation.inputs} {operation.outputs} {sizes}\n".encode())
    return digest.hexdigest()[:16]


def test_a_plan_of_a_recorded_step_that_was_written_before_is_carried_over() -> None:
    model, x = perceptrons(512)
    step = planner.study(model, x, runtime="modules", loss_fn=mean_of_squares)
    takes = loss.memory_of(model, Inputs.of(x, None), mean_of_squares)
    plain = step.plan(budget="80%")
    assert plain.fingerprint["graph"] == digest_before(step.graph, [takes.working_bytes, takes.held_bytes], 64)

    plan = planner.plan(model, x, budget="85%", runtime="modules", offload=True, offload_at_least=1)
    text = plan.to_json()
    assert '"|loss|l0"' in text, "nothing that is offloaded leaves before the loss: there is nothing to carry over"
    before = text.replace('"|loss|l0"', json.dumps(LOSS_BEFORE))
    assert Plan.from_json(before) == Plan.from_json(text) == plan
    planner.auto_wrap(model, x, plan=Plan.from_json(before), replan=False)
    assert planner.plan_of(model).offloading == plan.offloading
