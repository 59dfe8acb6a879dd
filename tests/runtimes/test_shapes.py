"""Input sizes that change while a wrapped model trains: one plan each, few searches, a stated limit."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.analysis import study as study_types
from planner.capture import joint_capture as capture
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError, UsageError
from tests.models import WIDTH, Stack, mean_square, rows
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered


def marked(count: int, largest: int) -> torch.Tensor:
    x = rows(count)
    torch._dynamo.mark_dynamic(x, 0, min=1, max=largest)
    return x


def step(model: nn.Module, x: torch.Tensor) -> planner.Plan:
    """Train one step, hold it against the model unwrapped, and give the plan that ran."""
    assert_same(train(copy.deepcopy(model), rows(len(x))), train(model, x))
    return planner.plan_of(model)


@pytest.fixture
def searches(calls: Any) -> list[Any]:
    """Gather one entry for each plan that is searched for."""
    return calls(study_types, "make_plan")


def wrap(model: nn.Module | None = None, **options: object) -> nn.Module:
    return planner.auto_wrap(
        model or Stack(2), **grouped(time_limit_seconds=1.0, **{"activation_budget": "60%", **options})
    )


def test_each_size_is_planned_once_and_comes_back_to_its_plan(searches: list[Any]) -> None:
    model = wrap()
    plans = {count: step(model, rows(count)) for count in (256, 200, 230)}
    assert len(searches) == 1  # the plan of the largest is carried over to what needs one
    for count in (200, 256, 230, 200):
        assert step(model, rows(count)) is plans[count]
    assert len(searches) == 1
    for count in (200, 230):
        assert plans[count].solver.endswith(" (reused)") and plans[count].recomputations
        assert plans[count].peak_bytes < plans[256].peak_bytes


def test_sizes_that_are_much_smaller_get_plans_of_their_own(searches: list[Any]) -> None:
    model = wrap(Stack(), activation_budget="40%")
    plans = {count: step(model, rows(count)) for count in (256, 200, 170, 230, 150)}
    assert len(searches) == 2 and not plans[170].solver.endswith(" (reused)")
    assert plans[170].overhead < plans[200].overhead
    assert plans[170].peak_bytes <= plans[170].budget_bytes == plans[256].budget_bytes
    assert plans[150].recomputations == plans[170].recomputations  # the nearest that is larger


def test_a_plan_that_was_given_is_not_replaced() -> None:
    plan = planner.plan(Stack(), rows(256), **grouped(activation_budget="40%", compare=False, time_limit_seconds=0.2))
    model = planner.auto_wrap(Stack(), budget=plan)
    for count in (256, 200, 160):
        made = step(model, rows(count))
        assert made.recomputations == plan.recomputations


def test_one_capture_with_symbols_serves_marked_sizes(captures: list[object], searches: list[Any]) -> None:
    model = wrap(runtime="graph")
    for count in (256, 200, 210, 190):
        x = marked(count, largest=256)
        step(model, x)
        assert x._dynamo_dynamic_indices == {0}  # the caller's marks are left on
    assert len(captures) == 1 and len(searches) == 1


class Branching(Stack):
    """Long inputs run another program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if len(x) < 230 else x.tanh())


@pytest.mark.slow
def test_a_marked_size_with_a_program_of_its_own_is_captured_by_itself(captures: list[object]) -> None:
    model = wrap(Branching(), runtime="graph")
    for count in (200, 256):
        step(model, marked(count, largest=256))
    assert len(captures) == 2


def test_marks_without_a_largest_size_are_hints() -> None:
    model, x = wrap(activation_budget="90%"), rows(64)
    torch._dynamo.mark_dynamic(x, 0)
    step(model, x)
    torch._dynamo.maybe_mark_dynamic(y := rows(70).requires_grad_(), 0)
    model(y).backward()
    assert y.grad is not None


@pytest.mark.parametrize("runtime", tiered(["auto", "parts"], quick=["auto"]))
def test_a_first_call_that_fails_leaves_nothing_behind(
    runtime: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes count for none, torch logs nothing of it, and its error is eager's own."""
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(2)), runtime=runtime, activation_budget="90%")
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(64, WIDTH - 1))
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="planner"):
        step(model, rows(64))
    assert "the first call" in caplog.text


class Scaled(Stack):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x * scale)


def test_the_number_of_captures_is_bounded() -> None:
    model = wrap(Scaled(2), maximum_shapes=2, runtime="graph")
    for count in (256, 200, 60):
        step(model, rows(count))  # one capture for the first, one for all others
    with pytest.raises(RuntimeUnsupportedError, match=r"captured 2 times.*Pass a tensor.*Runtime\(maximum_shapes="):
        model(rows(200), 0.25)
    with pytest.raises(RuntimeUnsupportedError, match=r"no longer true that len\(args\) == 1"):
        model(rows(200), 0.125)
    step(model, rows(200))
    with torch.no_grad():
        model(rows(50), 0.1)
    with pytest.raises(UsageError, match="maximum_shapes"):
        planner.auto_wrap(Stack(2), budget="1GiB", runtime=planner.Runtime(maximum_shapes=0))


