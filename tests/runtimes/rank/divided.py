"""Scenarios in which ranks divide the work on a batch: layers, experts, and attention over a divided sequence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import planner
from planner.common.options import grouped
from planner.plans.module_choices import modules_of
from tests.models import Layers, linear, perceptron
from tests.runtimes.rank import common
from tests.runtimes.rank.common import IN_16_BITS, QUICK, RANKS, ROWS, data, fully_sharded, gradients, live, make, step

WIDTH, HEADS, EXPERTS = 32, 2, 4


class Exchange(torch.autograd.Function):
    """All to all by ``torch.distributed``'s own call, which names no operator that declares what it writes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(x.shape)
        dist.all_to_all_single(made, x.contiguous())
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made = gradient.new_empty(gradient.shape)
        dist.all_to_all_single(made, gradient.contiguous())
        return made


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """All to all by a functional collective."""
    made: torch.Tensor = functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
    return made


class DividedAttention(
    Layers, norm=lambda: nn.LayerNorm(WIDTH), qkv=linear(WIDTH, 3 * WIDTH), out=linear(WIDTH, WIDTH)
):
    """Attention of which each of two ranks has half of the sequence before and after, and half of the heads within."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, 3, 2, HEADS // 2, -1).permute(3, 1, 0, 2, 4, 5)
        q, k, v = self.exchange(qkv.contiguous()).flatten(0, 1).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).unflatten(0, (2, length))
        return self.out(self.exchange(mixed.contiguous()).permute(2, 1, 0, 3, 4).reshape(rows, length, WIDTH))


def experts(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(EXPERTS, rows, columns) / rows**0.5)


class Experts(Layers, up=partial(experts, WIDTH, 4 * WIDTH), down=partial(experts, 4 * WIDTH, WIDTH)):
    """The experts of one rank, or all of them; rows come sorted by expert."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if hasattr(p, "to_local") else p for p in (self.up, self.down))
        rows = x.split(counts.tolist())
        return torch.cat([F.silu(some @ up[index]) @ down[index] for index, some in enumerate(rows)])


