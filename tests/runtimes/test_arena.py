"""Steps at fixed places: the same bits as without, whatever the loop around them keeps, repeats or breaks off."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture import arena_internals
from planner.capture.memory import measure_peak
from planner.errors import RuntimeUnsupportedError
from planner.runtimes._arena import ArenaInUse
from tests.models import Recurrent, Stack, mean_square, perceptron, rows

pytestmark = pytest.mark.skipif(arena_internals.missing() is not None, reason="needs a C++ compiler, and Linux")

RUNTIMES = ("graph", "modules")


def wrapped(model: nn.Module, runtime: str = "graph", *, arena: bool = True, **asked: Any) -> nn.Module:
    return planner.auto_wrap(model, runtime=runtime, arena=arena, **{"budget": "80%", **asked})


def in_use(model: nn.Module) -> ArenaInUse:
    found = planner.status(model).arena
    assert found is not None
    return found


def counts(model: nn.Module) -> tuple[int, int]:
    """Return how many allocations of the last steps lay at their places, and how many did not."""
    running: Any = planner.api.running_on(model)
    table = getattr(running, "_running", running)._arenas._last.table
    found: tuple[int, int] = table.counts()
    return found


Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[torch.Tensor]]
"""Trains, and gives tensors that must be what they are without an arena."""


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(rows())
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


def keeps_losses_and_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    kept = []
    for number in range(8):
        optimizer.zero_grad()
        loss = model(rows())
        loss.backward()
        if number % 3 == 0:  # not as in the step that was recorded
            kept += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    yield from kept


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number in range(9):
        loss = model(rows())
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach().clone()


def calls_twice_before_a_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number in range(8):
        optimizer.zero_grad()
        first = model(rows())
        second = model(rows() + 1) if number in (1, 5, 6) else first
        (first + 2 * second).backward()
        optimizer.step()
        yield first.detach().clone()


def goes_back_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number in range(7):
        optimizer.zero_grad()
        loss = model(rows())
        if number in (3, 5):
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


def fails_in_the_middle(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number in range(9):
        optimizer.zero_grad()
        if number in (2, 5):
            with pytest.raises(RuntimeError):
                model(rows(width=31))
        loss = model(rows())
        if number in (3, 6):

            def fail(_gradient: torch.Tensor) -> None:
                raise ValueError("in the middle of the backward")

            parameter = next(model.parameters())
            handle = parameter.register_hook(fail)
            with pytest.raises(ValueError, match="in the middle"):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


def never_goes_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting = []
    for number in range(8):
        optimizer.zero_grad()
        loss = model(rows())
        if number in (1, 4):
            waiting.append(loss)
            continue
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            yield model(rows(64)).clone()
    for loss in waiting:
        yield loss.detach()


def saves_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for number in range(6):
        optimizer.zero_grad()
        if number % 2:
            with torch.autograd.graph.save_on_cpu():
                loss = model(rows())
        else:
            loss = model(rows())
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


def changes_sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for count in (64, 64, 64, 256, 256, 256, 64, 64, 128, 128, 128, 256, 96, 96, 96):
        optimizer.zero_grad()
        loss = model(rows(count))
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


def holds_what_hooks_see(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.detach()))
    for number in range(6):
        optimizer.zero_grad()
        loss = model(rows())
        loss.backward()
        if number in (1, 2):
            seen.clear()
        optimizer.step()
    yield from seen


LOOPS: tuple[Loop, ...] = (
    plain,
    keeps_losses_and_gradients,
    accumulates,
    calls_twice_before_a_backward,
    goes_back_twice,
    fails_in_the_middle,
    never_goes_back,
    saves_elsewhere,
    changes_sizes,
    holds_what_hooks_see,
)


def played(loop: Loop, runtime: str, *, arena: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrapped(Stack(), runtime, arena=arena)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(loop(model, optimizer))
    return [
        *found,
        *(p.detach() for p in model.parameters()),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_bits_are_those_without_an_arena(loop: Loop, runtime: str) -> None:
    with_arena, without = (played(loop, runtime, arena=arena) for arena in (True, False))
    assert len(with_arena) == len(without)
    assert all(torch.equal(one, other) for one, other in zip(with_arena, without, strict=True))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_everything_that_a_step_gives_back_has_its_place(runtime: str) -> None:
    model = wrapped(Stack(6), runtime)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    list(plain(model, optimizer))
    placed, missed = counts(model)
    used = in_use(model)
    assert (placed, missed) == (used.places, 0)
    assert used.size_bytes <= 1.02 * used.peak_bytes
    assert used.outside_bytes <= 64  # the loss, which the loop holds until the next one is there


def test_the_peak_in_the_arena_is_the_planned_one() -> None:
    model, x = wrapped(Stack(6), "graph", budget="70%"), rows()

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    for _ in range(4):
        step()
    plan, used = planner.plan_of(model), in_use(model)
    step_bytes = plan.peak_bytes - plan.total_static_bytes
    model.zero_grad()
    assert measure_peak(step, torch.device("cpu"))[0] == pytest.approx(step_bytes, rel=1e-3)
    assert used.size_bytes == pytest.approx(step_bytes, rel=0.02)  # rounded up to 64 bytes each


def test_a_loss_outside_of_the_model_has_places_too() -> None:
    model = wrapped(Stack(4, has_loss=False), loss_fn=mean_square)
    for _ in range(5):
        model.zero_grad()
        mean_square(model(rows())).backward()
    placed, missed = counts(model)
    assert missed == 0 and placed == in_use(model).places


def test_steps_of_several_sizes_share_one_arena() -> None:
    model = wrapped(Stack(4), budget="1GiB")
    sizes = {}
    for count in (64, 256, 128):
        for _ in range(4):
            model.zero_grad()
            model(rows(count)).backward()
        sizes[count] = in_use(model)
        assert counts(model)[1] == 0
    assert sizes[64].size_bytes < sizes[256].size_bytes == sizes[128].size_bytes
    model(rows(64)).backward()
    assert counts(model)[0] > 0  # in the memory that came for the larger ones


def test_random_numbers_and_recurrent_layers() -> None:
    results = []
    for arena in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Recurrent(), nn.Identity())
        stack = wrapped(Stack(3, lambda: perceptron(dropout=0.3)), arena=arena)
        wrapped(model, "modules", arena=arena)
        for _ in range(5):
            (stack(rows()) + model(rows(64).view(4, 16, -1))).backward()
        results.append([p.grad for module in (stack, model) for p in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_models_in_two_threads() -> None:
    torch.manual_seed(0)
    models = [wrapped(Stack()) for _ in range(2)]
    alone = played(plain, "graph", arena=False)
    found: list[list[torch.Tensor]] = [[], []]

    def train(number: int) -> None:
        optimizer = torch.optim.AdamW(models[number].parameters(), lr=1e-2)
        found[number] = list(plain(models[number], optimizer))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.stack(found[0]), torch.stack(alone[:6]))
    assert all(counts(model)[1] == 0 for model in models)


def test_unwrapped_it_allocates_as_ever() -> None:
    model = wrapped(Stack())
    list(plain(model, torch.optim.SGD(model.parameters(), lr=1e-3)))
    arenas = planner.api.running_on(model)._arenas  # type: ignore[union-attr]
    planner.unwrap(model)
    model(rows()).backward()
    placed, missed = arenas._last.table.counts()
    assert (placed, missed) != (0, 0)
    model(rows()).backward()
    assert arenas._last.table.counts() == (0, 0)
    gc.collect()


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(RuntimeUnsupportedError, match="on a CPU, and the model is on meta"):
        wrapped(Stack().to("meta"), budget="1GiB")


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_internals, "missing", lambda: "a C++ compiler")
    with pytest.raises(RuntimeUnsupportedError, match=r"arena=True needs a C\+\+ compiler"):
        wrapped(Stack())
