"""The loop around a wrapped model is observed: its outputs, and an optimizer that nobody named."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, UsageError
from planner.measure.optimizers import kept_for
from tests.models import WIDTH, perceptron, rows
from tests.runtimes.steps import assert_gradients, verified
from tests.tiers import tiered

WORDS = 2048


class Scores(nn.Module):
    """Returns its loss beside scores that take more than all that is saved inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(perceptron() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        return {"loss": F.cross_entropy(scores, y), "scores": scores}


class Leaving(Scores):
    """Leaves features in a buffer, as a queue of old ones is kept, and returns its loss alone."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found = super().forward(x, y)
        self.queue = found["scores"].detach() * 2
        return found["loss"]


@cache
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return rows(), torch.arange(256) * 7 % WORDS


def step(model: nn.Module, loop: str) -> None:
    """Run a step, or two where the variable for the outputs is bound again once the next call returns."""
    for _ in range(1 + (loop == "kept")):
        model.zero_grad()
        outputs = model(*batch())
        loss = outputs["loss"]
        if loop == "dropped":
            del outputs
        loss.backward()


options = partial(grouped, time_limit_seconds=0.5)


@cache
def smallest_bytes(runtime: str, outputs: str) -> int:
    plan = planner.plan(Scores(), batch(), **options(budget="100%", runtime=runtime, outputs=outputs))
    return plan.minimum_feasible_peak_bytes


@pytest.mark.parametrize(
    ("loop", "runtime"),
    tiered(
        product(["dropped", "held", "kept"], ["graph", "modules", "regional"]),
        quick=[("dropped", "graph"), ("held", "modules"), ("kept", "regional"), ("held", "graph")],
    ),
)
def test_what_is_planned_is_what_the_loop_holds(loop: str, runtime: str) -> None:
    model, plain = Scores(), Scores()
    # All three loops fit here, the one that holds most least.
    budget_bytes = smallest_bytes(runtime, "held") + 4096
    planner.auto_wrap(model, **options(budget=budget_bytes, runtime=runtime))
    step(model, loop), step(model, loop)
    model.zero_grad()
    peak_bytes, _ = measure_peak(lambda: step(model, loop), torch.device("cpu"))
    plan = planner.plan_of(model)
    predicted_bytes = plan.peak_bytes - sum(plan.static_bytes[kind] for kind in ("parameters", "inputs"))
    assert 0.995 * predicted_bytes <= peak_bytes <= predicted_bytes
    assert plan.peak_bytes <= budget_bytes
    step(plain, loop)
    assert_gradients(plain, model)


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_a_budget_that_only_a_dropping_loop_keeps_is_tried(runtime: str) -> None:
    least_bytes = smallest_bytes(runtime, "dropped")
    assert least_bytes < smallest_bytes(runtime, "held")
    model = planner.auto_wrap(Scores(), **options(budget=least_bytes, runtime=runtime))
    for _ in range(3):
        step(model, "dropped")
    assert planner.plan_of(model).fingerprint["outputs"] == "dropped"
    model = planner.auto_wrap(Scores(), batch(), **options(budget=least_bytes, runtime=runtime))
    assert planner.plan_of(model).fingerprint["outputs"] == "dropped"  # before the first call, too
    step(model, "held")
    with pytest.raises(InfeasibleBudgetError) as refused:
        step(model, "held")
    assert "the loop holds the model's outputs" in refused.value.__notes__[0]


@pytest.mark.parametrize("runtime", ["graph", "auto"])
def test_the_plan_goes_on_where_none_has_room_for_gradients(runtime: str) -> None:
    model = planner.auto_wrap(Scores(), **options(budget=smallest_bytes("graph", "dropped"), runtime=runtime))
    step(model, "dropped"), step(model, "dropped")
    plan = planner.plan_of(model)
    model.load_state_dict(Scores().state_dict(), assign=True)  # gradients of these count too
    step(model, "dropped")
    with pytest.warns(UserWarning, match="plan in force stays, and does not count the gradients"):
        model(*batch())["loss"].backward()
    model(*batch())["loss"].backward()
    assert planner.plan_of(model).peak_bytes == plan.peak_bytes


def test_what_is_told_of_outputs_is_not_observed() -> None:
    least_bytes = smallest_bytes("graph", "dropped")
    model = planner.auto_wrap(Scores(), **options(budget=least_bytes, outputs="held", runtime="graph"))
    with pytest.raises(InfeasibleBudgetError):
        step(model, "dropped")
    model = planner.auto_wrap(Scores(), **options(budget=least_bytes, outputs="dropped", runtime="graph"))
    step(model, "held")
    with pytest.warns(UserWarning, match=r"outputs are held by the loop.*Training\(outputs='held'\)"):
        step(model, "held")
    with pytest.raises(UsageError, match="unknown outputs 'gone': one of auto, dropped, held, kept"):
        planner.Training(outputs="gone")


def test_a_plan_says_which_loop_it_is_for_and_its_file_does() -> None:
    plan = planner.plan(Scores(), batch(), **options(budget="90%"))
    assert plan.fingerprint["outputs"] == "dropped"  # the model returns its own loss
    assert "2.0 MiB of outputs are counted until there is a loss" in str(plan.warnings)
    model = planner.auto_wrap(Scores(), budget=planner.Plan.from_json(plan.to_json()))
    step(model, "dropped")
    assert planner.plan_of(model).fingerprint["outputs"] == "dropped"
    kept = planner.plan(Scores(), batch(), **options(budget="100%", outputs="kept", runtime="graph"))
    verified(Scores(), batch(), kept)


def test_a_plan_for_another_size_says_it_too() -> None:
    model = planner.auto_wrap(Scores(), **options(budget="75%", runtime="graph"))
    for count in (256, 240, 200, 180, 160):
        model(*(tensor[:count] for tensor in batch()))["loss"].backward()
    assert planner.plan_of(model).fingerprint["outputs"] == "dropped"


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_what_a_call_leaves_in_the_model_is_not_dropped(runtime: str) -> None:
    plan = planner.plan(Leaving(), batch(), **options(budget="100%", runtime=runtime))
    assert "outputs" not in plan.fingerprint
    verified(Leaving(), batch(), plan)


# The optimizer.


class Momentum(torch.optim.Optimizer):
    """An optimizer of one's own, whose state is known only once it has stepped, and grows in its second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradients = self.state[parameter].setdefault("last", [])
            gradients[:] = [*gradients[-1:], parameter.grad.clone()]


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW, "one's own": lambda every: Momentum(every, {}),
    "two groups": lambda every: torch.optim.Adam([{"params": every[:3]}, {"params": every[3:], "amsgrad": True}]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "runtime"),
    tiered(
        product(MADE, ["graph", "modules"]),
        quick=[("AdamW", "graph"), ("one's own", "modules"), ("two groups", "graph")],
    ),
)
def test_an_optimizer_counts_without_being_named(name: str, runtime: str) -> None:
    model = planner.auto_wrap(Scores(), **options(budget="20MiB", runtime=runtime))
    optimizer = MADE[name]([*model.parameters()])  # as most loops do, after the model was wrapped
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            step(model, "dropped")
            optimizer.step()
            model.zero_grad()
    kept_bytes = kept_for(optimizer, model.parameters(), 64)
    assert planner.plan_of(model).static_bytes["optimizer"] == kept_bytes > 0


