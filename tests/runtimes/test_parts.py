"""The largest modules that can be captured, planned as graphs in a model that cannot be captured whole."""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from planner.capture.joint_capture import CallOfAnySize
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from planner.errors import CaptureError, InfeasibleBudgetError, UsageError
from tests.models import WIDTH, Layers, OneLinear, linear, looked_at, mean_square, perceptron, rows
from tests.runtimes.steps import assert_same, beside, step, train, wrap_and_hold
from tests.runtimes.test_contract import Looks
from tests.tiers import tiered


class Chain(Layers, weights=lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(6))):
    """A module without parts, of many steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * 2.0
        return x


def three_layers() -> nn.Module:
    return nn.ModuleList(perceptron() for _ in range(3))


class Drops(Layers, layers=three_layers, first=linear(WIDTH, WIDTH), last=linear(WIDTH, WIDTH)):
    """Layers that are dropped at random, by torch's numbers or by Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            drawn = torch.rand([]) if self.draw == "torch" else random.random()
            if drawn >= 0.3:
                x = x + layer(x)
        return mean_square(self.last(x))


class Selects(Layers, first=perceptron, second=perceptron):
    """A part that is given as many rows as data say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return mean_square(self.second(x[x[:, 0] > 0]))


class Twice(Layers, first=perceptron, second=perceptron):
    """A module that is called once more where data say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        return mean_square(self.first(y) if x[0, 0] > 5 else y)


def test_auto_takes_captured_parts_where_whole_modules_need_more() -> None:
    model = Looks(Chain)
    smallest = {}
    for runtime in ("parts", "modules"):
        with pytest.raises(InfeasibleBudgetError) as refused:
            planner.plan(model, rows(), budget="1%", runtime=runtime, search=planner.Search(time_limit_seconds=1.0))
        smallest[runtime] = refused.value.minimum_feasible_peak_bytes
    assert smallest["parts"] < smallest["modules"]
    with pytest.warns(UserWarning, match="runtime 'parts' instead of 'graph'"):
        plan = wrap_and_hold(model, rows(), budget=smallest["parts"], time_limit_seconds=1.0)
    assert plan.runtime == "parts"


