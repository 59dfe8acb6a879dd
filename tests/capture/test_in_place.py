"""What a captured step writes over, and what it must not."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import planner
from planner.capture.torch_internals import form_in_place
from planner.ir.graph import named_by, operator_name
from tests.models import Layers, OneLinear, linear
from tests.runtimes.steps import assert_same, beside, measured_bytes, train
from tests.tiers import tiered

aten = torch.ops.aten
WIDTH = 64


def joins(model: nn.Module, *args: torch.Tensor) -> set[tuple[str, ...]]:
    """Return the operators that are one operation."""
    graph = planner.study(model, args, search=planner.Search(deterministic=True)).graph
    several = (operation.keys for operation in graph.operations if operation.then)
    return {tuple(operator_name(named_by(key)[1]) for key in keys) for keys in several}


def assert_carried_out(model: nn.Module, *args: torch.Tensor, budget: str = "100%") -> planner.Plan:
    """Hold bits against eager, and the peak against the plan."""
    plain, planned = beside(model, activation_budget=budget, deterministic=True)
    assert_same(train(plain, args), train(planned, args))
    plan = planner.plan_of(planned)
    predicted = plan.peak_bytes - plan.total_static_bytes
    assert predicted - 1024 <= measured_bytes(planned, args) <= predicted  # sizes are rounded up
    return plan


class Block(Layers, up=linear(WIDTH, 4 * WIDTH), down=linear(4 * WIDTH, WIDTH)):
    """A perceptron with a residual connection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(functional.relu(self.up(x)))
        return y


class Classifier(Layers, blocks=lambda: nn.Sequential(Block(), Block()), head=linear(WIDTH, 1000)):
    """Blocks, and a loss over many classes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(x))
        return functional.cross_entropy(logits, torch.arange(len(x)))


def test_activations_residuals_and_a_softmax_write_over_what_they_read() -> None:
    x = torch.randn(128, WIDTH)
    found = joins(Classifier(), x)
    assert {("addmm", "relu"), ("addmm", "add"), ("addmm", "_log_softmax")} <= found
    assert ("nll_loss_backward", "_log_softmax_backward_data") in found
    assert_carried_out(Classifier(), x)
    plan = assert_carried_out(Classifier(), x, budget="70%")
    assert sum(layer.recomputed for layer in plan.placement) == sum(map(len, plan.recomputations.values())) > 1


def test_without_recompute_a_step_with_many_classes_needs_less_than_eager() -> None:
    model, x = Classifier(), torch.randn(512, WIDTH)
    eager_bytes = measured_bytes(model, x)
    plan = assert_carried_out(model, x)
    assert plan.peak_bytes - plan.total_static_bytes < 0.85 * eager_bytes


class ReadTwice(OneLinear):
    """What an activation reads is read again, so it stays."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (functional.gelu(y) * y.sin()).sum()


def test_what_others_read_stays() -> None:
    found = joins(ReadTwice(WIDTH), torch.randn(32, WIDTH))
    assert not {each for each in found if each[0] == "addmm"}
    assert_carried_out(ReadTwice(WIDTH), torch.randn(32, WIDTH))


class Overwritten(Layers, layer=linear(WIDTH, WIDTH), mean=lambda: nn.Buffer(torch.ones(WIDTH))):
    """Reads a buffer before the step overwrites it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        before = self.mean.clone()
        self.mean.mul_(0.9)
        return ((y + self.mean) * before).square().sum()


def test_what_reads_an_overwritten_buffer_runs_where_it_stands() -> None:
    x = torch.randn(32, WIDTH)
    assert not {each for each in joins(Overwritten(), x) if "add" in each[1:]}
    assert_carried_out(Overwritten(), x)


@torch.library.custom_op("test_in_place::remembers", mutates_args=())
def remembers(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x * 2.0)
    return KEPT[-1]


remembers.register_fake(torch.empty_like)


remembers.register_autograd(lambda ctx, gradient: gradient * 2.0)

KEPT: list[torch.Tensor] = []


class Foreign(OneLinear):
    """An operator from elsewhere that keeps what it gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(remembers(self.linear(x))).sum()