def test_what_cannot_be_captured_in_the_middle_of_training_runs_within_the_budget() -> None:
    model, plain = wrap(Scaled(2), maximum_shapes=2), Scaled(2)
    plain.load_state_dict(model.state_dict())
    for count in (256, 200):
        step(model, rows(count))
    budget_bytes = planner.plan_of(model).budget_bytes
    with pytest.warns(UserWarning, match="was captured 2 times.*run under the runtime 'modules'") as caught:
        for scale in (0.5, 0.25):
            assert_same(train(plain, (rows(200), scale)), train(model, (rows(200), scale)))
            plan = planner.plan_of(model)
            assert plan.runtime == "modules" and plan.peak_bytes <= plan.budget_bytes == budget_bytes
    assert sum("was captured" in str(warning.message) for warning in caught) == 1, {str(w.message)[:80] for w in caught}
    assert step(model, rows(200)).runtime == "graph"
    with pytest.raises(RuntimeError, match="expected input with shape"):
        model(rows(200, 7))


class Looking(Stack):
    """Looks at its data where it is told to."""

    looks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return mean_square(x) if not self.looks or float(x.detach().sum()) < 1e9 else x.sum()


def test_what_cannot_be_captured_in_the_middle_and_does_not_fit_is_told_by_its_budget() -> None:
    whole = planner.plan(Looking(2), rows(256), **grouped(budget="100%", runtime="graph", time_limit_seconds=0.5))
    budget_bytes = whole.minimum_feasible_peak_bytes
    model = planner.auto_wrap(Looking(2), budget=budget_bytes, search=planner.Search(time_limit_seconds=0.5))
    step(model, rows(256))
    model.looks = True
    with pytest.raises(InfeasibleBudgetError) as caught:
        model(rows(256))
    assert "depends on data" in str(caught.value.__cause__)


class TooShortError(Exception):
    """Of a user's own."""


class Picky(
    Stack, calls=lambda: nn.Buffer(torch.zeros(())), moved=lambda: nn.Parameter(torch.zeros(()), requires_grad=False)
):
    """Draws, counts and then looks at what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.moved += 1
        x = nn.functional.dropout(x, 0.1)
        if len(x) < 10:
            raise TooShortError(f"{len(x)} rows")
        return super().forward(x)


@pytest.mark.parametrize("runtime", ["auto", "modules"])
def test_a_forward_raises_its_own_error(runtime: str, capfd: pytest.CaptureFixture[str]) -> None:
    """At the first step and later, and what it did before is as without a plan."""
    plain = Picky()
    model = wrap(Picky(), runtime=runtime)
    model.load_state_dict(plain.state_dict())
    seen: dict[nn.Module, list[Any]] = {}
    for one in (plain, model):
        torch.manual_seed(0)
        seen[one] = []
        for size in ((3, WIDTH), (256, WIDTH), (3, WIDTH), (200, WIDTH + 1), (256, WIDTH)):
            try:
                seen[one].append(one(rows(*size)).item())
            except (TooShortError, RuntimeError) as error:
                seen[one].append((type(error), str(error)))
                assert one is plain or "fails" in error.__notes__[0]
            seen[one] += [one.calls.item(), one.moved.item(), torch.get_rng_state().tolist()]
    assert seen[model] == seen[plain]
    assert re.fullmatch(r"planned: .*\n", capfd.readouterr().err)


@pytest.mark.parametrize(("runtime", "more", "named"), [("auto", (1,), {}), ("modules", (), {"wight": 1})])
def test_arguments_that_the_forward_does_not_take_raise_its_own_error(
    runtime: str, more: tuple[int, ...], named: dict[str, int]
) -> None:
    with pytest.raises(TypeError) as plain:
        Picky()(rows(), *more, **named)
    with pytest.raises(TypeError, match=re.escape(str(plain.value))):
        wrap(Picky(), runtime=runtime)(rows(), *more, **named)


def test_more_sizes_than_torch_would_allow_by_itself() -> None:
    model = planner.auto_wrap(nn.Sequential(nn.Linear(2, 2)), budget="1MiB", runtime=planner.Runtime(maximum_shapes=10))
    for count in range(1, 11):
        model(torch.ones(count, 2)).sum().backward()


def test_a_known_call_prepares_nothing_that_a_capture_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared(Exception):
        pass

    def prepare() -> None:
        raise Prepared

    model = wrap(activation_budget="90%")
    plan = step(model, rows(64))
    monkeypatch.setattr(capture, "dynamo_settings", prepare)
    assert step(model, rows(64)) is plan
    with pytest.raises(Prepared):
        model(rows(32))
    with pytest.raises(Prepared):
        model.double()(rows(64).double())
    assert step(model.float(), rows(64)) is plan
