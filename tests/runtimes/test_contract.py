"""One contract for steps of all kinds: peaks on device and host to the byte as predicted, all bits those of eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import UnsupportedModelError
from planner.plans.module_choices import modules_of
from planner.plans.plan import Plan
from tests import models
from tests.runtimes import test_modules
from tests.runtimes.steps import hold_peak, step, wrap_and_hold, wrap_and_hold_under_autocast
from tests.runtimes.test_offload import ChannelsLast, perceptrons
from tests.tiers import tiered


class Mixed(test_modules.Stack):
    """Autocast, and some parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].inner[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Factored(models.Layers, first=models.linear(256, 256), second=models.linear(256, 8)):
    """A Cholesky factor, whose check for errors is an operator with an effect: a token orders it among others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = self.second(self.first(x).tanh())
        return torch.linalg.cholesky(points @ points.T + torch.eye(len(x))).diagonal().log().sum()


class Tied(models.Stack):
    """One weight in the first block and in the last, between which others run."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[3][3].weight = self.blocks[0][3].weight


class ConvolutionsOutside(
    models.Layers,
    start=lambda: nn.Conv2d(32, 32, 1),
    blocks=lambda: nn.Sequential(*(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(3))),
    end=lambda: nn.Conv2d(32, 32, 1),
):
    """A convolution before and after the blocks, whose weights autocast copies; the backward needs the copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.blocks(self.start(x))).float().square().mean()


# Sparse tensors: a captured graph cannot hold them, checkpointed modules plan around them.


def _layers(width: int = 128) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))


class SparseEmbedding(models.Layers, table=lambda: nn.Embedding(100, 128, sparse=True), layers=_layers):
    """A table whose gradient is sparse; where the table is used twice, autograd turns it dense."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.table(words))
        return (y @ self.table.weight.T if self.is_tied else y).logsumexp(-1).mean()


class Graph(models.Layers, layers=_layers):
    """Passes messages between neighbours, through a sparse matrix that the forward may make itself."""

    makes_it = False

    def forward(self, neighbours: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.makes_it:
            where = neighbours.nonzero().T
            neighbours = torch.sparse_coo_tensor(where, torch.ones(where.shape[1]), neighbours.shape).coalesce()
        for layer in self.layers:
            x = layer(torch.sparse.mm(neighbours, x))
        return x.square().mean()


WORDS, NODES = torch.randint(100, (16, 64)), torch.randn(256, 128)
NEIGHBOURS = torch.eye(256).roll(1, 0) + torch.eye(256)


# Blocks with eager PyTorch around them.


class Normed(nn.Module):
    """Convolutions with running statistics; the backward of a block frees the gradient that it is given."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))  # noqa: E731
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.layers = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.stem(x)).mean((2, 3)))
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


class Decoding(
    models.Layers, own=models.linear(models.WIDTH, models.WIDTH), other=models.linear(models.WIDTH, models.WIDTH)
):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) * torch.sigmoid(self.other(memory)))


class Shared(
    models.Layers,
    encoder=lambda: nn.ModuleList(nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH)) for _ in range(2)),
    decoder=lambda: nn.ModuleList(Decoding() for _ in range(3)),
    tied=models.linear(models.WIDTH, models.WIDTH),
):
    """What one block returns goes to several, so autograd adds gradients up; a tied layer stands outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = x, self.tied(x)
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        for layer in self.decoder:
            y = layer(y, memory)
        return self.tied(y).square().mean()


class Passing(models.OneLinear):
    def forward(self, x: torch.Tensor, total: torch.Tensor, passes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x)), total if passes else total + 1


class Twice(models.Layers, layers=lambda: nn.ModuleList(Passing() for _ in range(3))):
    """A block that is called twice, and one that returns what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 0, 1):
            x, _ = self.layers[number](x, x.sum(), False)
        x, total = self.layers[2](x, x.sum(), True)
        return (x * total).square().mean()


class Positions(
    models.Layers,
    table=lambda: nn.Buffer(torch.randn(1024, models.WIDTH)),
    layers=lambda: nn.ModuleList(Decoding() for _ in range(3)),
):
    """Blocks that are given a part of a buffer, as rotary positions are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.table[: len(x)])
        return x.square().mean()


# Parts of a model that cannot be captured whole.


