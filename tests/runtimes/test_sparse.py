"""Sparse tensors: a captured graph cannot hold them, checkpointed modules plan around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import UnsupportedModelError
from tests.runtimes.steps import hold_peak, step, wrap_and_hold

WIDTH = 128


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


class Embedding(nn.Module):
    """A table whose gradient is sparse; autograd turns it dense here, since the table is used twice."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(100, WIDTH, sparse=True), _layers()
        self.is_tied = is_tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.table(words))
        return (y @ self.table.weight.T if self.is_tied else y).logsumexp(-1).mean()


class Graph(nn.Module):
    """Passes messages between neighbours, through a sparse matrix that the forward makes."""

    def __init__(self, is_made_here: bool) -> None:
        super().__init__()
        self.layers, self.is_made_here = _layers(), is_made_here

    def forward(self, neighbours: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        matrix = neighbours
        if self.is_made_here:
            where = neighbours.nonzero().T
            matrix = torch.sparse_coo_tensor(where, torch.ones(where.shape[1]), neighbours.shape).coalesce()
        for layer in self.layers:
            x = layer(torch.sparse.mm(matrix, x))
        return x.square().mean()


WORDS, NODES = torch.randint(100, (16, 64)), torch.randn(256, WIDTH)
NEIGHBOURS = torch.eye(256).roll(1, 0) + torch.eye(256)

CASES = [
    pytest.param(Embedding(is_tied=False), (WORDS,), id="sparse gradient"),
    pytest.param(Embedding(is_tied=True), (WORDS,), id="sparse and dense gradient"),
    pytest.param(Graph(is_made_here=False), (NEIGHBOURS.to_sparse(), NODES), id="sparse input"),
    pytest.param(Graph(is_made_here=False), (NEIGHBOURS.to_sparse_csr(), NODES), id="compressed rows"),
    pytest.param(Graph(is_made_here=True), (NEIGHBOURS, NODES), id="made in the forward"),
]


@pytest.mark.filterwarnings("ignore:runtime .* in place of 'graph'", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize(("model", "inputs"), CASES)
def test_steps_keep_the_plan_and_eagers_bits(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    plan = wrap_and_hold(model, inputs, activation_budget="75%")
    assert plan.runtime in ("modules", "parts")
    assert plan.overhead > 0


@pytest.mark.filterwarnings("ignore:what .* runs depends on data")
@pytest.mark.parametrize("is_held", [False, True])
def test_a_sparse_gradient_is_copied_where_autograd_copies_it(is_held: bool) -> None:
    model, held = nn.Sequential(nn.Embedding(100, WIDTH, sparse=True), nn.Linear(WIDTH, 1)), []
    if is_held:
        model[0].weight.register_hook(lambda gradient: held.append(gradient))
    planner.auto_wrap(model, activation_budget="100%", runtime="modules", loss_fn=torch.mean)
    step(model, WORDS, torch.mean)
    hold_peak(model, WORDS, loss_fn=torch.mean)


def test_what_makes_a_graph_impossible_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"test_sparse.py:\d+\) makes a sparse tensor"):
        planner.plan(Embedding(is_tied=False), WORDS, activation_budget="75%", runtime="graph")