def test_an_optimizer_that_there_is_no_room_for_is_said_and_training_goes_on() -> None:
    model = planner.auto_wrap(Scores(), **options(budget=smallest_bytes("graph", "dropped"), runtime="graph"))
    optimizer = Momentum(model.parameters(), {})
    step(model, "dropped")
    optimizer.step()
    with pytest.warns(UserWarning, match="no plan fits.*does not count what the optimizer keeps"):
        step(model, "dropped")
    with warnings.catch_warnings(action="error"):
        step(model, "dropped")


def test_later_plans_do_not_pay_for_an_interrupted_backward() -> None:
    budget_bytes = int(1.3 * smallest_bytes("graph", "held"))
    model = planner.auto_wrap(Scores(), **options(budget=budget_bytes, runtime="graph", outputs="held"))
    step(model, "held")
    loss = model(*batch())["loss"]
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    step(model, "held")
    del loss
    for _ in range(3):
        step(model, "held")
    assert planner.plan_of(model).static_bytes.get("reserve", 0) < 4096


def test_a_scope_may_be_open_from_one_log_to_the_next() -> None:
    again = (
        "import torch; from planner.capture.memory import AllocationLog as Log\n"
        "for _ in range(100):\n"
        "    log, scopes = Log(torch.device('cpu')), [torch.profiler.record_function('step') for _ in range(200)]\n"
        "    [scope.__enter__() for scope in scopes]; log.stop(); log = Log(torch.device('cpu'))\n"
        "    [scope.__exit__(None, None, None) for scope in scopes]; log.stop()"
    )
    subprocess.run([sys.executable, "-c", again], check=True)  # torch's profiler would corrupt the heap
