"""What the last steps showed beside what was promised; what is said while a model is captured and planned."""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.report import progress
from planner.session.capture_progress import log_progress
from tests.models import Stack, Trained

SCALARS = 256
"""Bytes of the loss and its gradient, whose places the profiler need not see."""


def trained() -> Trained:
    return Trained(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def test_a_step_that_keeps_its_promise_is_what_was_promised() -> None:
    model = planner.auto_wrap(trained(), budget="70%")
    x = torch.randn(512, 64)
    model(x).backward()
    model.zero_grad()
    first = planner.status(model)
    assert first.peak_bytes is first.step_seconds is first.overhead is None and "not yet" in str(first)
    for _ in range(4):
        model(x).backward()
        torch.zeros(10**6)  # no part of the step
        model.zero_grad()
    with torch.no_grad():
        model(x)
    seen = planner.status(model)
    assert seen.peak_bytes == pytest.approx(seen.plan.peak_bytes, abs=SCALARS) and seen.warnings == ()
    assert seen.steps >= 1 and seen.step_seconds is not None and seen.step_seconds > 0
    assert planner.plan_of(model) is seen.plan
    planner.unwrap(model)
    with pytest.raises(planner.errors.UsageError, match="not wrapped"):
        planner.status(model)


def test_a_profiler_of_ones_own_is_not_in_the_way() -> None:
    model, x = planner.auto_wrap(trained(), budget="70%"), torch.randn(512, 64)
    model(x).backward()
    planner.status(model)
    for _ in range(3):
        model.zero_grad()
        with torch.profiler.profile() as around:
            model(x).backward()
        assert "aten::gelu" in {event.key for event in around.key_averages()}
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        with torch.profiler.profile() as between:
            loss.backward()
        assert "aten::gelu_backward" in {event.key for event in between.key_averages()}
    assert planner.status(model).peak_bytes is None
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    assert planner.status(model).peak_bytes is not None


def test_what_breaks_a_promise_is_warned_of() -> None:
    model = planner.auto_wrap(Stack(has_loss=False), torch.randn(256, 32), budget="90%")
    planner.status(model)
    for _ in range(3):
        torch.cat([model(torch.randn(256, 32))] * 50).exp().sum().backward()  # a loss that nobody spoke of
        model.zero_grad()
    with pytest.warns(UserWarning, match="a step held .* the plan promises"):
        seen = planner.status(model)
    assert seen.peak_bytes is not None and seen.peak_bytes > seen.plan.peak_bytes
    assert "warning: a step held" in str(seen)
    slow = replace(seen, plan=replace(seen.plan, cost_model="measured"), step_seconds=2 * seen.plan.step_seconds)
    assert "a step takes" in slow.warnings[1]


def test_a_call_that_is_captured_anew_is_not_recorded() -> None:
    model = planner.auto_wrap(trained(), torch.randn(512, 64), budget="70%")
    planner.status(model)
    with warnings.catch_warnings(action="error"):  # among them: a profiler is running
        for rows in (512, 300, 300, 200):
            model(torch.randn(rows, 64)).backward()
            model.zero_grad()
    planner.unwrap(model)


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_each_plan_is_one_line_with_its_verdict(
    runtime: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="planner")
    model, x = trained(), torch.randn(256, 64)
    planner.plan(model, x, budget="90%", runtime=runtime, search=planner.Search(compare=False))
    planner.auto_wrap(model, budget="90%", runtime=runtime)
    for _ in range(2):
        model(x).backward()
        model.zero_grad()
    lines = [record.getMessage() for record in caplog.records if record.name == "planner"]
    assert len(lines) == 2
    assert re.fullmatch(r"planned Trained in \d+\.\d s \(asked for\): FITS .*", lines[0])
    assert re.fullmatch(r"(captured|planned) Trained in \d+\.\d s \(the first call\): FITS .*", lines[1])
    assert re.fullmatch(r"planned: \S+ of \S+ MiB, [+-]\S+% step time\n", capsys.readouterr().err)


def test_work_that_takes_long_is_told_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.shown(as_lines=True) as quick:
        quick("gone at once")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "QUICK_SECONDS", 0.01)
    with progress.shown(as_lines=True) as outer:
        time.sleep(0.05)
        with log_progress(Trained.__name__):  # part of what is shown already
            progress.tell("capturing")
        outer.count(3, 20)
    progress.tell("after the end")
    assert [re.sub(r"^\d+ s: ", "", line) for line in capsys.readouterr().err.splitlines()] == [
        "capturing", "capturing (3 of 20)",
    ]  # fmt: skip


def test_a_terminal_has_a_bar_that_is_gone_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown() as showing:
        showing("solving [bold]")
        time.sleep(0.5)
    shown = capsys.readouterr().err
    assert "solving [bold]" in shown and shown.rstrip("\n").endswith("\x1b[2K")