class Routed(Layers, gate=linear(WIDTH, EXPERTS), experts=Experts):
    """A router, and experts for the rows that it sends to each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        share, expert = self.gate(rows).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, expert, torch.ones_like(expert))
        made = self.experts(rows[order], counts) * share[order, None]
        return torch.zeros_like(rows).index_add(0, order, made).view_as(x)


class DividedExperts(ParallelStyle):
    """Gives each rank some experts, and sends them their rows, as torchtitan's ``ExpertParallel`` does."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._divided, self._dispatched, self._combined)

    @staticmethod
    def _divided(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _dispatched(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        x, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            arriving = functional.wait_tensor(functional.all_to_all_single(counts, None, None, group))
        by_rank = arriving.view(ranks, -1)
        self._sends, self._receives = counts.view(ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        x = functional.all_to_all_single_autograd(x, self._receives, self._sends, group)
        places = torch.arange(len(x)).split(arriving.tolist())
        own = by_rank.shape[1]
        self._order = torch.cat([places[rank * own + expert] for expert in range(own) for rank in range(ranks)])
        return x[self._order], by_rank.sum(0)

    def _combined(self, _module: nn.Module, made: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        order = self._order
        del self._order
        back = torch.empty_like(made).index_copy(0, order, made)
        sent: torch.Tensor = functional.all_to_all_single_autograd(back, self._sends, self._receives, mesh.get_group())
        return sent


class Block(Layers, alone=partial(perceptron, WIDTH)):
    """What exchanges, and a part that does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.part(x)
        return x + self.alone(x)


class Model(nn.Module):
    """Such blocks and a loss."""

    def __init__(self, part: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(part=part()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def with_divided_experts(mesh: DeviceMesh, depth: int = 3) -> Model:
    """Make a model whose experts are divided over a mesh."""
    model = Model(Routed, depth)
    for block in model.blocks:
        parallelize_module(block.part.experts, mesh, DividedExperts())
    return model


def tokens(seed: int) -> torch.Tensor:
    """Return one rank's inputs."""
    return torch.randn(4, 128, WIDTH, generator=torch.Generator().manual_seed(seed))


def tensor_parallel(_rank: int) -> dict[str, Any]:
    """Plan a parallel model at its first step, and hold it against the same without a plan."""
    graph = common.refused(
        lambda: step(planner.auto_wrap(common.parallel(make()), budget="75%", runtime="graph"), data(0))
    )
    return common.beside_plain(lambda: common.parallel(make()), data(0), ROWS) | {"refused": graph}


def two_meshes(_rank: int) -> dict[str, Any]:
    """Shard over two of four ranks a model whose layers the other two share, and one of which they have copies."""
    layers = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("shard", "layers"))
    copies = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("copy", "shard"))

    def with_shared_layers() -> nn.Module:
        model = make()
        for block in model.blocks:
            parallelize_module(block, layers["layers"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
        return fully_sharded(model, mesh=layers["shard"])

    rows = ROWS - 100 * layers.get_local_rank("shard")
    return {
        "layers": common.beside_plain(with_shared_layers, data(layers.get_local_rank("shard")), rows),
        "copies": common.beside_plain(
            lambda: fully_sharded(make(), mesh=copies, mp_policy=IN_16_BITS),
            data(copies.get_local_rank("shard")),
            rows,
        ),
    }


def divided_experts(rank: int) -> dict[str, Any]:
    """Train a model whose experts are divided, and whose ranks therefore have other sizes; also with other batches."""
    mesh, small = init_device_mesh("cpu", (RANKS,)), {**QUICK, "activation_budget": "50%"}
    alone, x = with_divided_experts(mesh), tokens(rank)
    others = live()
    others.pop(x.untyped_storage().data_ptr())
    with warnings.catch_warnings(record=True, action="always") as said:
        peak, running = common.peak_of(
            lambda: planner.auto_wrap(with_divided_experts(mesh), **grouped(**small)), x, others
        )
        plan = planner.plan_of(running)
        equal = []
        for seed in (rank, 2 + rank, 4 + rank, 6 + rank):
            step(running, tokens(seed)), step(alone, tokens(seed))
            equal.append(common.same(gradients(running), gradients(alone)))
    tight = with_divided_experts(mesh, 1)
    budget = {**QUICK, "activation_budget": "1%" if rank else "75%", "outputs": "held"}
    return common.reported(plan, {}, {}, peak) | {
        "equal": all(equal),
        "modules": modules_of(plan),
        "said": [str(one.message) for one in said],
        "tight": common.refused(lambda: step(planner.auto_wrap(tight, **grouped(**budget)), x)),
    }


def divided_sequence(rank: int) -> dict[str, Any]:
    """Train a model whose attention exchanges tokens by functional collectives."""
    return {"functional, graph": exchanging(rank, exchanged, "graph")}


def divided_sequence_in_more_ways(rank: int) -> dict[str, Any]:
    own = Exchange.apply
    return {
        "functional, modules": exchanging(rank, exchanged, "modules"),
        "in place, regional": exchanging(rank, own, "regional"),
        "in place, parts": exchanging(rank, own, "parts"),
    }


def exchanging(rank: int, exchange: Callable[[torch.Tensor], torch.Tensor], runtime: str) -> dict[str, Any]:
    small = {**QUICK, "activation_budget": "85%"}
    made, x = partial(Model, partial(DividedAttention, exchange=exchange)), tokens(rank)
    alone, others = made(), live()
    others.pop(x.untyped_storage().data_ptr())
    step(alone, x)
    peak, running = common.peak_of(lambda: planner.auto_wrap(made(), **grouped(runtime=runtime, **small)), x, others)
    plan = planner.plan_of(running)
    again = [key for keys in plan.recomputations.values() for key in keys]
    exchanges = [key for key in again if "all_to_all" in key or "c10d" in key]
    modules = modules_of(plan) if runtime == "modules" else ()
    return common.reported(plan, gradients(running), gradients(alone), peak, exchanges=exchanges, modules=modules)
