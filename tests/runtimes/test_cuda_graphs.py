"""Steps as CUDA graphs: the bits of the same plan without, whatever the loop around them keeps, repeats or breaks off.

Graphs are launched in software here: see ``software_graphs.py``. ``tests/cuda/test_cuda_graphs.py`` captures real ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import RuntimeUnsupportedError, UsageError
from tests.models import WIDTH, mean_square, perceptron
from tests.runtimes import software_graphs
from tests.tiers import tiered

Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[torch.Tensor]]
"""Trains, and gives tensors that must be what they are without graphs."""


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    software_graphs.install(monkeypatch)


class Net(nn.Module):
    """Dropout, BatchNorm and attention in blocks; the loss outside, unless it is asked for."""

    def __init__(self, *, has_loss: bool = True, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(perceptron(dropout=dropout) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.has_loss = has_loss

    def forward(self, x: torch.Tensor) -> Any:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + norm(block(x))
        return mean_square(x) if self.has_loss else x


def batches(count: int, size: int = 64) -> list[torch.Tensor]:
    return [torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def loss_of(made: torch.Tensor) -> torch.Tensor:
    return made if made.dim() == 0 else mean_square(made)


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    optimizer.step()
    return loss


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (updated(model, optimizer, x) for x in batches(6))


def keeps_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number, x in enumerate(batches(9)):
        if number % 3 == 0:
            optimizer.zero_grad()
        made = model(x)
        yield made
        loss_of(made).backward()
        yield from (p.grad for p in model.parameters() if p.grad is not None and number % 3 == 2)
        if number % 3 == 2:
            optimizer.step()


def clears_in_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for x in batches(5):
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def two_at_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for first, second in zip(batches(6), batches(6, 64)[::-1], strict=True):
        optimizer.zero_grad()
        one, other = model(first), model(second)
        (loss_of(one) + 2 * loss_of(other)).backward()
        optimizer.step()
        yield one
        yield other


def leaves_out_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    kept = None
    for number, x in enumerate(batches(12)):
        made = loss_of(model(x))
        if number in (1, 4):
            continue
        if number == 6:
            kept = made  # and its graph with it
            continue
        optimizer.zero_grad()
        made.backward()
        optimizer.step()
        yield made
    assert kept is not None
    yield kept
    optimizer.zero_grad()
    kept = loss_of(model(batches(1)[0]))
    kept.backward()
    yield from (p.grad for p in model.parameters() if p.grad is not None)


def twice_through(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number, x in enumerate(batches(7)):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        if number % 2:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        yield loss


def other_sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (updated(model, optimizer, x[:48] if number % 5 == 4 else x) for number, x in enumerate(batches(10)))


def moves_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number, x in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        for parameter in model.parameters() if number == 3 else ():
            parameter.data = parameter.data.clone()
        optimizer.step()
        yield loss


def writes_over_what_it_is_given(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for x in batches(5):
        optimizer.zero_grad()
        made = model(x)
        loss = loss_of(made)
        loss.backward()
        with torch.no_grad():
            made.mul_(2)
        x.zero_()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        optimizer.step()
        yield made


def looks_in_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for x in batches(5):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        with torch.no_grad():
            yield model(x)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            yield model(x)
        model.train()


def differentiates_inputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for x in batches(5):
        x.requires_grad_()
        loss = loss_of(model(x))
        yield from torch.autograd.grad(loss, [x, *model.parameters()])


LOOPS: list[Loop] = [
    plain,
    keeps_all,
    clears_in_between,
    two_at_once,
    leaves_out_backwards,
    twice_through,
    other_sizes,
    moves_parameters,
    writes_over_what_it_is_given,
    looks_in_between,
    differentiates_inputs,
]


@functools.cache
def recomputing(has_loss: bool) -> planner.Plan:
    """Plan to run all of each block again, dropout too."""
    plan = planner.plan(Net(has_loss=has_loss).train(), batches(1)[0], **grouped(strategy="every-1", runtime="graph"))
    assert any("dropout" in key for keys in plan.recomputations.values() for key in keys)
    return plan


def trained(loop: Loop, *, cuda_graphs: bool, has_loss: bool) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = Net(has_loss=has_loss).train()
    planner.auto_wrap(model, **grouped(plan=recomputing(has_loss), replan=True, cuda_graphs=cuda_graphs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [*loop(model, optimizer)]  # kept to the end: none may change meanwhile
    state = [*model.parameters(), *model.buffers()]
    return [*seen, *state, torch.get_rng_state(), torch.rand(1)], model


def launches(model: nn.Module) -> int:
    running: Any = planner.api.running_on(model)
    count: int = running._cuda_graphs.launches
    return count


@pytest.mark.usefixtures("software")
@pytest.mark.parametrize(
    ("loop", "has_loss"),
    tiered(
        [(loop, has_loss) for loop in LOOPS for has_loss in (True, False)],
        quick=[(keeps_all, False), (two_at_once, True), (twice_through, False), (other_sizes, True)],
    ),
)
def test_bits_are_those_without_graphs(loop: Loop, has_loss: bool) -> None:
    expected, _ = trained(loop, cuda_graphs=False, has_loss=has_loss)
    found, model = trained(loop, cuda_graphs=True, has_loss=has_loss)
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), number
    assert launches(model) > 4


@pytest.mark.usefixtures("software")
def test_a_model_that_is_unwrapped_before_its_backward_has_the_same_gradients() -> None:
    found = []
    for cuda_graphs in (False, True):
        torch.manual_seed(0)
        model = Net().train()
        planner.auto_wrap(model, budget=recomputing(True), runtime=planner.Runtime(cuda_graphs=cuda_graphs))
        for x in batches(4):
            model.zero_grad()
            loss = model(x)
            if torch.equal(x, batches(4)[3]):
                planner.unwrap(model)
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("software")
def test_what_differs_too_often_is_left_without_graphs() -> None:
    torch.manual_seed(0)
    model = Net().train()
    planner.auto_wrap(model, **grouped(plan=recomputing(True), replan=True, cuda_graphs=True))
    with pytest.warns(UserWarning, match="runs without CUDA graphs: sizes or parameters change too often"):
        for number in range(40):
            model.zero_grad()
            model(batches(1)[0][: 64 - number // 2 % 2]).backward()
    before = launches(model)
    model(batches(1)[0]).backward()
    assert launches(model) == before


@pytest.mark.usefixtures("software")
@pytest.mark.parametrize("given", ["number", "tensor on another device"])
def test_numbers_of_a_call_are_not_frozen(given: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
            return self.net(x) * scale

    found = []
    for cuda_graphs in (False, True):
        torch.manual_seed(0)
        model = Scaled().train()
        planner.auto_wrap(
            model, **grouped(activation_budget="100%", runtime="graph", cuda_graphs=cuda_graphs, time_limit_seconds=0.5)
        )
        seen = []
        for number in range(5):
            scale = float(number) if given == "number" else torch.tensor(float(number))
            made = model(batches(1)[0], scale)
            made.backward()
            seen.append(made)
        found.append([*seen, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_plan_for_a_gpu_counts_what_graphs_hold() -> None:
    model, x = Net(), batches(1, 4096)[0]
    options: dict[str, Any] = {"device": "h100", "runtime": "graph", "time_limit_seconds": 1}
    plain = planner.plan(model, x, **grouped(budget="1GiB", **options))
    graphs = planner.plan(model, x, **grouped(budget="1GiB", cuda_graphs=True, **options))
    assert plain.reserved is not None and graphs.reserved is not None
    assert plain.reserved.graph_pool_bytes == 0
    step_bytes = plain.peak_bytes - sum(plain.static_bytes.values())
    gradient_bytes = sum(4 * p.numel() for p in model.parameters())
    assert graphs.reserved.graph_pool_bytes > step_bytes
    held_bytes = graphs.reserved.allocated_bytes - plain.reserved.allocated_bytes
    assert held_bytes > 64 * 2**20 + gradient_bytes  # workspaces of another stream, and copies of gradients
    budget_bytes = graphs.reserved.allocated_bytes - step_bytes // 2
    tight = planner.plan(model, x, **grouped(budget=budget_bytes, cuda_graphs=True, **options))
    assert tight.reserved is not None
    assert tight.reserved.allocated_bytes <= tight.budget_bytes
    assert tight.recomputations
    assert planner.Plan.from_json(tight.to_json()).reserved == tight.reserved


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({}, RuntimeUnsupportedError, "cuda_graphs=True is for CUDA"),
        ({"runtime": "modules"}, UsageError, "leave out runtime='modules'"),
        ({"runtime": "inductor"}, UsageError, "leave out runtime='inductor'"),
        ({"offload": True}, UsageError, "leave out offload"),
        ({"data_parallel": "ddp", "ranks": 2}, UsageError, "leave out ranks"),
    ],
)
def test_what_does_not_go_with_graphs_is_refused(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        planner.auto_wrap(Net(), batches(1)[0], **grouped(budget="1GiB", cuda_graphs=True, **asked))
    with pytest.raises(error, match=says):
        planner.auto_wrap(Net(), **grouped(budget="1GiB", cuda_graphs=True, **asked))