class ChecksPoints(Looks):
    """A model that checkpoints its first half itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        x = x * 2.0 if looked_at(self, x) > 0 else x * 3.0
        return mean_square(self.second(x))


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"calls torch.utils.checkpoint itself"):
        planner.plan(ChecksPoints(perceptron), rows(), budget="100%", runtime="parts")
    with pytest.raises(UsageError, match=r"call block\(x\) there .* Where the runtime 'graph' can") as refused:
        planner.auto_wrap(ChecksPoints(perceptron), budget="1GiB")(rows())
    assert isinstance(refused.value.__cause__, CaptureError)


def test_sizes_beyond_the_limit_run_in_whole_modules() -> None:
    model = Looks(Chain)
    plain = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as refused:
        planner.plan(model, rows(), budget="1%", runtime="modules", search=planner.Search(time_limit_seconds=1.0))
    budget_bytes = refused.value.minimum_feasible_peak_bytes - 4096
    planner.auto_wrap(model, **grouped(budget=budget_bytes, maximum_shapes=1, time_limit_seconds=1.0))
    with pytest.warns(UserWarning, match="'parts' instead of 'graph'"):
        assert_same(train(plain, rows()), train(model, rows()))
    with pytest.warns(UserWarning, match="were captured 1 times.* run under the runtime 'modules'"):
        assert_same(train(plain, rows(64)), train(model, rows(64)))
    assert planner.plan_of(model).runtime == "modules"
    train(model, rows())
    assert planner.plan_of(model).runtime == "parts"


@pytest.mark.filterwarnings("ignore:data decide what")
def test_little_smaller_inputs_run_by_a_plan_that_there_is_in_graphs_for_any_size() -> None:
    with patch.object(CallOfAnySize, "captured", autospec=True, side_effect=CallOfAnySize.captured) as captured:
        options = {"runtime": "parts", "activation_budget": "80%", "time_limit_seconds": 1.0, "maximum_shapes": 3}
        plain, model = beside(Looks(perceptron), **options)
        for count, planned_for in ((60, 60), (56, 60), (52, 60), (80, 80), (70, 80), (50, 60), (54, 60), (20, 20)):
            assert_same(train(plain, rows(count)), train(model, rows(count)))
            model.zero_grad()
            peak_bytes, _ = measure_peak(partial(step, model, rows(count)), torch.device("cpu"))
            plan = planner.plan_of(model)
            assert plan.fingerprint["inputs"] == f"({planned_for}, {WIDTH}) float32"
            assert bool(plan.recomputations) == (count > 20)
            assert peak_bytes <= plan.peak_bytes - plan.total_static_bytes
    assert captured.call_count == 4  # two parts: at the first size, and with symbols


def test_auto_takes_whole_modules_where_no_part_can_be_captured() -> None:
    class Whole(OneLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mean_square(self.linear(x) if looked_at(self, x) > 0 else x)

    with pytest.raises(CaptureError, match="no module of Whole"):
        planner.plan(Whole(), rows(), budget="100%", runtime="parts")
    with pytest.warns(UserWarning, match="runtime 'modules' instead of 'graph'"):
        assert planner.plan(Whole(), rows(), budget="100%").runtime == "modules"


@pytest.mark.parametrize("draw", tiered(["torch", "python"], quick=["torch"]))
def test_a_plan_is_for_the_largest_of_steps_that_drop_layers(draw: str) -> None:
    model, x = Drops(draw=draw), rows()
    plain = copy.deepcopy(model)
    planner.auto_wrap(model, **grouped(runtime="parts", activation_budget="80%", time_limit_seconds=1.0))
    with warnings.catch_warnings(action="ignore"):
        train(model, x)
    assert planner.plan_of(model).fingerprint["blocks"] == "layers.0 layers.1 layers.2"
    for number in range(4):
        random.seed(number)
        expected = train(plain, x, seed=number)
        random.seed(number)
        with warnings.catch_warnings(action="error", category=UserWarning):
            assert_same(expected, train(model, x, seed=number))
        model.zero_grad()
        random.seed(number)
        peak_bytes, _ = measure_peak(lambda: model(x).backward(), torch.device("cpu"))
        plan = planner.plan_of(model)
        assert peak_bytes <= plan.peak_bytes - plan.total_static_bytes


def test_a_part_that_is_given_more_than_planned_runs_as_it_is_and_people_are_told() -> None:
    plain, model = beside(Selects(), runtime="parts", activation_budget="80%", time_limit_seconds=1.0)
    first, less, more, end = (torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (0, 2, 1, 6))
    with pytest.warns(UserWarning, match="data decide what"):
        assert_same(train(plain, first), train(model, first))
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert_same(train(plain, less), train(model, less))
    with pytest.warns(UserWarning, match="second is called with other sizes"):
        assert_same(train(plain, more), train(model, more))
    assert_same(train(plain, end), train(model, end))
    assert planner.plan_of(model).fingerprint["blocks"] == "first"


def test_a_part_that_is_called_again_runs_as_it_is_and_people_are_told() -> None:
    plain, model = beside(Twice(), runtime="parts", activation_budget="80%", time_limit_seconds=1.0)
    x, again = rows(), rows()
    again[0, 0] = 6.0
    with pytest.warns(UserWarning, match="data decide what"):
        assert_same(train(plain, x), train(model, x))
    assert planner.plan_of(model).fingerprint["blocks"] == "first second"
    with pytest.warns(UserWarning, match="first is called more than once"):
        assert_same(train(plain, again), train(model, again))
    assert_same(train(plain, again), train(model, again))
    assert planner.plan_of(model).fingerprint["blocks"] == "second"


class Rests(Looks):
    """A dropout outside of what is captured."""

    def __init__(self) -> None:
        super().__init__(perceptron)
        self.rest = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rest(self.first(x))
        return mean_square(self.second(x * 2.0 if looked_at(self, x) > 0 else x * 3.0))


@pytest.mark.filterwarnings("ignore:data decide what")
def test_a_dropout_that_is_switched_on_outside_of_parts_is_said_and_planned() -> None:
    plain, model = beside(Rests(), budget="100%", runtime="parts", time_limit_seconds=0.5)
    assert_same(train(plain, rows()), train(model, rows()))
    plain.rest.p = model.rest.p = 0.3
    with pytest.warns(UserWarning, match=r"rest\.p: more than planned"):
        assert_same(train(plain, rows()), train(model, rows()))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Rests does not run")
        assert_same(train(plain, rows()), train(model, rows()))
