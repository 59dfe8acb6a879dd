"""One capture with symbolic sizes: each size has the step, the peak and the bits of a capture at that size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import UnsupportedModelError
from planner.runtimes import _sized
from tests.models import WIDTH, Convolutions, Layers, Stack, linear, mean_square, perceptron
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered

HEADS = 4


class Attention(Layers, q=linear(WIDTH, WIDTH), kv=linear(WIDTH, 2 * WIDTH), out=linear(WIDTH, WIDTH)):
    """Causal attention with dropout inside the kernel and after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q(x), *self.kv(x).chunk(2, dim=-1)))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2)


class Packed(Layers, q=linear(WIDTH, WIDTH), kv=linear(WIDTH, WIDTH), out=linear(WIDTH, WIDTH)):
    """Samples end to end in one row: a mask keeps each to itself, and the batch is one whatever comes."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        rows, length, _ = x.shape
        sample = (positions == 0).cumsum(-1)
        mask = (sample[:, :, None] == sample[:, None, :]).tril()[:, None]
        q = self.q(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
        kv = self.kv(x).view(rows, length, 2, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        k, v = (part.repeat_interleave(2, dim=1) for part in kv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mean_square(self.out(y.transpose(1, 2).reshape(rows, length, -1)))


class Means(Layers, inner=linear(WIDTH, WIDTH), outer=linear(WIDTH, WIDTH)):
    """Numbers that sizes decide: scales, reshapes, padding to a multiple, and a mean over what is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x)) * x.shape[1] ** -0.5
        y = F.pad(y, (0, 0, 0, -y.shape[1] % 4)).unflatten(1, (-1, 4)).amax(2)
        z = self.outer(y).transpose(1, 2).cumsum(-1)
        return (z / y.numel()).std(0).mean() + F.avg_pool1d(z, 2).square().mean()


class Critic(Layers, score=lambda: nn.Sequential(perceptron(), nn.Linear(WIDTH, 1))):
    """A column of scores, of which the backward makes one number seen as many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x).mean()


def floats(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


IMAGES = ((4, 16, 16), (3, 12, 20), (5, 15, 9), (8, 16, 16))

CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[tuple[torch.Tensor, ...]]]] = {
    "perceptron": (
        lambda: Stack(2, lambda: perceptron(dropout=0.1)),
        [(floats(rows, WIDTH),) for rows in (64, 48, 33, 128)],
    ),
    "attention": (
        lambda: Stack(1, lambda: nn.Sequential(nn.LayerNorm(WIDTH), Attention())),
        [(floats(batch, length, WIDTH),) for batch, length in ((4, 16), (3, 24), (7, 7), (8, 16))],
    ),
    "convolutions": (lambda: Convolutions(1), [(floats(batch, 16, *image),) for batch, *image in IMAGES]),
    "packed": (
        lambda: Packed(blocks=Stack(3, has_loss=False)),
        [
            (floats(1, a + b, WIDTH), torch.cat([torch.arange(a), torch.arange(b)])[None])
            for a, b in ((64, 36), (80, 15), (28, 48), (36, 84), (52, 56))
        ],
    ),
    "column": (Critic, [(floats(rows, WIDTH),) for rows in (64, 48, 33, 57)]),
    "means": (Means, [(floats(batch, length, WIDTH),) for batch, length in ((4, 16), (3, 15), (6, 22), (5, 27))]),
}


def wrapped(model: nn.Module) -> nn.Module:
    return planner.auto_wrap(
        copy.deepcopy(model),
        **grouped(activation_budget="85%", runtime="graph", time_limit_seconds=0.2, cost_model="roofline"),
    )


@pytest.mark.parametrize("name", tiered(CASES, quick=["perceptron", "convolutions"]))
def test_each_size_is_the_step_that_a_capture_at_that_size_gives(
    name: str, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sizes = CASES[name]
    model = make()
    varying = wrapped(model)
    for inputs in sizes[:-1]:
        train(varying, inputs)
    assert len(captures) == 2
    monkeypatch.setattr(_sized, "at_sizes", refuse)
    fixed = wrapped(model)
    fixed.load_state_dict(varying.state_dict())
    found = train(varying, sizes[-1])
    assert len(captures) == 2
    assert_same(train(fixed, sizes[-1]), found)
    plan, expected_plan = planner.plan_of(varying), planner.plan_of(fixed)
    assert plan.fingerprint == expected_plan.fingerprint
    assert plan.baseline_peak_bytes == expected_plan.baseline_peak_bytes
    largest = max(sum(map(torch.numel, inputs)) for inputs in sizes)
    assert (plan.eager is None) == (sum(map(torch.numel, sizes[-1])) < largest)  # recorded for more than was planned
    assert plan.eager is None or plan.eager.peak_bytes == expected_plan.eager.peak_bytes


def test_one_code_serves_dropout_of_all_sizes(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)))
    rows = 2**15 // WIDTH
    for count in (rows, rows + 8, rows // 4):
        model(torch.randn(count, WIDTH)).sum().backward()
    monkeypatch.setattr(_sized, "at_sizes", refuse)
    for count in (rows + 4, rows // 8):
        model(torch.randn(count, WIDTH)).sum().backward()
    assert len(captures) == 2


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the formula should say what is needed")


class Pooled(Layers, blocks=lambda: Stack(1, perceptron, has_loss=False)):
    """Lengths of two and three become one, which pooling of a transposed batch lays out in another way than tracing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x).transpose(1, 2).cumsum(-1)
        return F.avg_pool1d(y, 2).square().mean()


def test_a_result_that_a_kernel_lays_out_in_its_own_way_is_made_plain_at_each_size() -> None:
    model = Pooled()
    varying = wrapped(model)
    for batch, length in ((32, 2), (24, 3), (20, 3)):
        assert_same(train(model, floats(batch, length, WIDTH)), train(varying, floats(batch, length, WIDTH)))


@pytest.mark.parametrize("runtime", ["auto", "modules"])
def test_nested_inputs_are_refused_by_name(runtime: str) -> None:
    model = planner.auto_wrap(Stack(2), budget=planner.Budget(activations="75%"), runtime=runtime)
    rows_of_lengths = [torch.randn(length, WIDTH) for length in (30, 50)]
    with pytest.raises(UnsupportedModelError, match="an input is a nested tensor"):
        model(torch.nested.nested_tensor(rows_of_lengths, layout=torch.jagged))


class Picture(torch.Tensor):
    """A tensor that says what it holds, as those of some libraries do."""


@pytest.mark.parametrize("runtime", ["auto", "modules"])
def test_inputs_of_a_class_of_their_own_are_refused_with_the_way_out(runtime: str) -> None:
    model = planner.auto_wrap(nn.Linear(4, 4), budget="1GiB", runtime=runtime)
    picture = torch.randn(2, 4).as_subclass(Picture)
    with pytest.raises(UnsupportedModelError, match=r"of the class Picture.*as_subclass\(torch\.Tensor\)"):
        model(picture)
    model(picture.as_subclass(torch.Tensor)).sum().backward()


class Margin(Layers, layers=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))):
    """Ends in a loss whose derivative torch does not trace with symbols."""

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.multi_margin_loss(self.layers(x), classes)


def test_what_cannot_be_symbols_is_captured_at_each_size_without_a_log(
    captures: list[int], capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = wrapped(Margin())
    for rows in (64, 48, 32):
        train(model, (torch.randn(rows, WIDTH), torch.randint(4, (rows,))))
    assert planner.plan_of(model).runtime == "graph"
    assert "Backend compiler exception" not in capfd.readouterr().err
    assert not any("Error detected" in str(warning.message) for warning in recwarn)
