"""Scenarios of data parallelism: DDP and FSDP2 in all ways in which plans know them, and what goes wrong there."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import planner
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from planner.plans.plan import Plan
from tests.runtimes.rank import common
from tests.runtimes.rank.common import FEW_ROWS, RANKS, ROWS, Model, data, gradients, live, make, same, step, wrap

NORM = {"blocks.0.rise|aten.mm.default|b1": ("blocks.0.norm|aten.native_layer_norm.default|f0",)}


def again_in(number: int) -> dict[str, tuple[str, ...]]:
    """Let a block recompute GELU."""
    return {f"blocks.{number}.fall|aten.mm.default|b1": (f"blocks.{number}|aten.gelu.default|f0",)}


def with_recompute(plan: Plan, again: dict[str, tuple[str, ...]]) -> Plan:
    return replace(plan, recomputations=again, budget_bytes=plan.baseline_peak_bytes - 1)


def first_gradient(model: nn.Module, x: torch.Tensor) -> tuple[float, int]:
    """Return which share of a backward's operations is over at the first gradient, and its gathers."""

    def note(_parameter: Any) -> None:
        with record_function("a gradient"):
            pass

    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in model.parameters()]
    step(model, x)
    model.zero_grad(set_to_none=True)
    loss = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    for hook in hooks:
        hook.remove()
    events = [e for e in seen.events() if e.name.startswith("aten::") or e.name == "a gradient"]
    events.sort(key=lambda e: e.time_range.start)
    first = next(i for i, e in enumerate(events) if e.name == "a gradient")
    gathers = sum(e.name.startswith("FSDP::all_gather (") for e in seen.events())
    return first / len(events), gathers


def mean_of_single_processes(rows: int = ROWS, depth: int = 2) -> dict[str, torch.Tensor]:
    alone = make(depth)
    single = []
    for rank in range(RANKS):
        step(alone, data(rank)[:rows])
        single.append(gradients(alone))
    return {name: (single[0][name] + single[1][name]) / 2 for name in single[0]}


def train(rank: int, way: str) -> dict[str, Any]:
    others = live()
    model, x = make(3), data(rank)
    wrap(model, rank, way, activation_budget="68%")
    # Block 0 recomputes GELU and LayerNorm, 1 GELU and 2 nothing.
    plan = with_recompute(planner.plan_of(model), NORM | again_in(0) | again_in(1))
    planner.auto_wrap(model, x, budget=plan, runtime="regional")
    plan = planner.plan_of(model)
    peak, running = common.peak_of(lambda: common.distributed(model, way), x, others)
    result = common.reported(plan, gradients(running), mean_of_single_processes(depth=3), peak)
    firsts = {"first": first_gradient(running, x), "eager_first": first_gradient(common.distributed(make(3), way), x)}
    return result | firsts


ddp, fsdp2 = partial(train, way="ddp"), partial(train, way="fsdp2")


def offload(rank: int, way: str) -> dict[str, Any]:
    """Let what blocks save wait on the host: each rank has places of its own."""
    others, model, x = live(), make(), data(rank)
    wrap(model, rank, way, activation_budget="68%", offload=True, offload_at_least=1)
    peak, running = common.peak_of(partial(common.distributed, model, way), x, others)
    return common.reported(planner.plan_of(model), gradients(running), mean_of_single_processes(), peak)


offloading, offloading_under_ddp = partial(offload, way="fsdp2"), partial(offload, way="ddp")


def compiled_blocks(rank: int) -> dict[str, Any]:
    """Hold a model whose blocks are compiled by their own ``compile()`` to the same in eager, under DDP and FSDP2.

    In float64: of a norm's mean square, which hardly moves, gradients in float32 are off by a thousandth in eager too.
    """
    offload = {"offload": True, "offload_at_least": 1}
    found = {way: _compiled_blocks(rank, way) for way in ("ddp", "fsdp2")}
    return found | {f"{way}, offload": _compiled_blocks(rank, way, **offload) for way in ("ddp", "fsdp2")}


