"""A capture leaves out what takes time and changes nothing, and switches everything on again."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from planner.capture.inputs import Inputs
from planner.capture.joint_capture import Stopped, until_stopped
from planner.errors import CaptureError
from tests.models import Stack, rows


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

    return bool(until_stopped(Stack(), Inputs((rows(),), {}), partition))


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


_WRITES_GRAPHS = """
import logging, torch, planner
from torch import fx, nn

written = []
print_readable = fx.GraphModule.print_readable
fx.GraphModule.print_readable = lambda *args, **kwargs: written.append(1) or print_readable(*args, **kwargs)

def step():
    model = planner.auto_wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), activation_budget="100%")
    model(torch.ones(2, 4)).sum().backward()
    return len(written)

print(step())
torch._logging.set_logs(aot_graphs=True)
print(step())
"""


def test_graphs_are_written_out_only_for_who_reads_them() -> None:
    """In a process of its own: pytest listens to every log."""
    ended = subprocess.run([sys.executable, "-c", _WRITES_GRAPHS], capture_output=True, text=True, check=True)
    unread, read = map(int, ended.stdout.split())
    assert unread == 0
    assert read >= 3
    assert "def forward" in ended.stderr