def test_what_an_operator_from_elsewhere_makes_stays() -> None:
    model, planned = beside(Foreign(WIDTH), activation_budget="100%", deterministic=True)
    planned(x := torch.randn(32, WIDTH))
    assert any(torch.equal(kept, model.linear(x) * 2.0) for kept in KEPT), "it was written over"


@pytest.mark.parametrize(
    ("operator", "form"),
    [
        (aten.mul.Tensor, "aten.mul.out"),
        (aten.relu.default, "aten.relu_.default"),
        (aten.add.Scalar, "aten.add_.Scalar"),
        (aten.mul.Scalar, "aten.mul_.Tensor"),
        (aten.gelu_backward.default, "aten.gelu_backward.grad_input"),
        (aten._softmax_backward_data.default, "aten._softmax_backward_data.out"),
        (aten.native_dropout_backward.default, None),
        (aten.rsub.Scalar, None),
    ],
)
def test_an_operator_writes_in_place_where_it_has_a_kernel_for_that(
    operator: torch._ops.OpOverload, form: str | None
) -> None:
    """The others have forms that compute a result first, and copy it."""
    found = form_in_place(operator, True)
    assert (str(found[0]) if found else None) == form


def argument_like(argument: Any, dtype: torch.dtype, is_positive: bool) -> Any:
    """Return something that an operator may be given for an argument that it declares."""
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return (torch.rand(7, 9) if is_positive else torch.randn(7, 9)).to(dtype)
    return {"number": 1.1283791670955126, "float": 0.3, "int": 1, "bool": is_positive, "str": "none"}.get(kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_operator_gives_the_same_bits_in_place(dtype: torch.dtype) -> None:
    packets = [getattr(aten, name) for name in dir(aten) if not name.startswith("__")]
    every = [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]
    held = set()
    for operator, is_first, is_positive in product(every, (True, False), (True, False)):
        if torch.Tag.pointwise not in operator.tags or operator._schema.is_mutable:
            continue
        if (form := form_in_place(operator, is_first)) is None:
            continue
        declared = [argument for argument in operator._schema.arguments if not argument.is_out]
        args = [argument_like(argument, dtype, is_positive) for argument in declared if not argument.kwarg_only]
        with suppress(RuntimeError, NotImplementedError, TypeError):  # not for numbers like these
            made, over = operator(*args), args[0 if is_first else -1]
            if isinstance(over, torch.Tensor) and (made.dtype, made.shape) == (over.dtype, over.shape):
                found = form[0](*args, **({form[1]: over} if form[1] else {}))
                assert torch.equal(found.nan_to_num(), made.nan_to_num()), operator
                held.add(operator)
    assert len(held) > 100


class Picks(Layers, layer=linear(WIDTH, WIDTH), places=lambda: nn.Buffer(torch.arange(96) % 40)):
    """Derivatives of what is picked by numbers of places are written into zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).sin()
        rows = self.places[:, None].expand(-1, WIDTH)
        picked = {
            "gather": lambda: y.gather(0, rows),
            "index": lambda: y[self.places],
            "index_select": lambda: y.index_select(0, self.places),
            "scatter_add": lambda: torch.zeros_like(y).scatter_add(0, rows, y),
            "index_put": lambda: y.cos().index_put((self.places,), y[:96], accumulate=True),
        }
        return picked[self.how]().square().sum()


@pytest.mark.parametrize(
    "how", tiered(["gather", "index", "index_select", "scatter_add", "index_put"], quick=["gather", "index_put"])
)
def test_places_are_written_into_what_is_there_as_in_eager(how: str) -> None:
    model, x = Picks(how=how), torch.randn(256 if how in ("gather", "index", "index_select") else 96, WIDTH)
    eager_bytes = measured_bytes(model, x)
    assert {each[-1] for each in joins(model, x)} & {"scatter_add", "index_put", "index_add"}
    plan = assert_carried_out(model, x)
    assert plan.peak_bytes - plan.total_static_bytes <= eager_bytes + 1024  # sizes are rounded up


def test_what_is_written_into_places_is_not_written_over() -> None:
    class Source(OneLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(len(x)).flip(0)[:, None].expand(-1, WIDTH)
            return x.scatter_add(0, places, self.linear(x)).square().sum()

    x = torch.randn(96, WIDTH)
    assert not any("scatter_add" in each for each in joins(Source(WIDTH), x))
    assert_carried_out(Source(WIDTH), x)
