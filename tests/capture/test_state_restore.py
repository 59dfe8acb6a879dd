"""A recorded step leaves nothing behind: no tensor without data in a cache, an attribute, a list or a global."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, UserDict
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.eager.record import record
from planner.capture.inputs import Inputs
from planner.capture.torch_internals import FakeTensor
from planner.common.options import grouped
from tests.models import Layers, OneLinear, Stack, linear, rows
from tests.tiers import tiered

TABLES: dict[int, torch.Tensor] = {}


class Helper:
    def __init__(self) -> None:
        self.last: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []

    def keep(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self.seen.append(output.detach())


class Keeping(Layers, linear=linear(8, 8), helper=Helper, tables=lambda: [Helper()]):
    """Keeps a tensor from one call to the next wherever programs do."""

    @functools.lru_cache(maxsize=4)  # noqa: B019  (what is tested)
    def table(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32)

    @functools.cache  # noqa: B019
    def twice(self, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.ones(size), {"two": 2 * torch.ones(size)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        TABLES.setdefault(size, torch.ones(size))
        self.helper.last = self.linear(x) + self.table(size) * TABLES[size] + self.twice(size)[1]["two"]
        self.tables[0].seen.append(self.helper.last.detach())
        self.helper.seen.append(self.helper.last.detach())
        return self.helper.last.sum()


def test_nothing_of_a_recording_is_kept(recwarn: pytest.WarningsRecorder) -> None:
    TABLES.clear()
    model, x = Keeping(), torch.randn(4, 8)
    record(model, Inputs((x,), {}))
    assert not TABLES and not model.helper.seen and model.helper.last is None and not model.tables[0].seen
    loss = model(x)
    loss.backward()
    assert not isinstance(loss, FakeTensor) and not isinstance(model.linear.weight.grad, FakeTensor)
    assert not recwarn.list


class Block(OneLinear):
    """Keeps a table each time that it is asked for another size."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + self.table(x.shape[1]))


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize(
    ("runtime", "loss_fn"),
    tiered(product(["graph", "modules", "regional"], [None, torch.sum]), slow=[("modules", None), ("regional", None)]),
)
def test_a_planned_model_computes_with_data(runtime: str, loss_fn: Any) -> None:
    """Not a recorded step alone runs a model without data: so do a loss that is measured, and the search for blocks."""
    model, x = nn.Sequential(*(Block(8) for _ in range(3))), torch.randn(64, 8)
    planner.plan(model, x, budget="1GiB", runtime=runtime, search=planner.Search(compare=False), loss_fn=loss_fn)
    assert not isinstance(model(x), FakeTensor)


def test_hooks_keep_nothing_of_a_recording() -> None:
    """Recorded for real, since the hook looks at data: its list held a number of a step that nobody took."""
    model, norms, helper = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), list[float](), Helper()
    model[1].register_full_backward_hook(lambda _module, _inputs, outputs: norms.append(outputs[0].norm().item()))
    model[0].register_forward_hook(helper.keep)
    record(model, Inputs((torch.randn(4, 8),), {}))
    assert norms == [] == helper.seen


def test_what_was_kept_before_is_kept_still() -> None:
    TABLES.clear()
    model, x = Keeping(), torch.randn(4, 8)
    model(x)
    last, seen = model.helper.last, list(model.helper.seen)
    record(model, Inputs((x,), {}))
    assert model.helper.last is last and len(model.helper.seen) == len(seen) == 1
    assert list(TABLES) == [8] and not isinstance(TABLES[8], FakeTensor)


def test_what_cannot_be_taken_back_is_said() -> None:
    held: list[Any] = []

    class Hidden(OneLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.append(self.linear(x))
            return held[-1].sum()

    with pytest.warns(UserWarning, match="Hidden keeps tensors of a step that was recorded without data"):
        record(Hidden(8), Inputs((torch.randn(4, 8),), {}))


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


class Writing(Layers, layers=three_layers, after=lambda: nn.Linear(8, 8).requires_grad_(False)):
    """Draws a frozen copy after its weights, and writes into what it is given; its sizes are known with data only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.after.weight.lerp_(self.layers[0].weight, 0.5)
            x.mul_(0.5)
        y = self.after(self.layers(x))
        return y[y > 0].square()


class Moving(Writing):
    """Gives its frozen copy other memory, after it has written into that which it had."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.after.weight.mul_(0.9)
        self.after.weight.data = self.after.weight.data + 0.1 * self.layers[0].weight.data
        y = self.after(self.layers(x))
        return y[y > 0].square()


@pytest.mark.parametrize(
    ("kind", "runtime"),
    tiered(
        product([Writing, Moving], ["auto", "modules", "parts"]),
        quick=[(Writing, "auto"), (Writing, "modules"), (Moving, "modules"), (Moving, "parts")],
    ),
)
def test_weights_and_inputs_that_a_step_with_data_writes_into_are_as_before(kind: type, runtime: str) -> None:
    model, x = kind(), torch.randn(16, 8)
    before = [(tensor.data_ptr(), tensor.detach().clone()) for tensor in (*model.parameters(), x)]
    options = grouped(activation_budget="100%", runtime=runtime, time_limit_seconds=1)
    planner.plan(model, x, loss_fn=torch.Tensor.mean, **options)
    for tensor, (at, then) in zip((*model.parameters(), x), before, strict=True):
        assert tensor.data_ptr() == at and torch.equal(tensor, then)


class Batch(dict[str, torch.Tensor]):
    """Torch takes a dict of one's own for a leaf."""


class Making(OrderedDict[str, type]):
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MADE = Making(relu=nn.ReLU)


class Filling(Stack):
    """Writes into the batch and returns it, as frameworks for graphs and for images do."""

    def forward(self, batch: Any) -> Any:
        for layer in self.blocks:
            batch["x"] = batch["x"] + layer(batch["x"])
        batch["loss"] = batch["x"].square().mean()
        return batch


@pytest.mark.parametrize(
    ("kind", "runtime"),
    tiered(
        product([Batch, UserDict], ["auto", "modules", "graph"]),
        quick=[(Batch, "auto"), (UserDict, "modules"), (UserDict, "graph")],
    ),
)
def test_a_batch_that_is_written_into(kind: type, runtime: str) -> None:
    """What a recording without data wrote into it once went on to the loop: its gradients had no data."""
    model, x = Filling(), rows()
    plain = copy.deepcopy(model)
    planner.auto_wrap(model, budget=planner.Budget(activations="80%"), runtime=runtime)
    for one in (plain, model):
        batch = kind({"x": x})
        one(batch)["loss"].backward()
        assert list(batch) == ["x", "loss"]
    assert type(batch["x"]) is torch.Tensor
    for ours, eager in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        assert torch.equal(ours.grad, eager.grad)
    assert [*MADE.values()] == [nn.ReLU]