def _compiled_blocks(rank: int, way: str, **more: Any) -> dict[str, Any]:
    plain = common.distributed(make().double(), way)
    step(plain, data(rank).double())
    expected = gradients(plain)
    del plain
    others, model, x = live(), make().double(), data(rank).double()
    for block in model.blocks:
        block.compile()
    planner.auto_wrap(model, **grouped(**common.QUICK | {"activation_budget": "66%"} | more))
    peak, running = common.peak_of(lambda: common.distributed(model, way), x, others)
    found = gradients(running)
    off = max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)
    return common.reported(planner.plan_of(model), found, expected, peak, off=off)


def sharded_first(rank: int) -> dict[str, Any]:
    """Wrap a model that is sharded already, made on the meta device, in 16 bits."""
    return {"16 bits": _sharded_first(rank, {"mp_policy": common.IN_FLOAT32}, {}, larger=False)}


def sharded_first_in_more_ways(rank: int) -> dict[str, Any]:
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "own": ({}, {}),
        "16 bits, larger": ({"mp_policy": common.IN_FLOAT32}, {}),
        "all 16 bits": ({"mp_policy": common.IN_16_BITS}, {}),
        "kept": ({"reshard_after_forward": False}, {}),
        "never kept": ({"reshard_after_forward": True}, {}),
        "modules": ({}, {"runtime": "modules"}),
        "inside": ({"inside": True}, {}),
    }
    return {name: _sharded_first(rank, *options, larger=name in common.LARGER) for name, options in ways.items()}


def _sharded_first(rank: int, shard: dict[str, Any], wrap: dict[str, Any], *, larger: bool) -> dict[str, Any]:
    inside = shard.pop("inside", False)
    depth = 4 if inside else 2

    def sharded() -> nn.Module:
        with torch.device("meta"):
            empty = Model(depth)
        if inside:  # two layers, each of which has two blocks that are sharded by themselves
            empty.blocks = nn.ModuleList(nn.Sequential(*empty.blocks[at : at + 2]) for at in (0, 2))
        parts = [part for pair in empty.blocks for part in pair] if inside else []
        for unit in (*parts, *empty.blocks, empty):
            fully_shard(unit, **{"mesh": mesh, **shard})
        model = empty.to_empty(device="cpu")
        model.load_state_dict({n: distribute_tensor(v, mesh) for n, v in state.items()})
        return model

    def wrapped() -> nn.Module:
        return planner.auto_wrap(sharded(), **grouped(**common.QUICK, **wrap))

    mesh = init_device_mesh("cpu", (RANKS,))
    state, others, x = make(depth).state_dict(), live(), data(rank)
    if inside:
        state = {
            re.sub(r"blocks\.(\d)", lambda at: f"blocks.{int(at[1]) // 2}.{int(at[1]) % 2}", n): v
            for n, v in state.items()
        }
    others |= {p.untyped_storage().data_ptr(): p.untyped_storage() for p in state.values()}
    peak, model = common.peak_of(wrapped, x, others)
    plan, plain = planner.plan_of(model), sharded()
    step(plain, x)
    result = common.reported(plan, gradients(model), gradients(plain), peak)
    if larger:
        x = torch.cat([x, x])
        step(model, x), step(plain, x)
        result["larger_equal"] = same(gradients(model), gradients(plain))
    return result


