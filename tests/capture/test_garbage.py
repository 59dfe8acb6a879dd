"""No garbage is collected while a model is captured: nearly all that a capture makes lives until it ends."""

from __future__ import annotations

import gc
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
