"""A capture leaves out what takes time and changes nothing, and switches everything on again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import planner
from planner.capture import capture_speedups
from planner.capture.capture_speedups import nothing_beside
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import Stopped, until_stopped
from planner.errors import CaptureError
from tests.models import Stack, rows

ARE_READ = capture_speedups._are_read  # tests that ask nothing of logs go without


@pytest.fixture
def collector() -> Iterator[None]:
    """Leave the collector of garbage as it was."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def seen_in_a_capture(error: type[BaseException] = Stopped) -> bool:
    """Say whether garbage is collected while a model is captured, which then ends with an error."""

    def partition(_: Any) -> Any:
        raise error(gc.isenabled())

    return bool(until_stopped(Stack(1), Inputs((rows(),), {}), partition))


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_by_itself_meanwhile(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    assert not seen_in_a_capture()
    assert gc.isenabled() is before


@pytest.mark.usefixtures("collector")
def test_it_is_collected_again_after_a_capture_that_fails() -> None:
    gc.enable()
    with pytest.raises(CaptureError):
        seen_in_a_capture(CaptureError)
    assert gc.isenabled()


def test_graphs_are_written_out_only_for_who_reads_them(
    monkeypatch: pytest.MonkeyPatch, calls: Callable[[Any, str], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    written = calls(fx.GraphModule, "print_readable")

    def step() -> None:
        model = planner.auto_wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), budget=planner.Budget(activations="100%"))
        model(torch.ones(2, 4)).sum().backward()

    with monkeypatch.context() as here:
        here.setattr(capture_speedups, "_are_read", ARE_READ)
        here.setattr(capture_speedups.torch_logs.trace_log, "handlers", [])  # pytest listens to every log
        step()
        assert not written
        torch._logging.set_logs(aot_graphs=True)
        step()
        torch._logging.set_logs()
    assert len(written) >= 3
    assert "def forward" in capsys.readouterr().err


def sums_of(shapes: ShapeEnv) -> list[tuple[str, type, Any, Any]]:
    """Compute with two sizes, some of it twice, with a replacement in between; say what came of it."""
    made = []
    one, other = (
        shapes.create_symintnode(
            shapes.create_symbol(hint, ConstantSource(f"size{hint}"), dynamic_dim=DimDynamic.DYNAMIC), hint=hint
        )
        for hint in (6, 9)
    )
    for at in range(3):
        results = [one + other, one * other * 4, other - one, one * other == 54, one + other < 9 * one, other >= one]
        made += [(str(r.node.expr), type(r), r.node.pytype, r.node.hint) for r in results]
        if at == 1:
            shapes._set_replacement(other.node._expr, one.node._expr + 3, "a test")
    return made


def test_sizes_are_computed_once_and_as_ever() -> None:
    expected = sums_of(ShapeEnv())
    with nothing_beside():
        assert sums_of(ShapeEnv()) == expected
    assert sums_of(ShapeEnv()) == expected
    assert expected[0] != expected[-6], "the replacement shows"


def test_a_second_result_is_an_object_of_its_own() -> None:
    """Tracing knows symbolic numbers by who they are."""
    shapes = ShapeEnv()
    size = shapes.create_symintnode(
        shapes.create_symbol(6, ConstantSource("size"), dynamic_dim=DimDynamic.DYNAMIC), hint=6
    )
    with nothing_beside():
        first, second = size * 2, size * 2
    assert first.node is not second.node
    assert first.node._expr is second.node._expr