class Looks(nn.Module):
    """Two halves, and between them a look at a number that is known only when the forward runs."""

    def __init__(self, half: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = half(), half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x * 2.0 if models.looked_at(self, x) > 0 else x * 3.0
        return models.mean_square(self.second(x))


class Ignores(models.Layers, blocks=lambda: nn.ModuleList(models.perceptron() for _ in range(3))):
    """What the last of its blocks returns is in no loss, and lives until the forward ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        ignored = self.blocks[-1](x)
        if self.looks:
            return models.mean_square(x * 2.0 if models.looked_at(self, ignored) > 0 else x * 3.0)
        return models.mean_square(x) + 0.0 * ignored.detach().mean()


class TwoWays(
    models.Layers,
    wide=models.linear(models.WIDTH, 1024),
    narrow=models.linear(1024, 256),
    other=models.linear(models.WIDTH, models.WIDTH),
):
    """Returns two tensors, by weights of their own; the backward of the first is widest after its gradient was read."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.narrow(self.wide(x).tanh().exp()), self.other(x).tanh()


class UsesOne(models.Layers, body=TwoWays):
    """Looks at a number, and uses one of two results: a gradient is held where another does not come."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used, _unused = self.body(x)
        return models.mean_square(used * 2.0 if models.looked_at(self, used) > 0 else used * 3.0)


class Batch:
    """What a library for graphs passes about: a tensor is in it somewhere."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class TakesBatch(models.Stack):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch.x)


# The table.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step, what is asked for it, and what a plan of it must use."""

    build: Callable[[], nn.Module]
    x: Any
    ask: dict[str, Any]
    uses: Callable[[Plan], Any] = lambda plan: plan.recompute_seconds > 0
    from_file: bool = False
    """Whether the plan is made before and read from its file."""
    under_autocast: bool = False
    """Whether the training loop calls the model under autocast, and the backward outside of it."""


def _case(way: str, build: Callable[[], nn.Module], x: Any, share: str | None, **more: Any) -> Case:
    """Return a case of one of the ways to need less memory; more than that is of the case, or asked for."""
    asked = {"time_limit_seconds": 0.5, "deterministic": True} | ({} if share is None else {"activation_budget": share})
    ask, uses = WAYS[way]
    fields = {name: more.pop(name) for name in ("uses", "from_file", "under_autocast") if name in more}
    return Case(build=build, x=x, ask={**asked, **ask, **more}, **{"uses": uses, **fields})


def _recomputes(plan: Plan) -> bool:
    return plan.recompute_seconds > 0


WAYS: dict[str, tuple[dict[str, Any], Callable[[Plan], Any]]] = {
    "graph": ({"runtime": "graph"}, _recomputes),
    "modules": ({"runtime": "modules"}, modules_of),
    "selective": ({"runtime": "modules"}, lambda plan: set(plan.kept) & set(modules_of(plan))),
    "offload": ({"runtime": "graph", "offload": True}, lambda plan: plan.offloading.values),
    "offload, blocks": ({"runtime": "regional", "offload": True}, lambda plan: plan.offloading.values),
    "offload, parts": ({"runtime": "parts", "offload": True}, lambda plan: plan.offloading.values),
    "regional": ({"runtime": "regional"}, _recomputes),
    "parts": ({"runtime": "parts"}, _recomputes),
    "auto": ({}, lambda plan: plan.runtime in ("modules", "parts") and plan.overhead > 0),
}
"""What is asked for, and what of it a plan must use."""


def _nothing(plan: Plan) -> bool:
    return plan.recompute_seconds == 0


def _plans(blocks: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.fingerprint["blocks"] == blocks


def _halves() -> nn.Module:
    return Looks(lambda: nn.Sequential(*(models.perceptron(dropout=0.2) for _ in range(2))))


def _two_captured_halves(plan: Plan) -> bool:
    said = [warning.evidence for warning in plan.warnings if warning.rule == "captured-share"]
    return bool(plan.recomputations) and _plans("first second")(plan) and any("2 modules" in one for one in said)


_FILED = {"from_file": True}
_CAST = {"under_autocast": True, "budget": "85%"}
IMAGES, TABLE = torch.randn(8, 3, 16, 16), torch.randn(256, models.WIDTH)
LSTM = models.rows().unflatten(0, (8, 32))

CASES: dict[str, Case] = {
    # Modules that run again, or keep.
    "keywords and tuples": _case("modules", test_modules.Stack, models.rows(), "70%", **_FILED),
    "branches": _case("modules", test_modules.Branching, models.rows(), "70%", **_FILED),
    "autocast and frozen": _case("modules", Mixed, models.rows(), "70%", **_FILED),
    "batch norm in place": _case("modules", models.Convolutions, models.images(), "70%", **_FILED),
    "lstm": _case("modules", partial(models.Recurrent, 3), LSTM, "80%", **_FILED),
    "kept": _case("selective", partial(models.Transformer, 2), models.SEQUENCES, "65%", **_FILED),
    "kept, cast": _case("selective", partial(models.Transformer, 2, cast=True), models.SEQUENCES, "85%", **_FILED),
    "offload, dropout": _case("offload", perceptrons, models.rows(1024, 128), "48%", **_FILED),
    "offload, blocks": _case("offload, blocks", perceptrons, models.rows(1024, 128), "60%"),
    "offload, parts": _case("offload, parts", _halves, models.rows(), "70%", offload_at_least=1),
    "offload, channels last": _case("offload", ChannelsLast, models.images(8, 3, 64), "60%", **_FILED),
    "no gradient comes back": _case("modules", test_modules.Detached, models.rows(512), "100%", uses=_nothing),
    # Weights that autocast around the call has cast are kept no longer than the call.
    "modules under autocast": _case("modules", models.Stack, models.rows(512), None, **_CAST),
    "modules under autocast, tied": _case("modules", Tied, models.rows(512), None, **_CAST),
    "modules under autocast, images": _case("modules", models.Convolutions, models.images(), None, **_CAST),
    # Copies of weights that autocast makes outside of blocks are counted.
    **{
        f"copies of weights, {way}": _case(
            way, ConvolutionsOutside, torch.randn(8, 32, 8, 8), "200%", cost_model="roofline", uses=_nothing,
            under_autocast=True,
        )
        for way in ("regional", "parts")
    },
    # Sparse tensors.
    "sparse gradient": _case("auto", partial(SparseEmbedding, is_tied=False), (WORDS,), "75%"),
    "sparse and dense gradient": _case("auto", partial(SparseEmbedding, is_tied=True), (WORDS,), "75%"),
    "sparse input": _case("auto", Graph, (NEIGHBOURS.to_sparse(), NODES), "75%"),
    "compressed rows": _case("auto", Graph, (NEIGHBOURS.to_sparse_csr(), NODES), "75%"),
    "sparse matrix of its own": _case("auto", partial(Graph, makes_it=True), (NEIGHBOURS, NODES), "75%"),
    # Blocks.
    "blocks, batch norm": _case("regional", Normed, IMAGES, "90%"),
    "blocks, shared results": _case("regional", Shared, TABLE, "100%", uses=_nothing),
    "blocks called twice": _case("regional", Twice, TABLE, "100%", uses=_nothing),
    "blocks, part of a buffer": _case("regional", Positions, TABLE, "90%", uses=_plans("layers.0 layers.1 layers.2")),
    "blocks, ignored result": _case(
        "regional", partial(Ignores, looks=False), models.rows(512), "90%", uses=_plans("blocks.0 blocks.1")
    ),
    # Parts.
    "halves": _case("parts", _halves, models.rows(), "50%", uses=_two_captured_halves, **_FILED),
    "parts, ignored result": _case(
        "parts", partial(Ignores, looks=True), models.rows(512), "90%", uses=_plans("blocks.0 blocks.1")
    ),
    "parts, one of two": _case("parts", UsesOne, models.rows(), "100%", uses=lambda plan: plan.runtime == "parts"),
    # Inputs that are objects, and operators with effects: no token of one stands for a parameter's gradient.
    "objects": _case("graph", partial(TakesBatch, 3), (Batch(models.rows()),), "80%"),
    "objects, modules": _case("modules", partial(TakesBatch, 3), (Batch(models.rows()),), "80%"),
    "tokens of effects": _case(
        "graph", Factored, models.rows(64, 256), "100%",
        uses=lambda plan: plan.anatomy["gradients"] < 1.01 * 4 * (256 * 256 + 256 + 256 * 8 + 8),
    ),
}  # fmt: skip
SLOW = (
    "objects, modules", "blocks, shared results", "sparse and dense gradient", "compressed rows", "sparse input",
    "modules under autocast, images", "modules under autocast, tied", "branches", "batch norm in place", "kept, cast",
    "offload, channels last", "copies of weights, parts", "sparse matrix of its own", "parts, ignored result",
    "blocks called twice",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:data decide what", "ignore:.* instead of", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize("name", tiered(CASES, slow=SLOW))
def test_what_is_predicted_happens(name: str) -> None:
    case = CASES[name]
    model = case.build()
    if case.under_autocast:
        ran = wrap_and_hold_under_autocast(model, case.x, **case.ask)
    elif case.from_file:
        plan = planner.plan(model, case.x, **grouped(compare=False, **case.ask))
        read = Plan.from_json(plan.to_json())
        assert read == replace(plan, operations=())
        ran = wrap_and_hold(model, case.x, plan=read, rounded=case.ask["runtime"] == "graph")
        assert (getattr(ran.offloading, "values", ()), ran.kept) == (getattr(plan.offloading, "values", ()), plan.kept)
        assert "workspace-unknown" not in {warning.rule for warning in plan.warnings}
    else:
        ran = wrap_and_hold(model, case.x, **case.ask)
    assert case.uses(ran)


@pytest.mark.filterwarnings("ignore:data decide what")
@pytest.mark.parametrize("is_held", [False, True])
def test_a_sparse_gradient_is_copied_where_autograd_copies_it(is_held: bool) -> None:
    model, held = nn.Sequential(nn.Embedding(100, 128, sparse=True), nn.Linear(128, 1)), []
    if is_held:
        model[0].weight.register_hook(lambda gradient: held.append(gradient))
    planner.auto_wrap(model, budget=planner.Budget(activations="100%"), runtime="modules", loss_fn=torch.mean)
    step(model, WORDS, torch.mean)
    hold_peak(model, WORDS, loss_fn=torch.mean)


def test_what_makes_a_graph_impossible_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"test_contract.py:\d+\) makes a sparse tensor"):
        planner.plan(SparseEmbedding(is_tied=False), WORDS, budget=planner.Budget(activations="75%"), runtime="graph")