class WithLogits(Model):
    """Returns its loss beside logits, as models of Hugging Face do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.start(self.norm(x)).repeat(1, 8)
        return F.cross_entropy(logits, torch.arange(len(x))), logits


def observe(rank: int, held: str, dropped: str) -> dict[str, Any]:
    """Train a model whose logits the first rank holds, or all drop, with an optimizer that nobody names."""
    return {"held": _observed(rank, held, True), "dropped": _observed(rank, dropped, False)}


observed = partial(observe, held="fsdp2", dropped="ddp")
observed_in_other_ways = partial(observe, held="ddp", dropped="fsdp2")


def _observed(rank: int, way: str, are_held: bool) -> dict[str, Any]:
    optimizers: list[torch.optim.Optimizer] = []

    def made() -> Model:
        torch.manual_seed(0)
        return WithLogits(2)

    def distributed(model: Model) -> nn.Module:
        running = common.distributed(model, way)
        optimizers.append(torch.optim.AdamW(running.parameters()))
        return running

    def train(model: nn.Module, x: torch.Tensor) -> None:
        optimizers[-1].zero_grad()
        loss, logits = model(x)
        if not (are_held and rank == 0):
            del logits
        loss.backward()
        optimizers[-1].step()

    others, model, x = live(), made(), data(rank)
    planner.auto_wrap(model, budget="80%", runtime="regional", search=planner.Search(deterministic=True))
    peak, running = common.peak_of(lambda: distributed(model), x, others, train)
    plain = distributed(made())
    for _ in range(int(optimizers[0].state_dict()["state"][0]["step"])):
        train(plain, x)
    seen = planner.status(model).observed
    return common.reported(planner.plan_of(model), gradients(running), gradients(plain), peak, seen=seen)


def last_batch(rank: int) -> dict[str, Any]:
    """Give a sharded model a smaller batch than it was planned for, and a larger one."""
    model, x = make(), data(rank)
    wrap(model, rank, "fsdp2", activation_budget="68%")
    plan, running = planner.plan_of(model), common.distributed(model, "fsdp2")
    step(running, x)
    step(running, x[:100])
    is_same = planner.plan_of(model) == plan
    result = common.reported(plan, gradients(running), mean_of_single_processes(100), same_plan=is_same)
    step(running, torch.cat([x, x]))
    return result | {"larger_rows": 2 * ROWS, "planned_for": planner.plan_of(model).fingerprint["inputs"]}


def saved(rank: int) -> dict[str, Any]:
    """Save a planned model and its optimizer as torch.distributed.checkpoint does, and go on with what was saved."""
    folder, x = Path(sys.argv[2]) / "checkpoint", data(rank)

    def made(*, planned: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = common.distributed(make(), "fsdp2")
        if planned:
            planner.auto_wrap(model, **grouped(**common.QUICK))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        step(model, x)
        optimizer.step()
        return gradients(model)

    plain, planned = made(planned=False), made(planned=True)
    for model, optimizer in (plain, planned):
        trained(model, optimizer)
    model, optimizer = get_state_dict(*planned)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    expected, equal = trained(*plain), []
    for is_planned in (True, False):
        again = made(planned=is_planned)
        trained(*again)
        model, optimizer = get_state_dict(*again)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(*again, model_state_dict=model, optim_state_dict=optimizer)
        equal.append(same(trained(*again), expected))
    return {"equal": equal, "recomputed": len(planner.plan_of(planned[0]).recomputations)}


def shardings(rank: int) -> dict[str, Any]:
    """Shard in ways that plans do not count on, and keep gradients whole for a step: that is right, and said."""
    mesh = init_device_mesh("cpu", (RANKS,))
    both = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("copy", "shard"))
    expected, found = mean_of_single_processes(), {}
    ways: dict[str, dict[str, Any] | None] = {
        "kept": {"mesh": mesh, "reshard_after_forward": False},
        "copied": {"mesh": both},
        "offloaded": {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "whole": None,
        "prefetched": {"mesh": mesh},
        "unsent": {"mesh": mesh},
        "default": {"mesh": mesh},
    }
    plan = with_recompute(planner.plan_of(wrap(make(), rank, "fsdp2")), again_in(0) | again_in(1))
    for name, options in ways.items():
        model = planner.auto_wrap(make(), budget=plan, runtime="regional")
        for block in model.blocks if options is not None else ():
            fully_shard(block, **options)
        fully_shard(model, **{"mesh": mesh, **(options or {})})
        if name == "prefetched":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.set_requires_gradient_sync(name != "unsent")
        said = common.warnings_of(lambda model=model: model(data(rank)).backward())
        if name == "unsent":
            model.set_requires_gradient_sync(True)
            model(data(rank)).backward()
        times = 2 if name == "unsent" else 1
        found[name] = {"equal": same(gradients(model), {n: times * one for n, one in expected.items()}), "said": said}
    running: Any = common.with_ddp(wrap(make(), rank, "ddp"))
    running.register_comm_hook(None, allreduce_hook)  # which sends what DDP would
    said = common.warnings_of(lambda: running(data(rank)).backward())
    found["hook"] = {"equal": same(gradients(running), expected), "said": said}
    return found


def micro_batches(rank: int) -> dict[str, Any]:
    """Train by micro-batches in the ways in which most differs."""
    views = partial(common.with_ddp, gradient_as_bucket_view=True)
    in_units = partial(sharded_in_more_units, mesh=init_device_mesh("cpu", (RANKS,)))
    return {
        f"ddp, views, {FEW_ROWS} rows": by_micro_batches(rank, FEW_ROWS, views),
        f"fsdp2, more units, {ROWS} rows": by_micro_batches(rank, ROWS, in_units),
    }


def more_micro_batches(rank: int) -> dict[str, Any]:
    """Train by micro-batches in all ways, where gradients are most of what a step holds, and where they are least."""
    mesh = init_device_mesh("cpu", (RANKS,))
    views, sharded = partial(common.with_ddp, gradient_as_bucket_view=True), partial(common.fully_sharded, mesh=mesh)
    offloaded = partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
        "ddp": (common.with_ddp, {}),
        "ddp, views": (views, {}),
        "fsdp2": (sharded, {}),
        "fsdp2, each": (sharded, {"waits": False}),
        "fsdp2, 16 bits, ahead": (partial(sharded, mp_policy=common.IN_FLOAT32), {"ahead": True}),
        "fsdp2, 16 bits, each": (partial(sharded, mp_policy=common.IN_FLOAT32), {"waits": False}),
        "fsdp2, all 16 bits": (partial(sharded, mp_policy=common.IN_16_BITS), {}),
        "fsdp2, offloaded": (offloaded, {}),
        "fsdp2, offloaded, 16 bits": (partial(offloaded, mp_policy=common.IN_FLOAT32), {"waits": False}),
        "fsdp2, modules": (sharded, {"runtime": "modules"}),
    }
    return _in_ways(rank, ways)


def micro_batches_of_four(rank: int) -> dict[str, Any]:
    """Train by micro-batches over two ranks and two copies."""
    copies = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("copy", "shard"))
    copied = partial(common.fully_sharded, mesh=copies)
    ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
        "copies, 16 bits": (partial(copied, mp_policy=common.IN_FLOAT32), {}),
        "copies, all 16 bits, each": (partial(copied, mp_policy=common.IN_16_BITS), {"waits": False}),
    }
    return _in_ways(rank, ways)


def _in_ways(rank: int, ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]]) -> dict[str, Any]:
    return {
        f"{name}, {rows} rows": by_micro_batches(rank, rows, distribute, **settings)
        for name, (distribute, settings) in ways.items()
        for rows in (ROWS, FEW_ROWS)
    }


def sharded_in_more_units(model: Model, **options: Any) -> Model:
    """Shard what is before the blocks and what is after them by themselves, as embeddings and heads often are."""
    fully_shard(model.start, **options)
    fully_shard(model.norm, reshard_after_forward=False, **options)
    return common.fully_sharded(model, **options)


def by_micro_batches(
    rank: int,
    rows: int,
    distribute: Callable[[Model], nn.Module],
    *,
    waits: bool = True,
    runtime: str = "regional",
    ahead: bool = False,
) -> list[dict[str, Any]]:
    """Return for each of three micro-batches what it held and what its plan says; gradients are of all three.

    Where they do not wait, each sends its gradients. Planned ahead it is for one process, which has all of the model.
    """
    batches = [data(10 * rank + number)[:rows].clone() for number in range(3)]

    def micro_step(running: Any, number: int) -> None:
        sends = number == 2 or not waits
        if isinstance(running, DistributedDataParallel):
            with nullcontext() if sends else running.no_sync():
                running(batches[number]).backward()
            return
        running.set_requires_gradient_sync(sends)
        running(batches[number]).backward()

    alone = distribute(make())
    for number in range(3):
        micro_step(alone, number)
    expected = gradients(alone)
    del alone
    others = live()
    model = make()
    budget = "100%" if rows != ROWS else "65%" if ahead else "75%"  # sharded in 16 bits it needs less
    options = {"activation_budget": budget, "time_limit_seconds": 1.0, "deterministic": True, "runtime": runtime}
    planner.auto_wrap(model, *batches[: int(ahead)], **grouped(**options))
    running = distribute(model)
    is_ddp = isinstance(running, DistributedDataParallel)
    buckets_bytes = sum(p.nbytes for p in model.parameters()) if is_ddp else 0
    buckets: set[int] = set()
    found: list[dict[str, Any]] = [{"said": []} for _ in batches]
    peaks, cycles = [Counter[int]() for _ in batches], 0
    while not common.all_agree(all(map(common.is_settled, peaks))):
        running.zero_grad(set_to_none=True)
        for number, (one, seen) in enumerate(zip(found, peaks, strict=True)):
            own, here, kept = batches[number], live(), held_gradients(model)
            here |= {gradient.untyped_storage().data_ptr(): gradient.untyped_storage() for gradient in kept}
            resident_bytes = own.nbytes + buckets_bytes
            resident_bytes += sum(one.nbytes() for place, one in here.items() if place not in (*others, *buckets))
            del here, kept
            with warnings.catch_warnings(record=True, action="always") as said:
                if cycles > 1:
                    peak, _ = measure_peak(partial(micro_step, running, number), torch.device("cpu"))
                    seen[resident_bytes + peak] += 1
                else:  # a profiler would be in the way of planning, and then DDP puts its buckets elsewhere
                    micro_step(running, number)
            one["said"] += [str(warning.message) for warning in said if "budget" in str(warning.message)]
            plan = planner.plan_of(model)
            one |= {"predicted_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}
            one["recomputed"] = plan.recompute_seconds > 0
            if is_ddp and (number == 2 or not waits):
                buckets = {g.untyped_storage().data_ptr() for g in held_gradients(model) if g._base is not None}
        cycles += 1
    equal = same(gradients(running), expected)
    return [{**one, "equal": equal, "peak_bytes": common.settled(p)} for one, p in zip(found, peaks, strict=True)]


def held_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that are there, with those that FSDP2 keeps for later."""
    found = [p.grad for p in model.parameters()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for one in getattr(module._get_fsdp_state()._fsdp_param_group, "fsdp_params", ()):  # the root may have none
                found += [getattr(one, "_unsharded_param", torch.empty(0)).grad, one.unsharded_accumulated_grad]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in found if gradient is not None]


