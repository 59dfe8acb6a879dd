"""What happens to a model after it was wrapped: it is copied, moved, changed, compiled, hooked."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import planner
from planner.errors import RuntimeUnsupportedError, UsageError

WIDTH = 32


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.5), nn.Linear(128, WIDTH))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def model() -> Model:
    """Return a wrapped model that has trained a step."""
    model = planner.auto_wrap(Model(), activation_budget="75%", time_limit_seconds=1.0)
    model(data()).backward()
    return model


def train(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(x)
    loss.backward()
    return {"": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def check(model: nn.Module, x: torch.Tensor | None = None) -> planner.Plan:
    """Hold a step against the same model unwrapped, bit for bit, and give the plan that ran."""
    x = data() if x is None else x
    before = copy.deepcopy(model)
    with pytest.raises(UsageError, match="not wrapped"):
        planner.plan_of(before)
    found, expected = train(model, x), train(before, x)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name
    return planner.plan_of(model)


def freeze(model: Model) -> None:
    model.blocks[0].requires_grad_(False)


def replace_module(model: Model) -> None:
    model.blocks[1][1] = nn.Linear(WIDTH, 64)
    model.blocks[1][4] = nn.Linear(64, WIDTH)


def replace_parameter(model: Model) -> None:
    model.blocks[1][1].weight = nn.Parameter(torch.randn(128, WIDTH))


def replace_data(model: Model) -> None:
    model.blocks[1][1].weight.data = torch.randn(128, WIDTH)


def load_by_assignment(model: Model) -> None:
    model.load_state_dict(Model().state_dict(), assign=True)


def add_block(model: Model) -> None:
    model.blocks.append(nn.Linear(WIDTH, WIDTH))


def parametrize(model: Model) -> None:
    parametrizations.weight_norm(model.blocks[0][1])


def change_dropout(model: Model) -> None:
    model.blocks[0][3].p = 0.25


def replace_forward(model: Model) -> None:
    model.blocks[2].forward = lambda x: x * 3


@pytest.mark.parametrize(
    "change",
    [
        nn.Module.eval,
        freeze,
        replace_module,
        replace_parameter,
        replace_data,
        load_by_assignment,
        add_block,
        parametrize,
        change_dropout,
        replace_forward,
    ],
    ids=lambda change: change.__name__,
)
def test_a_change_is_seen_and_captured_again(model: Model, change: Callable[[Model], object]) -> None:
    change(model)
    check(model)


def test_what_begins_to_train_gets_its_gradient() -> None:
    model = Model()
    freeze(model)
    planner.auto_wrap(model, activation_budget="75%", time_limit_seconds=1.0)
    frozen = check(model)
    model.requires_grad_(True)
    assert check(model).fingerprint["graph"] != frozen.fingerprint["graph"]


def test_switching_back_and_forth_comes_back_to_the_plans() -> None:
    model = planner.auto_wrap(Model(), activation_budget="75%", time_limit_seconds=1.0)
    trained = check(model)
    freeze(model)
    frozen = check(model)
    assert frozen.fingerprint["graph"] != trained.fingerprint["graph"]
    assert check(model.requires_grad_(True)) is trained
    evaluated = check(model.eval())
    assert evaluated.fingerprint["graph"] != trained.fingerprint["graph"]
    assert check(model.train()) is trained


def test_another_type_is_captured_again(model: Model) -> None:
    small = planner.plan_of(model)
    assert check(model.double(), data(torch.float64)).baseline_peak_bytes > 1.8 * small.baseline_peak_bytes
    check(model.bfloat16(), data(torch.bfloat16))  # dropout of one half: its factor is exact in 16 bits


def test_another_device(model: Model) -> None:
    model.to("meta")
    with pytest.raises(UsageError, match="on cpu and the model on meta"):
        model(data())
    model(data().to("meta")).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    assert planner.plan_of(model).recomputations


def test_hooks_added_later_run(model: Model) -> None:
    before = train(model, data())[""]
    handle = model.blocks[0].register_forward_hook(lambda module, arguments, output: output * 2)
    assert not torch.equal(train(model, data())[""], before)
    handle.remove()
    assert torch.equal(train(model, data())[""], before)
    model.blocks[0].register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(RuntimeUnsupportedError, match=r"'blocks\.0' has full backward hooks"):
        model(data())


def test_checkpointing_of_its_own_is_refused(model: Model) -> None:
    model.blocks[1].gradient_checkpointing = True
    with pytest.raises(UsageError, match=r"itself, in 'blocks\.1'.*gradient_checkpointing_disable"):
        planner.auto_wrap(model, data(), activation_budget="75%")
    model.eval()
    check(model)


def test_copies_are_plain_and_may_be_wrapped(model: Model) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        expected = train(model, data())
        found = train(planner.auto_wrap(copied, plan=planner.plan_of(model)), data())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert planner.plan_of(copied).recomputations == planner.plan_of(model).recomputations
        assert copied.blocks[0][1].weight is not model.blocks[0][1].weight
    assert check(model).recomputations


def test_state_goes_in_and_out(model: Model) -> None:
    other = Model()
    other.load_state_dict(model.state_dict())
    expected, found = train(other, data()), train(model, data())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plan = planner.plan_of(model)
    model.load_state_dict(Model().state_dict())
    assert check(model) is plan


def test_a_wrapped_part_belongs_to_the_plan_of_the_whole() -> None:
    model = Model()
    planner.auto_wrap(model.blocks[0], activation_budget="100%")
    planner.auto_wrap(model, activation_budget="75%", time_limit_seconds=1.0)
    assert check(model).recomputations


def test_wrapping_a_compiled_model_is_refused() -> None:
    model = Model()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="compiled by its compile"):
        planner.auto_wrap(model, budget="1GiB")
