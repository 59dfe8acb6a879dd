"""A budget is for one call that begins without gradients: what holds more is said, and nothing else is."""

from __future__ import annotations

import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

import planner
from benchmarks import loops
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from planner.plans.plan import CallMemory
from planner.runtimes._whole_step import Part, awaiting, replayed_peak
from tests.models import WIDTH, Stack, rows
from tests.tiers import tiered

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("error")
def test_calls_that_are_over_await_no_backward() -> None:
    model = wrap(budget="1GiB")
    model(rows())  # nobody holds it
    model(rows()).backward(retain_graph=True)
    with torch.no_grad():
        held = model(rows())
    assert awaiting() == [] and held.numel()
    held = model(rows())
    assert len(awaiting()) == 1
    held.backward()
    assert awaiting() == []


@pytest.mark.parametrize(("name", "other"), [("its last call", 0), ("Nested", 1)])
def test_a_plan_for_one_call_says_once_where_another_waits(name: str, other: int) -> None:
    class Nested(Stack):
        pass

    asked = {"activation_budget": "90%"}
    models = wrap(**asked), planner.auto_wrap(Nested(), **grouped(time_limit_seconds=0.2, **asked))
    held = models[other](rows())
    with pytest.warns(UserWarning, match=f"Stack is called before the backward of {name}.*are for one call"):
        models[0](rows()).backward()
    with warnings.catch_warnings(action="error"):
        models[0](rows()).backward()
    assert held.numel()


@pytest.mark.parametrize(
    "name", tiered(list(loops.LOOPS), quick=["two calls, contrastive loss", "teacher and student"])
)
def test_a_whole_step_keeps_its_budget(name: str) -> None:
    found = loops.tried(loops.LOOPS[name], share=0.65, seconds=0.5)
    used = [step["peak_bytes"] / step["predicted_bytes"] for step in found["steps"]]
    assert found["equal"] and all(step["peak_bytes"] <= found["budget_bytes"] for step in found["steps"])
    # What a backward that is differentiated keeps of a recompute is known once it ran. Targets are no inputs.
    assert all(each <= 1.001 for each in used) and all(each >= 0.995 for each in used["penalty" in name :])


def test_hooks_around_a_plan_pack_and_unpack_one_value_after_the_other() -> None:
    peaks: dict[str, list[int]] = {}
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def halved(saved: torch.Tensor) -> torch.Tensor:
        packed = saved.half()
        alive.add(packed)
        return packed

    cases: Any = ("copied", (torch.clone, lambda saved: saved)), ("halved", (halved, torch.Tensor.float))
    for name, hooks in cases:
        for planned in (False, True):
            torch.manual_seed(0)
            model, x = Stack(2), torch.randn(512, WIDTH)
            if planned:
                planner.auto_wrap(model, budget="1GiB", runtime="graph")

            def step(model: Any = model, x: torch.Tensor = x, hooks: Any = hooks) -> Any:
                with saved_tensors_hooks(*hooks):
                    return model(x)

            for _ in range(5):
                step().backward()
            model.zero_grad()
            peaks.setdefault(name, []).append(measure_peak(lambda step=step: step().backward(), CPU)[0])
            loss = step()
            model.zero_grad()
            loss.backward(retain_graph=True)
            once = [p.grad.clone() for p in model.parameters()]
            loss.backward()
            assert all(torch.equal(2 * first, p.grad) for first, p in zip(once, model.parameters(), strict=True))
            assert not alive, "what was packed goes as it is read"
    assert all(planned <= eager for eager, planned in peaks.values())
    assert peaks["halved"][1] < 0.8 * peaks["copied"][1]


def test_a_logged_step_is_replayed_under_another_plan() -> None:
    before, now = CallMemory(90, 80, 100, 130), CallMemory(60, 40, 70, 110)
    forwards = [Part(90, 80, call, "forward_bytes") for call in (0, 1)]
    backwards = [Part(20, -70, call, "backward_bytes") for call in (1, 0)]
    parts, calls = [*forwards, Part(25, 5), *backwards], [(before, now)] * 2
    assert replayed_peak(parts, [(before, before)] * 2) == 80 + 80 + 25
    assert replayed_peak(parts, calls) == 40 + 5 + 70  # the first backward, no longer the loss
    assert replayed_peak([*forwards[:1], Part(50, 30, 0, "keeping_bytes"), *backwards[1:]], calls[:1]) == 110


