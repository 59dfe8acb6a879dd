"""What tests of several runtimes watch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.capture.joint_capture import Backend


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what grows by one for each program that Dynamo captures, for planning or for running."""
    seen: list[Any] = []
    call = Backend.__call__

    def noting(self: Backend, *arguments: Any) -> Any:
        seen.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(Backend, "__call__", noting)
    return seen
