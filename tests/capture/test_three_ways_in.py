"""One model through all three ways in: captured whole, recorded as eager runs it, and block by block.

What is compared are the operations of the step, by their keys, and its peak when everything is kept, with what is
resident. Left out are what a way adds only to say how long things live, which runs nothing; how a recorded backward
begins, which is a part of the loss elsewhere; and sums of gradients. Those are autograd's own, between two derivatives:
they belong to no operation of the forward, so each way names them by what it saw last, and only their number is the
same. Where a way runs other kernels, or holds something longer, the test says which and how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture import provenance
from planner.capture.blocks.whole_step import RETURN_TARGET
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.capture.memory import measure_peak
from planner.capture.provenance import is_library, short_path
from planner.ir.checkpoints import BOOKKEEPING, END
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation, simulate
from planner.measure import loss
from planner.runtimes.regional import lower_regional
from planner.session.eager_study import study_eager
from planner.session.step import Options, lower_as_run
from planner.zoo.modules import MiniGPT
from tests.models import Layers, Stack, linear, mean_square, perceptron
from tests.tiers import tiered

WIDTH = 64

LossFunction = Callable[[torch.Tensor], torch.Tensor]


class Perceptron(Layers, inner=partial(perceptron, WIDTH)):
    """Normalised, widened and added to what came in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


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
        recorded=study_eager(model, inputs, replace(options, runtime=planner.Runtime("modules"))).graph,
        blocks=lower_regional(model, inputs, options).lowered.lowered.graph,
    )


def perceptrons(rows: int = 32) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Perceptron() for _ in range(2))), torch.randn(rows, WIDTH)


@cache
def ways_of(build: Callable[[], tuple[nn.Module, torch.Tensor]], loss_fn: LossFunction | None = None) -> Graphs:
    """Return the step of a model that several tests read by each way in."""
    return three_ways(*build(), loss_fn=loss_fn)


# Where operations come from.


def test_an_operation_is_of_the_users_own_line_whichever_way_a_step_came_in() -> None:
    graphs = ways_of(perceptrons)
    for graph in (graphs.captured, graphs.recorded):
        lines = {op.source.rpartition(":")[0] for op in graph.operations if op.phase is Phase.FORWARD and op.flops}
        assert lines == {short_path(__file__)}


def test_a_users_own_file_may_have_a_name_of_ours() -> None:
    assert not is_library("somewhere/capture.py") and not is_library("somewhere/flops.py")
    assert is_library(provenance.__file__)


# The loss.


@pytest.mark.parametrize("loss_fn", [None, mean_square], ids=["none known", "known"])
def test_the_loss_is_one_operation_whichever_way_a_step_came_in(loss_fn: LossFunction | None) -> None:
    losses = [graph.operations[graph.loss_index] for graph in ways_of(perceptrons, loss_fn).all()]
    assert {(op.key, op.name, op.target, op.module, op.phase, op.recomputable, op.dtype) for op in losses} == {
        ("|loss|l0", "loss", losses[0].target, "", Phase.LOSS, False, "")
    }


def test_the_loss_takes_the_same_memory_whichever_way_a_step_came_in() -> None:
    held = []
    for graph in ways_of(perceptrons, mean_square).all():
        made = [graph.values[value] for value in graph.operations[graph.loss_index].outputs]
        held.append([(value.name, value.size_bytes, value.kind) for value in made if value.name.startswith("loss")])
    assert held[0] == held[1] == held[2] and len(held[0]) == 2


# Operations.

RUN_NOTHING = (*BOOKKEEPING, END, RETURN_TARGET)
SUMS = ("aten.add.Tensor", "aten.add_.Tensor")
BEGINNINGS = Counter({f"|aten.{name}.default|b0": 1 for name in ("new_zeros", "ones_like", "ones")})
"""How a recorded backward begins: from the tensors that stand in for the loss and its gradient, and the tangents."""


def is_sum(operation: Operation) -> bool:
    return operation.phase is Phase.BACKWARD and operation.target in SUMS


def operations(graph: TrainingGraph) -> Counter[str]:
    return Counter(o.key for o in graph.operations if o.target not in RUN_NOTHING and not is_sum(o)) - BEGINNINGS


