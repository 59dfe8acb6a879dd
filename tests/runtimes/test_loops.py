"""What happens to a model after it was wrapped: it is copied, moved, changed, compiled, hooked."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrizations

import planner
from planner.common.options import grouped
from planner.errors import UsageError
from tests.models import WIDTH, Layers, Stack, perceptron, rows
from tests.runtimes.steps import assert_same, beside, step, train, wrap_and_hold
from tests.tiers import tiered


def build() -> Stack:
    return Stack(2, block=partial(perceptron, dropout=0.5))


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return rows(128).to(dtype)


def wrapped(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return planner.auto_wrap(model or build(), **grouped(activation_budget="75%", time_limit_seconds=1.0, **options))


@pytest.fixture
def model() -> nn.Module:
    """Return a wrapped model that has trained a step."""
    model = wrapped()
    model(data()).backward()
    return model


def check(model: nn.Module, x: torch.Tensor | None = None) -> planner.Plan:
    """Hold a step against the same model unwrapped, bit for bit, and give the plan that ran."""
    x = data() if x is None else x
    before = copy.deepcopy(model)
    with pytest.raises(UsageError, match="not wrapped"):
        planner.plan_of(before)
    assert_same(train(before, x), train(model, x))
    return planner.plan_of(model)


def freeze(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def replace_module(model: Any) -> None:
    model.blocks[1][1] = nn.Linear(WIDTH, 64)
    model.blocks[1][4] = nn.Linear(64, WIDTH)


def replace_parameter(model: Any) -> None:
    model.blocks[1][1].weight = nn.Parameter(torch.randn(128, WIDTH))


def replace_data(model: Any) -> None:
    model.blocks[1][1].weight.data = torch.randn(128, WIDTH)


def load_by_assignment(model: Any) -> None:
    model.load_state_dict(build().state_dict(), assign=True)


def add_block(model: Any) -> None:
    model.blocks.append(nn.Linear(WIDTH, WIDTH))


def parametrize(model: Any) -> None:
    parametrizations.weight_norm(model.blocks[0][1])


def change_dropout(model: Any) -> None:
    model.blocks[0][3].p = 0.25


def replace_forward(model: Any) -> None:
    model.blocks[1].forward = lambda x: x * 3


CHANGES = {
    "quick": (change_dropout, replace_parameter, replace_module, replace_forward),
    "more": (replace_data, load_by_assignment, add_block, parametrize, freeze, nn.Module.eval),
}


@pytest.mark.parametrize("changes", tiered(CHANGES, slow=["more"]))
def test_a_change_is_seen_and_captured_again(model: nn.Module, changes: str) -> None:
    for change in CHANGES[changes]:  # one on top of the other: most of what this takes are captures
        change(model)
        check(model)


def test_switching_back_and_forth_comes_back_to_the_plans() -> None:
    model = build()
    freeze(model)
    frozen = check(wrapped(model))
    trained = check(model.requires_grad_(True))  # what begins to train gets its gradient
    assert trained.fingerprint["graph"] != frozen.fingerprint["graph"]
    freeze(model)
    assert check(model) is frozen
    evaluated = check(model.requires_grad_(True).eval())
    assert evaluated.fingerprint["graph"] != trained.fingerprint["graph"]
    assert check(model.train()) is trained


def test_another_type_is_captured_again(model: Any) -> None:
    small = planner.plan_of(model)
    plan = check(model.bfloat16(), data(torch.bfloat16))  # dropout of one half: its factor is exact in 16 bits
    assert plan.baseline_peak_bytes < 0.6 * small.baseline_peak_bytes


def test_another_device(model: nn.Module) -> None:
    model.to("meta")
    with pytest.raises(UsageError, match="on cpu and the model on meta"):
        model(data())
    model(data().to("meta")).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    assert planner.plan_of(model).recomputations


def test_hooks_added_later_run(model: Any) -> None:
    before = train(model, data())["loss"]
    handle = model.blocks[0].register_forward_hook(lambda module, arguments, output: output * 2)
    assert not torch.equal(train(model, data())["loss"], before)
    handle.remove()
    assert torch.equal(train(model, data())["loss"], before)
    called = []
    model.blocks[0].register_full_backward_hook(lambda module, into, out: called.append(module))
    with pytest.warns(UserWarning, match=r"'blocks\.0' has full backward hooks.*run under the runtime 'modules'"):
        assert torch.equal(train(model, data())["loss"], before)
    assert called


def test_hooks_on_all_modules_that_are_added_later_run(model: Any) -> None:
    before = train(model, data())
    forward = all_modules.register_module_forward_hook(lambda module, arguments, output: output * 1.5)
    try:
        check(model)
    finally:
        forward.remove()
    assert_same(before, train(model, data()))
    backward = all_modules.register_module_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
    try:
        plain = train(copy.deepcopy(model), data())
        with pytest.warns(UserWarning, match="Such calls run under the runtime 'modules'"):
            assert_same(plain, train(model, data()))
    finally:
        backward.remove()


@pytest.mark.slow
def test_a_forward_that_a_class_is_given_later_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x.tanh())
    check(model)
    monkeypatch.undo()
    check(model)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("runtime", tiered(["graph", "regional"], quick=["graph"]))
def test_planning_looks_for_no_anomalies(runtime: str) -> None:
    def planned(anomalies: bool) -> planner.Plan:
        with torch.autograd.set_detect_anomaly(anomalies):
            return planner.plan(build(), data(), **grouped(budget="75%", runtime=runtime, compare=False))

    assert planned(True).budget_bytes == planned(False).budget_bytes


def test_copies_are_plain_and_may_be_wrapped(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    expected, plan = train(model, data()), planner.plan_of(model)
    for copied in copies:
        with pytest.raises(UsageError, match="not wrapped"):
            planner.plan_of(copied)
        assert_same(expected, train(copied, data()))
        assert copied.blocks[0][1].weight is not model.blocks[0][1].weight
    assert_same(expected, train(planner.auto_wrap(copied, budget=plan), data()))
    assert planner.plan_of(copied).recomputations == plan.recomputations
    assert check(model).recomputations


def test_state_goes_in_and_out(model: nn.Module) -> None:
    other = build()
    other.load_state_dict(model.state_dict())
    assert_same(train(other, data()), train(model, data()))
    plan = planner.plan_of(model)
    model.load_state_dict(build().state_dict())
    assert check(model) is plan


def test_wrapping_a_compiled_model_is_refused() -> None:
    model = build()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="compiled by its compile"):
        planner.auto_wrap(model, budget="1GiB")


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.func.grad": lambda model, x: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)))(
        {name: p.detach() for name, p in model.named_parameters()}
    ),
    "torch.vmap": lambda model, x: torch.vmap(model)(x[None]),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x)(x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module()(x),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("transform", "runtime"),
    tiered(
        product(TRANSFORMS, ["graph", "modules", "regional"]),
        quick=[*product(TRANSFORMS, ["graph"]), ("torch.func.grad", "modules"), ("torch.vmap", "regional")],
    ),
)
def test_under_a_transform_the_model_runs_as_it_is(transform: str, runtime: str) -> None:
    plain, model = beside(Stack(2), activation_budget="100%", runtime=runtime)
    with warnings.catch_warnings(record=True, action="always") as said:
        expected, found = (TRANSFORMS[transform](one, rows()) for one in (plain, model))
    assert any("keeps no budget" in str(w.message) for w in said) == (transform in ("torch.func.grad", "torch.vmap"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_forward_called_by_itself_is_told_of() -> None:
    model = planner.auto_wrap(Stack(2), budget="1GiB", runtime="graph")
    with pytest.warns(UserWarning, match=r"Stack\.forward\(\) is called directly.*keeps no budget"):
        model.forward(rows())
    with warnings.catch_warnings(action="error"), torch.no_grad():
        model.forward(rows())


class Lightning(Layers, model=lambda: Stack(2)):
    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x)
        return loss


class Called(Lightning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.training_step(x)


def test_a_model_with_a_training_step_is_told_to_wrap_what_that_calls() -> None:
    with pytest.raises(UsageError, match=r"wrap the module that it calls, say Lightning.model"):
        planner.auto_wrap(Lightning(), budget="1GiB")
    with pytest.warns(UserWarning, match=r"say Called.model, unless that is Called itself"):
        planner.auto_wrap(Called(), budget="1GiB")


class Pair(Layers, left=lambda: Stack(2), right=lambda: Stack(2)):
    """Two stacks beside each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_a_part_that_is_wrapped_belongs_to_the_plan_of_the_whole(runtime: str) -> None:
    model = Pair()
    wrapped(model.left, runtime=runtime)
    step(model.left, rows(512))
    wrap_and_hold(model, rows(512), activation_budget="80%", runtime=runtime, time_limit_seconds=1.0)


def test_models_may_train_in_threads_of_their_own() -> None:
    """Each is captured and planned at its first step, all at once."""
    models = [Stack(2) for _ in range(2)]
    plain = copy.deepcopy(models)
    for model in models:
        wrapped(model)
    with ThreadPoolExecutor(len(models)) as pool:
        losses = list(pool.map(_trained_steps, models))
    assert losses == [_trained_steps(model) for model in plain]
    assert all(planner.plan_of(model) for model in models)


@pytest.mark.filterwarnings("error:.*does not run as planned")
@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_threads_that_share_a_model_take_turns(runtime: str) -> None:
    """What one of them captures or replaces must not be seen by the others."""
    model = Stack(3)
    plain = copy.deepcopy(model)
    wrapped(model, runtime=runtime)
    batches = [rows() for _ in range(3)]
    with ThreadPoolExecutor(len(batches)) as pool:
        gradients = list(pool.map(partial(_gradients, model), batches))
    for batch, found in zip(batches, gradients, strict=True):
        assert all(map(torch.equal, found, _gradients(plain, batch)))


def _gradients(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(5):
        gradients = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    return gradients


def _trained_steps(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows_at_once in (128, 128):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, rows_at_once * WIDTH).reshape(rows_at_once, WIDTH))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
