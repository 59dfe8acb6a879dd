"""The programmatic way in: same object, same numbers, clear refusals."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import errors
from planner.capture import fake_mode
from planner.common.options import grouped
from tests.models import OneLinear, Stack, perceptron

WIDTH = 64


class Model(Stack):
    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth, partial(perceptron, WIDTH, hidden=512, dropout=0.1))


def data(rows: int = 512) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="module")
def planned() -> planner.Plan:
    torch.manual_seed(0)
    return planner.plan(Model(), data(), **grouped(activation_budget="60%", time_limit_seconds=1.0))


@pytest.fixture(scope="module")
def wrapped(planned: planner.Plan, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Return a model that carries out the plan of a file, and has run once."""
    path = tmp_path_factory.mktemp("plans") / "model.plan.json"
    planned.save(path)
    loaded = planner.Plan.load(path)
    assert loaded == planned
    torch.manual_seed(0)
    model = planner.auto_wrap(Model(), budget=loaded)
    model(data()).backward()
    return model


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_planning_leaves_the_model_alone(runtime: str) -> None:
    model = Model()
    model.blocks[0][0].weight.grad = torch.ones(WIDTH)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    planner.plan(model, data(), **grouped(activation_budget="70%", runtime=runtime, compare=False))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["blocks.0.0.weight"]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    with pytest.raises(errors.UsageError, match="not wrapped"):
        planner.plan_of(model)


def test_planning_a_fake_model_gives_the_same_plan() -> None:
    planned = planner.plan(Model(3), data(), **grouped(activation_budget="60%", solver="sqrt"))  # no clock decides it
    mode = fake_mode()
    with mode:
        model, x = Model(3), torch.randn(512, WIDTH)
    fake = planner.plan(model, x, budget=planner.Budget(activations="60%"), search="sqrt")
    assert fake.recomputations == planned.recomputations
    assert fake.peak_bytes == planned.peak_bytes
    assert fake.fingerprint == planned.fingerprint


def test_a_wrapped_model_has_a_plan_from_its_first_step_until_it_is_unwrapped() -> None:
    model = planner.auto_wrap(Model(), budget=planner.Budget(activations="70%"))
    with pytest.raises(errors.UsageError, match="not planned yet"):
        planner.plan_of(model)
    model(data()).backward()
    assert planner.plan_of(model).recomputations
    assert planner.unwrap(model) is model
    with pytest.raises(errors.UsageError, match="not wrapped"):
        planner.plan_of(model)
    model(data()).backward()


def test_what_runs_is_what_was_planned(planned: planner.Plan, wrapped: nn.Module) -> None:
    assert planner.plan_of(wrapped).recomputations == planned.recomputations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        wrapped(data()).backward()
    products = sum(e.count for e in seen.key_averages() if e.key in ("aten::addmm", "aten::mm"))
    again = [key for keys in planned.recomputations.values() for key in keys]
    assert products == 4 + 8 + sum("mm.default" in key for key in again)


def test_wrapping_again_replaces_the_plan() -> None:
    model = planner.auto_wrap(Model(), data(), **grouped(activation_budget="60%", time_limit_seconds=1.0))
    planner.auto_wrap(model, data(), budget=planner.Budget(activations="100%"))
    model(data()).backward()
    assert not planner.plan_of(model).recomputations


def test_a_plan_of_something_else_is_refused(planned: planner.Plan) -> None:
    with pytest.raises(errors.PlanMismatchError, match="made for something else"):
        planner.auto_wrap(Model(), data(256), budget=planned)
    deeper = planner.auto_wrap(Model(depth=3), budget=planned)
    with pytest.raises(errors.PlanMismatchError, match="made for something else"):
        deeper(data())
    planner.auto_wrap(deeper, data(), **grouped(plan=planned, replan=True, time_limit_seconds=1.0))
    deeper(data()).backward()


@pytest.mark.parametrize("budget", ["0", -5, "many", "5 parsecs", 0, "0%", "-1GiB", None, True, float("nan")])
def test_bad_budgets(budget: object) -> None:
    with pytest.raises(errors.UsageError):
        planner.plan(Model(), data(), budget=budget)


TWO = planner.Budget("1GiB", activations="1GiB")


@pytest.mark.parametrize(("budget", "says"), [("many", "size"), (0.6, "size"), (TWO, "give one budget")])
def test_bad_budgets_are_refused_before_training(budget: Any, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        planner.auto_wrap(Model(), budget=budget)


def test_a_budget_below_the_floor_names_the_smallest_that_does() -> None:
    model = Model()
    search = planner.Search(time_limit_seconds=0.2)
    with pytest.raises(errors.InfeasibleBudgetError, match=r"the smallest .*feasible.* is") as caught:
        planner.plan(model, data(), budget="1MB", search=search)
    enough = caught.value.minimum_feasible_peak_bytes
    assert planner.plan(model, data(), budget=enough, search=search).peak_bytes <= enough
    planner.auto_wrap(model, budget="1MB", search=search)
    with pytest.raises(errors.InfeasibleBudgetError):
        model(data())


@pytest.mark.parametrize("inputs", [None, 3, "text", (), {}, {"x": 1}, [None]])
def test_bad_example_inputs(inputs: object) -> None:
    with pytest.raises(errors.UsageError):
        planner.plan(Model(), inputs, budget="60%")


def test_a_lazy_module_is_called_once_before_it_is_planned() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU())
    for refused in (lambda: planner.plan(model, data(), budget="60%"), lambda: planner.auto_wrap(model, budget="60%")):
        with pytest.raises(errors.UsageError, match=r"'0\.weight' has no size yet.*call the model once"):
            refused()
    model(data())
    assert planner.plan(model, data(), budget="100%").peak_bytes > 0