def kept(graph: TrainingGraph) -> Evaluation:
    return simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), Schedule.keep_all(graph))


def peak_bytes(graph: TrainingGraph) -> int:
    return kept(graph).peak_bytes + graph.total_static_bytes


class Attending(
    Layers, norm=lambda: nn.LayerNorm(WIDTH), qkv=linear(WIDTH, 3 * WIDTH), out=linear(WIDTH, WIDTH), mlp=Perceptron
):
    """Attention before a perceptron, with dropout between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (p.view(batch, length, 4, -1).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        attended: torch.Tensor = self.mlp(x + self.dropout(self.out(mixed)))
        return attended


def transformer(between: Callable[[], nn.Module] = nn.Identity) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Attending(dropout=between()) for _ in range(2))), torch.randn(2, 16, WIDTH)


def linear_and_gelu() -> tuple[nn.Module, torch.Tensor]:
    rows = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
    return nn.Sequential(*rows), torch.randn(32, WIDTH)


@cache
def ways_of_mini_gpt() -> Graphs:
    sizes = {"layers": 2, "width": WIDTH, "heads": 4, "hidden": 256, "vocabulary": VOCABULARY, "positions": 32}
    ids, labels = torch.randint(VOCABULARY, (2, 2, 16))
    return three_ways(MiniGPT(**sizes, dropout=0.0), ids, labels)  # type: ignore[arg-type]


VOCABULARY = 100


@pytest.mark.parametrize(
    ("build", "loss_fn"),
    tiered(
        product([linear_and_gelu, perceptrons, transformer], [None, mean_square]),
        quick=[(linear_and_gelu, mean_square), (perceptrons, None), (perceptrons, mean_square), (transformer, None)],
    ),
)
def test_blocks_in_a_row_are_the_same_operations_and_the_same_peak_by_all_ways(
    build: Callable[[], tuple[nn.Module, torch.Tensor]], loss_fn: LossFunction | None
) -> None:
    ways = ways_of(build, loss_fn)
    assert operations(ways.captured) == operations(ways.recorded) == operations(ways.blocks)
    assert len({sum(map(is_sum, graph.operations)) for graph in ways.all()}) == 1
    assert peak_bytes(ways.captured) == peak_bytes(ways.blocks)
    # A captured backward lets go of a layer's input once the gradient of its weight is there; autograd, once the whole
    # derivative is. The gradient of the bias comes last, and so comes on top, unless the peak is before the backward.
    peak_at = ways.recorded.operations[kept(ways.recorded).peak_position]
    bias_bytes = 0
    if peak_at.key not in BEGINNINGS:
        assert peak_at.target == "aten.sum.dim_IntList"
        bias_bytes = sum(ways.recorded.values[value].size_bytes for value in peak_at.outputs)
    assert peak_bytes(ways.recorded) - peak_bytes(ways.captured) == bias_bytes
    assert bias_bytes or (build is linear_and_gelu and loss_fn is not None)


def test_a_model_with_more_than_its_blocks_is_the_same_operations_by_all_ways() -> None:
    ways = ways_of_mini_gpt()
    captured, recorded, blocks = map(operations, ways.all())
    assert captured == blocks
    # A recording knows in the backward which module saved what is read. The gradient of positions, which are added to
    # all of a batch, is a sum that reads nothing saved, so it goes with the derivative before it.
    assert recorded - captured == Counter({"blocks.0.attention_norm|aten.sum.dim_IntList|b0": 1})
    assert captured - recorded == Counter({"|aten.sum.dim_IntList|b0": 1})
    assert len({sum(map(is_sum, graph.operations)) for graph in ways.all()}) == 1


def test_a_tied_table_is_summed_in_place_only_where_the_whole_step_is_one_graph() -> None:
    ways = ways_of_mini_gpt()
    assert peak_bytes(ways.recorded) == peak_bytes(ways.blocks)
    table_bytes = VOCABULARY * WIDTH * 4
    captured, recorded, blocks = (at_sum_bytes(graph, table_bytes) for graph in ways.all())
    assert recorded == blocks == captured + table_bytes == kept(ways.recorded).peak_bytes


def at_sum_bytes(graph: TrainingGraph, size_bytes: int) -> int:
    """Return what the step holds during the first sum of gradients of a size."""
    read = [[graph.values[value].size_bytes for value in operation.inputs] for operation in graph.operations]
    sums = (i for i, o in enumerate(graph.operations) if is_sum(o) and read[i].count(size_bytes) == 2)
    return kept(graph).timeline_bytes[next(sums)]


def test_dropout_is_one_operation_in_a_graph_and_four_in_eager_on_a_cpu() -> None:
    ways = three_ways(*transformer(partial(nn.Dropout, 0.1)))
    captured, recorded, blocks = map(operations, ways.all())
    assert captured == blocks and peak_bytes(ways.captured) == peak_bytes(ways.blocks)
    forward = ("empty_like.default", "bernoulli_.float", "div_.Scalar", "mul.Tensor")
    assert captured - recorded == Counter(
        f"{block}.dropout|aten.native_dropout{name}.default|{phase}0"
        for block in range(2)
        for name, phase in (("", "f"), ("_backward", "b"))
    )
    assert recorded - captured == Counter(
        f"{block}.dropout|aten.{target}|{phase}0"
        for block in range(2)
        for target, phase in (*((target, "f") for target in forward), ("mul.Tensor", "b"))
    )


# What eager does around blocks.

TAIL_WIDTH, TAIL_ROWS = 32, 128


class Tail(Stack):
    """Blocks, and after them something wide whose gradient has several parts."""

    def __init__(self, *uses: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(2, partial(perceptron, WIDTH), has_loss=False, uses=uses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = super().forward(x).repeat(1, TAIL_WIDTH)
        return sum((use(wide).sum() for use in self.uses), start=torch.zeros(()))


def test_gradients_are_summed_in_place_around_blocks_where_autograd_does_so() -> None:
    model = Tail(torch.neg, lambda wide: wide.flip(0), lambda wide: wide.roll(1, 0))
    x = torch.randn(TAIL_ROWS, WIDTH)
    ways = three_ways(model, x)
    wide_bytes = TAIL_ROWS * WIDTH * TAIL_WIDTH * 4
    captured, recorded, blocks = (at_sum_bytes(graph, wide_bytes) for graph in ways.all())
    assert recorded == blocks == captured - wide_bytes  # the graph sums as it was traced
    assert peak_bytes(ways.recorded) == peak_bytes(ways.blocks) < peak_bytes(ways.captured)
    plan = planner.plan(model, x, budget="100%", runtime="regional")
    measured = planner.verify(model, x, plan=plan, timed_steps=1)
    assert 0 <= plan.peak_bytes - measured.peak_bytes < 1024


def test_a_number_that_eager_multiplies_by_is_kept_only_in_a_recorded_step() -> None:
    ways = three_ways(Tail(*(lambda wide: wide * 2.0,) * 3), torch.randn(TAIL_ROWS, WIDTH))
    assert peak_bytes(ways.recorded) - peak_bytes(ways.blocks) == 3 * 64  # of 8 bytes each, rounded up


def test_gradients_of_a_loss_are_summed_in_place_where_autograd_does_so() -> None:
    def in_three_ways(y: torch.Tensor) -> torch.Tensor:
        return (-y).sum() + y.flip(0).sum() + y.roll(1).sum()

    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(256, WIDTH)
    output = model(x).detach().requires_grad_()

    def differentiate() -> tuple[torch.Tensor, ...]:
        value = in_three_ways(output)
        return value, *torch.autograd.grad(value, output)

    differentiate()
    takes = loss.memory_of(model, Inputs.of(x, None), in_three_ways)
    gradient_bytes = output.numel() * 4
    assert takes.held_bytes == 2 * 64  # two numbers, each in a block of its own
    takes_bytes = takes.working_bytes + gradient_bytes + 2 * 4
    assert takes_bytes == measure_peak(differentiate, x.device)[0]


def test_what_is_eager_in_the_backward_is_of_the_module_whose_derivative_it_is() -> None:
    blocks = ways_of_mini_gpt().blocks
    eager = {o.module for o in blocks.operations if o.phase is Phase.BACKWARD and not o.region and o.target in HEAD}
    assert eager == {"head", "norm", "tokens", "positions"}


HEAD = {"aten.mm.default", "aten.native_layer_norm_backward.default", "aten.embedding_dense_backward.default"}