def test_a_plan_for_what_was_seen_says_so_and_is_taken_up_again() -> None:
    made = loops.LOOPS["loss outside, AdamW"]()
    (model,) = made.wrapped
    planner.auto_wrap(model, **grouped(budget="8MiB", runtime="graph", time_limit_seconds=0.2))
    for _ in range(4):
        made.run()
    seen = planner.status(model).observed
    assert "outputs are dropped" in seen and re.fullmatch("a loss outside the model takes .* KiB", seen[-1])
    plan = planner.Plan.from_json(planner.plan_of(model).to_json())
    assert planner.Plan.from_json(plan.holding(plan.budget_bytes).to_json()).static_bytes["reserve"] > 0
    less = plan.holding(plan.peak_bytes - 100_000)
    assert planner.Plan.from_json(less.to_json()) == less and less.static_bytes["reserve"] == 0
    again = loops.LOOPS["loss outside, AdamW"]()
    planner.auto_wrap(again.wrapped[0], budget=plan)
    again.run()
    assert planner.plan_of(again.wrapped[0]).peak_bytes == plan.peak_bytes


def test_a_step_that_no_plan_can_hold_is_said_once() -> None:
    model, asked = Stack(2), grouped(runtime="graph", time_limit_seconds=0.2)
    least_bytes = planner.plan(model, rows(), budget="100%", **asked).minimum_feasible_peak_bytes
    planner.auto_wrap(model, budget=least_bytes + 4096, **asked)

    def step() -> None:
        model.zero_grad()
        (model(rows()) + model(rows())).backward()

    step(), step()
    with pytest.warns(UserWarning, match="no plan fits .* stays, and does not count what the step holds beside"):
        step(), step(), step()
    with warnings.catch_warnings(action="error"):
        step(), step()


# Gradients that are there when a step begins.


def wrap(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return planner.auto_wrap(Stack(2), **grouped(time_limit_seconds=0.2, **options))


@pytest.mark.filterwarnings("error:.*gradients of earlier backwards")
@pytest.mark.parametrize("runtime", ["graph", "regional"])
def test_gradients_that_a_call_finds_are_planned_for(runtime: str) -> None:
    asked = grouped(runtime=runtime, gradient_accumulation=True, budget="100%", time_limit_seconds=0.2)
    budget_bytes = planner.plan(Stack(2), rows(), **asked).minimum_feasible_peak_bytes + 4096
    model = wrap(budget=budget_bytes, runtime=runtime)
    model(rows()).backward()
    first = planner.plan_of(model)
    held_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert first.peak_bytes <= budget_bytes < first.peak_bytes + held_bytes
    model(rows()).backward()
    peak_bytes, _ = measure_peak(lambda: model(rows()).backward(), torch.device("cpu"))
    plan = planner.plan_of(model)
    peak_bytes += plan.static_bytes["parameters"] + held_bytes  # inputs are made inside
    assert 0.995 * plan.peak_bytes <= peak_bytes <= plan.peak_bytes <= budget_bytes


@pytest.mark.parametrize("is_given", [False, True])
def test_gradients_that_have_no_room_are_said_once(is_given: bool) -> None:
    asked = grouped(budget="100%", runtime="graph", time_limit_seconds=0.2)
    least = planner.plan(Stack(2), rows(), **asked).minimum_feasible_peak_bytes + 4096
    plan = planner.plan(Stack(2), rows(), **asked | {"budget": least})
    model = planner.auto_wrap(Stack(2), **asked | {"budget": plan if is_given else least})
    model(rows()).backward()
    words = "while it holds.*gradient_accumulation=True" if is_given else "does not count the gradients"
    with pytest.warns(UserWarning, match=words):
        model(rows()).backward()
    with warnings.catch_warnings(action="error"):
        model(rows()).backward()


@pytest.mark.filterwarnings("error::UserWarning")
def test_gradients_that_are_counted_freed_or_fit_are_not_said() -> None:
    for options in ({"budget": "85%", "gradient_accumulation": True}, {"activation_budget": "70%"}, {"budget": "1GiB"}):
        model = wrap(**options)
        for _ in range(3):
            model(rows()).backward()
    model = wrap(budget="70%")
    for _ in range(3):
        model(rows()).backward()
        model.zero_grad()


def test_computed_parameters_have_no_gradient_to_look_at() -> None:
    model = wrap(budget="1GiB")
    computed = {name: p * 0.9 for name, p in model.named_parameters()}
    functional_call(model, computed, (rows(),)).backward(retain_graph=True)
    with warnings.catch_warnings(action="error"):
        functional_call(model, computed, (rows(),)).backward()


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_state_of_an_optimizer_that_a_given_plan_does_not_count_is_said_once(runtime: str) -> None:
    model, x = Stack(2), rows()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    planned = grouped(budget="70%", runtime=runtime, time_limit_seconds=0.2)
    planner.auto_wrap(model, budget=planner.plan(Stack(2), x, **planned))
    with pytest.warns(UserWarning, match=r"AdamW keeps .* of state for Stack.* pass training='adamw' to auto_wrap"):
        step()
    with warnings.catch_warnings(action="error"):
        step()
        planner.auto_wrap(model, budget=planner.Budget(activations="70%"), runtime=runtime)
        step()
