"""What tests of pages share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.common.limits import SolveLimits


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give solvers a fifth of their time: of what they find, nothing is compared that this changes."""
    clock = SolveLimits.clock
    monkeypatch.setattr(
        SolveLimits, "clock", lambda asked: clock(replace(asked, time_limit_seconds=asked.time_limit_seconds / 5))
    )