def dies(rank: int) -> dict[str, Any]:
    if rank == 1:
        os._exit(0)
    return common.refused(lambda: wrap(make(), rank, "ddp"))


def fails_on_rank_0(rank: int) -> dict[str, Any]:
    return common.refused(lambda: wrap(make(), rank, "ddp", activation_budget="1%"))


def fails_on_rank_1(rank: int) -> dict[str, Any]:
    model = make()
    if rank == 1:
        model.norm = nn.LayerNorm(3)
    return common.refused(lambda: wrap(model, rank, "ddp"))


def fails_where_layers_are_shared(rank: int) -> dict[str, Any]:
    """Let one rank fail where the others would wait for it in the middle of a layer."""
    model = common.parallel(make())
    if rank == 1:
        model.norm = nn.LayerNorm(3)
    return common.refused(lambda: step(planner.auto_wrap(model, **grouped(**common.QUICK)), data(0)))


def differs(rank: int) -> dict[str, Any]:
    shorter, frozen = make(3), make(3)
    if rank == 1:
        del shorter.blocks[-1]
        frozen.blocks[0].requires_grad_(False)
    return {
        "shorter": common.refused(lambda: wrap(shorter, rank, "ddp")),
        "frozen": common.refused(lambda: wrap(frozen, rank, "ddp")),
    }


def wrong_order(rank: int) -> dict[str, Any]:
    ddp, sharded = common.distributed(make(), "ddp"), common.distributed(make(), "fsdp2")
    return {
        "ddp": common.refused(lambda: planner.auto_wrap(ddp, data(rank), budget="90%")),
        "sharded": common.refused(lambda: planner.plan(sharded, data(rank), budget="90%")),
        "other_runtime": common.refused(lambda: planner.auto_wrap(sharded, data(rank), budget="90%", runtime="graph")),
    }