def test_inputs_on_another_device() -> None:
    with pytest.raises(errors.UsageError, match="meta"):
        planner.plan(Model(), data().to("meta"), budget="60%")


@pytest.mark.parametrize("runtime", ["auto", "modules"])
def test_types_that_kernels_refuse_are_refused_as_in_eager(runtime: str) -> None:
    """Fake tensors let them pass, and so the plan was made, and failed inside."""
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    with pytest.raises(errors.CaptureError, match=r"(must have the same|mixed) dtype.*models\.py:\d+"):
        planner.plan(Model(), x, budget="80%", runtime=runtime)
    wrapped = planner.auto_wrap(Model(), budget="80%", runtime=runtime)
    with pytest.raises(RuntimeError, match="mixed dtype") as raised:  # eager's own: its norms refuse them first
        wrapped(x)
    assert not isinstance(raised.value, errors.PlannerError)


def test_a_forward_that_fails() -> None:
    with pytest.raises(errors.CaptureError, match=r"forward of Model fails.*models\.py:\d+"):
        planner.plan(Model(), torch.randn(8, WIDTH + 1), budget="60%")

    class Raises(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("no such thing")

    with pytest.raises(errors.CaptureError, match=r"fails as Dynamo follows it: KeyError.*test_api\.py:\d+"):
        planner.plan(Raises(), data(), budget="60%", runtime="graph")


def test_everything_frozen() -> None:
    with pytest.raises(errors.CaptureError, match="needs no backward"):
        planner.plan(Model().requires_grad_(False), data(), budget="60%")


def test_not_a_model() -> None:
    with pytest.raises(errors.UsageError, match=r"torch\.nn\.Module"):
        planner.plan(lambda x: x, data(), budget="60%")
    with pytest.raises(errors.UsageError):
        planner.auto_wrap(3, budget="60%")


class WritesInto(OneLinear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1.0)
        return self.linear(x).square().mean()


def test_views_of_each_other_that_a_forward_writes_into_are_refused_with_the_way_out() -> None:
    x = torch.randn(16, 8)
    with pytest.raises(errors.UnsupportedModelError, match="inputs that share memory: pass copies"):
        planner.plan(WritesInto(8), (x, x.view(-1)), budget="100%", runtime="graph")
    assert planner.plan(WritesInto(8), (x, x.clone()), budget="100%", runtime="graph").runtime == "graph"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "by its name .* not as SGD"),
        ({"time_limit_seconds": "5"}, "a number above 0 s, not '5'"),
        ({"time_limit_seconds": 0}, "a number above 0 s, not 0"),
        ({"solver": "ipl"}, "did you mean 'ilp'"),
        ({"runtime": "grpah"}, "did you mean 'graph'"),
        ({"cost_model": "rooflin"}, "roofline"),
        ({"device": "h1000"}, "h100"),
        ({"optimizer": "adamx"}, "did you mean adam"),
    ],
)
def test_what_is_unknown_or_of_another_kind_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        planner.auto_wrap(Model(), data(), **grouped(budget="90%", **wrong))


def test_resident_bytes_are_counted_once() -> None:
    model = Model()
    model.tied = model.blocks[0][1]  # the same storage under a second name
    asked = grouped(activation_budget="100%", optimizer="adamw", gradient_accumulation=True)
    plan = planner.plan(model, data(), **asked)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    counters = 64 * len(list(model.parameters()))  # Adam's, one for each parameter, rounded up
    assert plan.static_bytes == {
        "parameters": parameters,
        "buffers": 0,
        "inputs": 512 * WIDTH * 4,
        "gradients": parameters,
        "optimizer": 2 * parameters + counters,
    }


def test_planning_under_a_profiler_warns() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.warns(UserWarning, match="profiler is running"),
    ):
        planner.plan(nn.Linear(7, 13), torch.randn(5, 7), budget=planner.Budget(activations="100%"))


def test_a_plan_that_is_made_in_the_first_call_knows_the_workspace_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), data()
    ahead = planner.plan(model, x, budget=planner.Budget(activations="70%"), search=planner.Search(compare=False))
    monkeypatch.setattr("planner.measure.workspace._known", {})  # what was found out ahead is to be found out again
    planner.auto_wrap(model, budget=planner.Budget(activations="70%"))
    model(x).backward()
    assert planner.plan_of(model).peak_bytes == ahead.peak_bytes


@torch.library.custom_op("test_api::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    """Take long wherever it is traced."""
    return x.clone()


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.2)
    return torch.empty_like(x)


slow.register_autograd(lambda _, gradient: gradient)


class Slow(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return slow(self.linear(x))


@pytest.mark.parametrize("ahead", [True, False])
def test_the_time_of_capture_is_told_however_a_model_is_planned(ahead: bool) -> None:
    """A plan that the first call makes left Dynamo and AOTAutograd out."""
    inputs = torch.randn(4, 8)
    if ahead:
        plan = planner.plan(Slow(8), inputs, budget="1MiB", runtime="graph")
    else:
        model = planner.auto_wrap(Slow(8), budget="1MiB", runtime="graph")
        model(inputs)
        plan = planner.plan_of(model)
    assert plan.capture_seconds > 0.4  # Dynamo traces a forward, and AOTAutograd traces it again
