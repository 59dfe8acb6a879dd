"""Every case in which checkpointing is known to go wrong, bit for bit against the same step without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError
from tests.models import Layers, Stack, linear, perceptron
from tests.runtimes.steps import Left, assert_same, beside, wrap_and_hold
from tests.tiers import tiered

WIDTH, ROWS = 64, 256


def wide(middle: nn.Module | None = None) -> nn.Module:
    """Return a perceptron that keeps much more than it gives on."""
    return perceptron(WIDTH, hidden=8 * WIDTH, middle=middle)


def through(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: wide(Function(function=function))


class Function(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Recurrent(Layers, down=linear(2 * WIDTH, WIDTH)):
    """The rows as four steps in time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.layer(x.unflatten(0, (4, -1)))[0].flatten(0, 1))


class Attention(Layers, qkv=linear(WIDTH, 3 * WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(8, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return y.transpose(1, 2).reshape(x.shape)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, WIDTH // 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 1, 3, padding=1),
        nn.Flatten(),
    )


def in_place(y: torch.Tensor) -> torch.Tensor:
    y[:, :WIDTH] *= 0.5
    y.add_(1.0)
    return F.relu_(y)


class MutatedBuffer(
    Layers, mlp=wide, average=lambda: nn.Buffer(torch.zeros(WIDTH)), count=lambda: nn.Buffer(torch.tensor(0))
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        with torch.no_grad():
            self.count += 1
            self.average.lerp_(y.mean(0), 0.1)
        return y - self.average


class LowRank(
    Layers, mlp=lambda: wide().requires_grad_(False), a=linear(WIDTH, 4, bias=False), b=linear(4, WIDTH, bias=False)
):
    """A frozen linear layer with a trained adapter, as LoRA has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.b(self.a(F.dropout(x, 0.1, self.training)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.body = nn.ModuleList(wide(nn.Sequential(nn.GELU(), nn.Dropout(0.1))) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, 0].abs().mul(10).long().clamp_(max=WIDTH - 1)
        y = self.embedding(tokens)
        for block in self.body:
            y = y + block(y)
        return F.cross_entropy(self.head(y), tokens)


def noisy(draw: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return through(lambda x: F.gelu(x) * draw(x))


def _half_frozen() -> nn.Module:
    model = Stack(2, block=wide)
    model.blocks[0].requires_grad_(False)
    return model


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": wide,
    "native dropout": lambda: wide(nn.Sequential(nn.GELU(), nn.Dropout(0.2))),
    "alpha dropout": lambda: wide(nn.Sequential(nn.SELU(), nn.AlphaDropout(0.1))),
    "attention dropout": Attention,
    "rrelu": lambda: wide(nn.RReLU()),
    "bernoulli": noisy(lambda x: torch.bernoulli(torch.full_like(x, 0.7))),
    "randn": noisy(lambda x: torch.randn(x.shape)),
    "normal": noisy(lambda x: torch.normal(0.0, 1.0, x.shape)),
    "randperm": through(lambda x: F.gelu(x)[torch.randperm(x.shape[0])]),
    "multinomial": through(lambda x: F.gelu(x) * torch.multinomial(x.detach().exp(), 1).to(x.dtype)),
    "batch norm": lambda: wide(nn.Sequential(nn.BatchNorm1d(8 * WIDTH), nn.ReLU())),
    "convolutions": convolutions,
    "in place": through(in_place),
    "mutated buffer": MutatedBuffer,
    "lstm": lambda: Recurrent(layer=nn.LSTM(WIDTH, 2 * WIDTH)),
    "gru": lambda: Recurrent(layer=nn.GRU(WIDTH, 2 * WIDTH)),
    "low rank adapter": LowRank,
    "max pool": through(lambda x: F.max_pool1d(x, 3, 1, 1) * x),
    "split and cat": through(lambda x: torch.cat([a.exp() for a in x.chunk(4, -1)], -1)),
}

CASES: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Stack, 2, block=block) for name, block in BLOCKS.items()},
    "tied weights": Tied,
    "frozen half": _half_frozen,
}

QUICK = ("attention dropout", "convolutions", "in place", "mutated buffer", "lstm", "low rank adapter", "tied weights")
"""The others are like one of these or of ``LOOPS``: more draws of random numbers, more pointwise functions."""


SHARES = {"in place": "85%", "low rank adapter": "72%"}
"""Of eager's activations where three quarters are too few, or so many that nothing is recomputed."""


def data(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3))


AUTOCAST = ("plain", "native dropout", "batch norm", "tied weights", "attention dropout")
Step = Callable[[nn.Module], list[torch.Tensor]]


def run(model: nn.Module, step: Step) -> Left:
    """Return everything that training steps leave behind."""
    torch.manual_seed(11)
    result = step(model)
    found: Left = {f"result {i}": r.detach().clone() for i, r in enumerate(result)}
    found |= {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    found["random state"] = torch.get_rng_state()
    return found


IN_16_BITS = "74%"
"""Of those steps, apart from the others: a percentage is of the largest step that a model has taken."""


@cache
def plain_and_wrapped(
    build: Callable[[], nn.Module], share: str, **asked: Any
) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """Return a model, the same that is to recompute or offload, and their state before any step."""
    torch.manual_seed(5)
    plain = build()
    state = copy.deepcopy(plain.state_dict())
    return (
        plain,
        planner.auto_wrap(copy.deepcopy(plain), **grouped(activation_budget=share, time_limit_seconds=0.5, **asked)),
        state,
    )


def start_again(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.train().zero_grad()
    model.load_state_dict(state)
    return model


def assert_exact(build: Callable[[], nn.Module], step: Step, share: str = "75%", **asked: Any) -> None:
    """Take the same step without a plan and with one, and compare every bit."""
    plain, wrapped, state = plain_and_wrapped(build, share, **asked)
    expected = run(start_again(plain, state), step)
    try:
        actual = run(start_again(wrapped, state), step)
    except InfeasibleBudgetError as error:  # then what it names must do
        told = {"budget": error.minimum_feasible_peak_bytes, "time_limit_seconds": 0.5, **asked}
        planner.auto_wrap(wrapped, **grouped(**told))
        actual = run(start_again(wrapped, state), step)
    assert_same(expected, actual)
    plan = planner.plan_of(wrapped)
    assert plan.offloading.values if asked else plan.recomputations, "it stays as it is: the case tests nothing"


def one_step(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    loss = model(data() if x is None else x)
    loss.backward()
    return [loss]


@pytest.mark.parametrize("case", tiered(CASES, quick=QUICK))
def test_one_step(case: str) -> None:
    assert_exact(CASES[case], one_step, SHARES.get(case, "75%"))


CAPTURED = [case for case in CASES if case not in ("lstm", "gru")]
"""What is to wait on the host is planned in graphs."""


@pytest.mark.parametrize("case", tiered(CAPTURED, quick=("native dropout", "in place")))
def test_offload(case: str) -> None:
    assert_exact(CASES[case], one_step, "90%", offload=True, offload_at_least=1, policy=lambda operation: "offload")


@pytest.mark.parametrize("dtype", tiered([torch.bfloat16, torch.float16], quick=[torch.bfloat16]))
@pytest.mark.parametrize("case", tiered(AUTOCAST, quick=["batch norm"]))
def test_autocast(case: str, dtype: torch.dtype) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(data())
        loss.backward()
        return [loss]

    assert_exact(CASES[case], step, IN_16_BITS)


@pytest.mark.slow
def test_low_precision_dropout() -> None:
    in_16_bits = lambda: CASES["native dropout"]().bfloat16()  # noqa: E731
    assert_exact(in_16_bits, lambda model: one_step(model, data().bfloat16()), IN_16_BITS)


def accumulates(model: nn.Module) -> list[torch.Tensor]:
    return [*one_step(model), *one_step(model, data() * 0.5)]


def runs_twice_before_a_backward(model: nn.Module) -> list[torch.Tensor]:
    loss = model(data()) + 3.0 * model(data() * 0.5)
    loss.backward()
    return [loss]


def retains_its_graph(model: nn.Module) -> list[torch.Tensor]:
    model(data()).backward()  # what this one lets go of, the next may keep
    loss = model(data())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    return [loss, *first]


def trains(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses += one_step(model)
        optimizer.step()
    return [*losses, *model.parameters()]


def differentiates_its_input(model: nn.Module) -> list[torch.Tensor]:
    x = data().requires_grad_()
    return [*one_step(model, x), x.grad]


def differentiates_some_parameters(model: nn.Module) -> list[torch.Tensor]:
    loss = model(data())
    return [loss, *torch.autograd.grad(loss, list(model.parameters())[::2])]


DROPPING, NORMED = "native dropout", "batch norm"
LOOPS: dict[Step, tuple[str, ...]] = {
    accumulates: (DROPPING, NORMED, "mutated buffer"),
    runs_twice_before_a_backward: (DROPPING, NORMED),
    retains_its_graph: (DROPPING, NORMED),
    trains: (DROPPING, NORMED),
    differentiates_its_input: (DROPPING,),
    differentiates_some_parameters: (DROPPING,),
}


@pytest.mark.parametrize(
    ("loop", "case"),
    tiered(
        [(loop, case) for loop, cases in LOOPS.items() for case in cases],
        slow=[(loop, NORMED) for loop in (accumulates, retains_its_graph, trains)],
    ),
)
def test_loops(loop: Step, case: str) -> None:
    alone = loop is retains_its_graph  # no model whose graph another backward has let go
    assert_exact((lambda: CASES[case]()) if alone else CASES[case], loop)


class TwoHeads(
    Layers,
    body=lambda: nn.Sequential(*(BLOCKS["native dropout"]() for _ in range(2))),
    left=linear(WIDTH, 4),
    right=linear(WIDTH, 4),
):
    """A body with two heads, whose outputs a loss may or may not use."""

    scalar = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        left, right = self.left(y), self.right(y)
        return {"loss": left.square().mean(), "right": right} if self.scalar else {"left": left, "right": right}


def test_parameters_of_an_unused_output_stay_without_gradient() -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for count in (ROWS, ROWS - 6, ROWS):
            loss = model(data(count))["left"].square().mean()
            loss.backward()
            losses.append(loss)
        assert model.right.weight.grad is None and model.right.bias.grad is None
        assert model.left.weight.grad is not None
        return losses

    assert_exact(TwoHeads, step)


def test_each_output_of_a_kept_graph_has_a_backward_of_its_own() -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        outputs = model(data())
        outputs["left"].square().mean().backward(retain_graph=True)
        assert model.right.weight.grad is None
        outputs["right"].square().mean().backward()
        return list(outputs.values())

    assert_exact(lambda: TwoHeads(scalar=False), step)


class Alike(Layers, body=wide, norm=lambda: nn.LayerNorm(WIDTH)):
    """Computes two outputs alike: in eager they are two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return self.norm(y), self.norm(y)


def test_outputs_that_are_computed_alike_stay_apart() -> None:
    model, x = Alike(), torch.randn(ROWS, WIDTH)
    wrap_and_hold(
        model, (x,), loss_fn=lambda both: both[0].square().mean() + both[1].square().sum(), activation_budget="80%"
    )
    one, other = model(x)
    one.data.zero_()
    assert other.any()


def test_an_output_beside_the_loss_still_has_its_gradient() -> None:
    torch.manual_seed(5)
    eager, wrapped = beside(TwoHeads(scalar=True), activation_budget="60%", time_limit_seconds=1.0)

    def step(model: nn.Module) -> list[torch.Tensor]:
        outputs = model(data())
        (outputs["loss"] + outputs["right"].square().mean()).backward()
        return [outputs["loss"], outputs["right"]]

    for is_first in (True, False):  # then it is planned with both outputs: no warning
        with pytest.warns(UserWarning, match="second time") if is_first else nullcontext():
            found = run(wrapped, step)
        expected = run(eager, step)
        assert torch.equal(found["random state"], expected["random state"])
        for name, value in expected.items():
            if name.startswith("gradient"):
                torch.testing.assert_close(found[name], value)
        wrapped.zero_grad(), eager.zero_grad()


def test_only_the_loss_is_differentiated_beside_other_outputs() -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        outputs = model(data())
        outputs["loss"].backward()
        assert outputs["right"].requires_grad
        assert model.right.weight.grad is None
        return [outputs["loss"], outputs["right"]]

    assert_exact(lambda: TwoHeads(scalar=True), step)


def test_double_backward_is_refused() -> None:
    _, model, state = plain_and_wrapped(CASES["native dropout"], "60%")
    loss = start_again(model, state)(data())
    with pytest.raises(RuntimeUnsupportedError, match=r"differentiated twice.*runtime='modules'"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_evaluation_and_no_grad_run_the_model_as_it_is() -> None:
    eager, model, state = plain_and_wrapped(CASES["native dropout"], "60%")
    start_again(eager, state)
    one_step(start_again(model, state))
    model.eval(), eager.eval()
    with torch.no_grad():
        assert torch.equal(model(data()), eager(data()))
    with torch.inference_mode():
        assert torch.equal(model(data()), eager(data()))
    loss, expected = model(data()), eager(data())
    assert torch.equal(loss, expected)
    loss.backward()
    model.train(), one_step(model)
