"""What each rank of ``test_distributed.py`` runs, in a process of its own."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import planner
from planner import errors
from planner.capture.memory import measure_peak, record
from planner.common.options import grouped
from planner.extras.pipelines import StagePlan, wrap_pipeline
from planner.plans.module_choices import modules_of
from planner.plans.plan import Plan
from tests.runtimes import exchanging

WIDTH, ROWS, DEPTH = 64, 384, 4
FEW_ROWS = 32
"""Few enough for gradients to be most of what a step holds."""

IN_FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # pytest looks for doctests here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 4 * WIDTH)
        self.fall = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(F.gelu(self.rise(self.norm(x))))


class Model(nn.Module):
    """Something before the blocks and something after them, which stay eager."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def data(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def make(depth: int = DEPTH) -> Model:
    torch.manual_seed(0)
    return Model(depth)


def every_block_differently(plan: Plan) -> Plan:
    """Let block 0 recompute GELU and LayerNorm, 1 LayerNorm, 2 GELU and 3 nothing."""
    again: dict[str, tuple[str, ...]] = {}
    for number in (0, 1):
        again[f"blocks.{number}.rise|aten.mm.default|b1"] = (f"blocks.{number}.norm|aten.native_layer_norm.default|f0",)
    for number in (0, 2):
        again[f"blocks.{number}.fall|aten.mm.default|b1"] = (f"blocks.{number}|aten.gelu.default|f0",)
    return replace(plan, recomputations=again, budget_bytes=plan.baseline_peak_bytes - 1)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    return {n.removeprefix("module."): full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether there are the same gradients, bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def reported(plan: Plan, found: Any, expected: Any, peak_bytes: int | None = None, **more: Any) -> dict[str, Any]:
    """Return what a planned step came to, and what its plan says of it."""
    return {
        "equal": same(found, expected),
        "peak_bytes": peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "recomputed": len(plan.recomputations),
        "runtime": plan.runtime,
        "plan": plan.to_json(),
        **more,
    }


def live() -> dict[int, int]:
    """Return the bytes of every tensor that is there, each storage once."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.device.type == "cpu"]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def peak_of(distribute: Callable[[], nn.Module], x: torch.Tensor, others: Collection[int]) -> tuple[int, nn.Module]:
    """Return the peak of a later step, with all that is resident: every live tensor, and what distributing allocates.

    ``others`` are tensors that earlier scenarios have left.
    """
    with record() as recording:
        model = distribute()
    buckets_bytes = sum(change for _, change in recording.changes) if isinstance(model, DistributedDataParallel) else 0
    for _ in range(3):
        step(model, x)
    model.zero_grad(set_to_none=True)
    resident_bytes = sum(size_bytes for place, size_bytes in live().items() if place not in others)
    peaks: list[int] = []
    # The profiler does not see what gloo's threads free: a buffer that one of them was last to hold seems to stay.
    while not all_agree(len(peaks) >= 6 and (peaks.count(min(peaks)) >= 4 or len(peaks) >= 30)):
        model.zero_grad(set_to_none=True)
        peaks.append(measure_peak(lambda: step(model, x), torch.device("cpu"))[0])
    return resident_bytes + buckets_bytes + min(peaks), model


def all_agree(is_so: bool) -> bool:
    """Whether something is so on every rank: they must take as many steps."""
    told = torch.tensor(float(is_so))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def first_gradient(model: nn.Module, x: torch.Tensor) -> tuple[float, float, int]:
    """Return which shares of a backward's operations and time are over at the first gradient, and its gathers."""
    times: list[float] = []
    hooks = []

    def note(_parameter: Any) -> None:
        times.append(time.perf_counter())
        with record_function("a gradient"):
            pass

    for parameter in model.parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(note))
    step(model, x)
    times.clear()
    model.zero_grad(set_to_none=True)
    loss = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        begun = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
    for hook in hooks:
        hook.remove()
    events = [e for e in seen.events() if e.name.startswith("aten::") or e.name == "a gradient"]
    events.sort(key=lambda e: e.time_range.start)
    first = next(i for i, e in enumerate(events) if e.name == "a gradient")
    gathers = sum(e.name.startswith("FSDP::all_gather (") for e in seen.events())
    return first / len(events), (times[0] - begun) / (ended - begun), gathers


def wrap(model: Model, rank: int, way: str, **options: Any) -> Model:
    options = {"activation_budget": "75%", "time_limit_seconds": 1.0, "deterministic": True, **options}
    return planner.auto_wrap(
        model, data(rank), **grouped(runtime="regional", data_parallel=way, ranks=RANKS, **options)
    )


def distributed(model: Model, way: str, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model, init_sync=False)  # gloo frees what that sends unseen by the profiler
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def mean_of_single_processes(rows: int = ROWS) -> dict[str, torch.Tensor]:
    alone = make()
    single = []
    for rank in range(RANKS):
        step(alone, data(rank)[:rows])
        single.append(gradients(alone))
    return {name: (single[0][name] + single[1][name]) / 2 for name in single[0]}


def train(rank: int, way: str) -> dict[str, Any]:
    others = live()
    model, x = make(), data(rank)
    wrap(model, rank, way, activation_budget="68%")
    planner.auto_wrap(model, x, budget=every_block_differently(planner.plan_of(model)), runtime="regional")
    plan = planner.plan_of(model)
    peak, running = peak_of(lambda: distributed(model, way), x, others)
    result = reported(plan, gradients(running), mean_of_single_processes(), peak)
    firsts = {"first": first_gradient(running, x), "eager_first": first_gradient(distributed(make(), way), x)}
    return result | firsts


def compiled_blocks(rank: int) -> dict[str, Any]:
    """Hold a model whose blocks are compiled by their own ``compile()`` to the same in eager, under DDP and FSDP2.

    In float64: of a norm's mean square, which hardly moves, gradients in float32 are off by a thousandth in eager too.
    """
    return {way: _compiled_blocks(rank, way) for way in ("ddp", "fsdp2")}


def _compiled_blocks(rank: int, way: str) -> dict[str, Any]:
    plain = distributed(make().double(), way)
    step(plain, data(rank).double())
    expected = gradients(plain)
    del plain
    others, model, x = live(), make().double(), data(rank).double()
    for block in model.blocks:
        block.compile()
    planner.auto_wrap(model, **grouped(activation_budget="66%", time_limit_seconds=1.0, deterministic=True))
    peak, running = peak_of(lambda: distributed(model, way), x, others)
    found = gradients(running)
    off = max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)
    return reported(planner.plan_of(model), found, expected, peak, off=off)


def mixed_precision(rank: int) -> dict[str, Any]:
    """Hold a sharded model of 16 bits against the same without recompute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found, peaks = [], []
    for budget in ("100%", "48%"):
        others = live()
        x = data(rank)
        model = wrap(make(), rank, "fsdp2", activation_budget=budget)
        peak, running = peak_of(lambda model=model: distributed(model, "fsdp2", policy), x, others)
        plan = planner.plan_of(model)
        found.append(gradients(running))
        peaks.append(peak)
    return reported(plan, *reversed(found), peaks[1], whole_bytes=peaks[0])


def sharded_first(rank: int) -> dict[str, Any]:
    """Wrap a model that is sharded already, made on the meta device, in its own types and in 16 bits, and so on."""
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "own": ({}, {}),
        "16 bits": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, {}),
        "all 16 bits": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, {}),
        "kept": ({"reshard_after_forward": False}, {}),
        "never kept": ({"reshard_after_forward": True}, {}),
        "modules": ({}, {"runtime": "modules"}),
        "ahead": ({"ahead": True}, {}),
        "inside": ({"inside": True}, {}),
    }
    return {name: _sharded_first(rank, *options) for name, options in ways.items()}


def _sharded_first(rank: int, shard: dict[str, Any], wrap: dict[str, Any]) -> dict[str, Any]:
    ahead, inside = shard.pop("ahead", False), shard.pop("inside", False)

    def sharded() -> nn.Module:
        with torch.device("meta"):
            empty = Model()
        if inside:  # two layers, each of which has two blocks that are sharded by themselves
            empty.blocks = nn.ModuleList(nn.Sequential(*empty.blocks[at : at + 2]) for at in (0, 2))
        parts = [part for pair in empty.blocks for part in pair] if inside else []
        for unit in (*parts, *empty.blocks, empty):
            fully_shard(unit, **{"mesh": mesh, **shard})
        if ahead:
            empty.blocks[0].set_modules_to_forward_prefetch([empty.blocks[1], empty.blocks[2]])
            empty.blocks[3].set_modules_to_backward_prefetch([empty.blocks[2], empty.blocks[1]])
        model = empty.to_empty(device="cpu")
        model.load_state_dict({n: distribute_tensor(v, mesh) for n, v in state.items()})
        return model

    def wrapped() -> nn.Module:
        return planner.auto_wrap(
            sharded(), **grouped(activation_budget="68%", time_limit_seconds=1.0, deterministic=True, **wrap)
        )

    mesh = init_device_mesh("cpu", (RANKS,))
    state, others, x = make().state_dict(), live(), data(rank)
    if inside:
        state = {
            re.sub(r"blocks\.(\d)", lambda at: f"blocks.{int(at[1]) // 2}.{int(at[1]) % 2}", n): v
            for n, v in state.items()
        }
    others |= {p.untyped_storage().data_ptr(): 0 for p in state.values()}
    peak, model = peak_of(wrapped, x, others)
    plan, plain = planner.plan_of(model), sharded()
    step(plain, x)
    result = reported(plan, gradients(model), gradients(plain), peak)
    larger = torch.cat([x, x])
    step(model, larger), step(plain, larger)
    return result | {"larger_equal": same(gradients(model), gradients(plain))}


def refused(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        function()
    except errors.PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None}


def dies(rank: int) -> dict[str, Any]:
    if rank == 1:
        os._exit(0)
    return refused(lambda: wrap(make(), rank, "ddp"))


def fails_on_rank_0(rank: int) -> dict[str, Any]:
    return refused(lambda: wrap(make(), rank, "ddp", activation_budget="1%"))


def fails_on_rank_1(rank: int) -> dict[str, Any]:
    model = make()
    if rank == 1:
        model.norm = nn.LayerNorm(3)
    return refused(lambda: wrap(model, rank, "ddp"))


def fails_where_layers_are_shared(rank: int) -> dict[str, Any]:
    """Let one rank fail where the others would wait for it in the middle of a layer."""
    model = parallel(make())
    if rank == 1:
        model.norm = nn.LayerNorm(3)
    return refused(lambda: step(planner.auto_wrap(model, **grouped(**QUICK)), data(0)))


def differs(rank: int) -> dict[str, Any]:
    shorter, frozen = make(), make()
    if rank == 1:
        del shorter.blocks[-1]
        frozen.blocks[0].requires_grad_(False)
    return {
        "shorter": refused(lambda: wrap(shorter, rank, "ddp")),
        "frozen": refused(lambda: wrap(frozen, rank, "ddp")),
    }


def wrong_order(rank: int) -> dict[str, Any]:
    ddp, sharded = distributed(make(), "ddp"), distributed(make(), "fsdp2")
    return {
        "ddp": refused(lambda: planner.auto_wrap(ddp, data(rank), budget="90%")),
        "sharded": refused(lambda: planner.plan(sharded, data(rank), budget="90%")),
        "other_runtime": refused(lambda: planner.auto_wrap(sharded, data(rank), budget="90%", runtime="graph")),
    }


def last_batch(rank: int) -> dict[str, Any]:
    """Give a sharded model a smaller batch than it was planned for, and a larger one."""
    model, x = make(), data(rank)
    wrap(model, rank, "fsdp2", activation_budget="68%")
    plan, running = planner.plan_of(model), distributed(model, "fsdp2")
    step(running, x)
    step(running, x[:100])
    is_same = planner.plan_of(model) == plan
    result = reported(plan, gradients(running), mean_of_single_processes(100), same_plan=is_same)
    step(running, torch.cat([x, x]))
    return result | {"larger_rows": 2 * ROWS, "planned_for": planner.plan_of(model).fingerprint["inputs"]}


def saved(rank: int) -> dict[str, Any]:
    """Save a planned model and its optimizer as torch.distributed.checkpoint does, and go on with what was saved."""
    folder, x = Path(sys.argv[2]) / "checkpoint", data(rank)

    def made(*, planned: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = distributed(make(), "fsdp2")
        if planned:
            planner.auto_wrap(model, **grouped(activation_budget="75%", time_limit_seconds=1.0, deterministic=True))
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
    plan = planner.plan_of(wrap(make(), rank, "fsdp2"))
    for name, options in ways.items():
        model = planner.auto_wrap(make(), budget=plan, runtime="regional")
        for block in model.blocks if options is not None else ():
            fully_shard(block, **options)
        fully_shard(model, **{"mesh": mesh, **(options or {})})
        if name == "prefetched":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.set_requires_gradient_sync(name != "unsent")
        said = warnings_of(lambda model=model: model(data(rank)).backward())
        if name == "unsent":
            model.set_requires_gradient_sync(True)
            model(data(rank)).backward()
        times = 2 if name == "unsent" else 1
        found[name] = {"equal": same(gradients(model), {n: times * one for n, one in expected.items()}), "said": said}
    running: Any = DistributedDataParallel(wrap(make(), rank, "ddp"), init_sync=False)
    running.register_comm_hook(None, allreduce_hook)  # which sends what DDP would
    said = warnings_of(lambda: running(data(rank)).backward())
    found["hook"] = {"equal": same(gradients(running), expected), "said": said}
    return found


def warnings_of(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in said if one.category is UserWarning]


def micro_batches(rank: int) -> dict[str, Any]:
    """Train by micro-batches in the ways in which most differs."""
    views = partial(with_ddp, gradient_as_bucket_view=True)
    sharded = partial(fully_sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    return {
        f"ddp, views, {FEW_ROWS} rows": by_micro_batches(rank, FEW_ROWS, views),
        f"fsdp2, {ROWS} rows": by_micro_batches(rank, ROWS, sharded),
        f"fsdp2, more units, {FEW_ROWS} rows": by_micro_batches(
            rank, FEW_ROWS, partial(sharded_in_more_units, mesh=init_device_mesh("cpu", (RANKS,)))
        ),
        f"fsdp2, 16 bits, {FEW_ROWS} rows": by_micro_batches(
            rank, FEW_ROWS, partial(sharded, mp_policy=IN_FLOAT32), ahead=True
        ),
    }


def more_micro_batches(rank: int) -> dict[str, Any]:
    """Train by micro-batches in all ways, where gradients are most of what a step holds, and where they are least."""
    mesh = init_device_mesh("cpu", (RANKS,))
    views, sharded = partial(with_ddp, gradient_as_bucket_view=True), partial(fully_sharded, mesh=mesh)
    offloaded = partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
        "ddp": (with_ddp, {}),
        "ddp, views": (views, {}),
        "ddp, views, each": (views, {"waits": False}),
        "fsdp2": (sharded, {}),
        "fsdp2, each": (sharded, {"waits": False}),
        "fsdp2, 16 bits": (partial(sharded, mp_policy=IN_FLOAT32), {}),
        "fsdp2, 16 bits, each": (partial(sharded, mp_policy=IN_FLOAT32), {"waits": False}),
        "fsdp2, all 16 bits": (partial(sharded, mp_policy=IN_16_BITS), {}),
        "fsdp2, gathered": (sharded, {"reshards": False}),
        "fsdp2, offloaded": (offloaded, {}),
        "fsdp2, offloaded, 16 bits": (partial(offloaded, mp_policy=IN_FLOAT32), {"waits": False}),
        "fsdp2, modules": (sharded, {"runtime": "modules"}),
    }
    return _in_ways(rank, ways)


def micro_batches_of_four(rank: int) -> dict[str, Any]:
    """Train by micro-batches over two ranks and two copies, and with parameters that two of four ranks keep."""
    copies = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("copy", "shard"))
    copied = partial(fully_sharded, mesh=copies)
    kept = partial(fully_sharded, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=2)
    ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
        "copies": (copied, {}),
        "copies, 16 bits": (partial(copied, mp_policy=IN_FLOAT32), {}),
        "copies, all 16 bits, each": (partial(copied, mp_policy=IN_16_BITS), {"waits": False}),
        "two": (kept, {}),
        "two, 16 bits, each": (partial(kept, mp_policy=IN_FLOAT32), {"waits": False}),
        "two, modules, each": (kept, {"waits": False, "runtime": "modules"}),
    }
    return _in_ways(rank, ways)


def _in_ways(rank: int, ways: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]]) -> dict[str, Any]:
    return {
        f"{name}, {rows} rows": by_micro_batches(rank, rows, distribute, **settings)
        for name, (distribute, settings) in ways.items()
        for rows in (ROWS, FEW_ROWS)
    }


def with_ddp(model: Model, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, init_sync=False, **options)


def by_micro_batches(
    rank: int,
    rows: int,
    distribute: Callable[[Model], nn.Module],
    *,
    waits: bool = True,
    reshards: bool = True,
    runtime: str = "regional",
    ahead: bool = False,
) -> list[dict[str, Any]]:
    """Return for each of three micro-batches what it held and what its plan says; gradients are of all three.

    Where they do not wait, each sends its gradients; where nothing reshards, parameters stay gathered between them.
    Planned ahead it is for one process, which has all of the model.
    """
    batches = [data(10 * rank + number)[:rows].clone() for number in range(3)]

    def micro_step(running: Any, number: int) -> None:
        sends = number == 2 or not waits
        if isinstance(running, DistributedDataParallel):
            with nullcontext() if sends else running.no_sync():
                running(batches[number]).backward()
            return
        running.set_requires_gradient_sync(sends)
        running.set_reshard_after_backward(number == 2 or reshards)
        running(batches[number]).backward()

    alone = distribute(make(2))
    for number in range(3):
        micro_step(alone, number)
    expected = gradients(alone)
    del alone
    others = live()
    model = make(2)
    budget = "75%" if rows == ROWS else "100%"
    options = {"activation_budget": budget, "time_limit_seconds": 1.0, "deterministic": True, "runtime": runtime}
    planner.auto_wrap(model, *batches[: int(ahead)], **grouped(**options))
    running = distribute(model)
    is_ddp = isinstance(running, DistributedDataParallel)
    buckets_bytes = sum(p.nbytes for p in model.parameters()) if is_ddp else 0
    buckets: set[int] = set()
    found: list[dict[str, Any]] = [{"peak_bytes": 2**40, "said": []} for _ in batches]
    cycles = 0
    # Up to three cycles more, for what gloo's threads free: see peak_of.
    while cycles < 3 or not all_agree(all(one["peak_bytes"] <= one["predicted_bytes"] for one in found) or cycles > 8):
        running.zero_grad(set_to_none=True)
        for number, one in enumerate(found):
            own, here, kept = batches[number], live(), held_gradients(model)
            here |= {gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes() for gradient in kept}
            del kept
            resident_bytes = own.nbytes + buckets_bytes
            resident_bytes += sum(size for place, size in here.items() if place not in (*others, *buckets))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if cycles > 1:
                    peak, _ = measure_peak(partial(micro_step, running, number), torch.device("cpu"))
                    one["peak_bytes"] = min(one["peak_bytes"], resident_bytes + peak)
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
    return [{**one, "equal": equal} for one in found]


def held_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that are there, with those that FSDP2 keeps for later."""
    found = [p.grad for p in model.parameters()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for one in getattr(module._get_fsdp_state()._fsdp_param_group, "fsdp_params", ()):  # the root may have none
                found += [getattr(one, "_unsharded_param", torch.empty(0)).grad, one.unsharded_accumulated_grad]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in found if gradient is not None]


def parallel(model: Model) -> Model:
    """Let the ranks share every block: its first product by columns, its second by rows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    return model


def tensor_parallel(_rank: int) -> dict[str, Any]:
    """Plan a parallel model at its first step, and hold it against the same without a plan."""
    graph = refused(lambda: step(planner.auto_wrap(parallel(make()), budget="75%", runtime="graph"), data(0)))
    return beside_plain(lambda: parallel(make()), data(0), ROWS) | {"refused": graph}


def two_meshes(_rank: int) -> dict[str, Any]:
    """Shard over two of four ranks a model whose layers the other two share, and one of which they have copies."""
    layers = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("shard", "layers"))
    copies = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("copy", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def with_shared_layers() -> nn.Module:
        model = make()
        for block in model.blocks:
            parallelize_module(block, layers["layers"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
        return fully_sharded(model, mesh=layers["shard"])

    rows = ROWS - 100 * layers.get_local_rank("shard")
    return {
        "layers": beside_plain(with_shared_layers, data(layers.get_local_rank("shard")), rows),
        "copies": beside_plain(
            lambda: fully_sharded(make(), mesh=copies, mp_policy=half), data(copies.get_local_rank("shard")), rows
        ),
    }


def fully_sharded(model: Model, **options: Any) -> Model:
    for unit in (*model.blocks, model):
        fully_shard(unit, **options)
    return model


def sharded_in_more_units(model: Model, **options: Any) -> Model:
    """Shard what is before the blocks and what is after them by themselves, as embeddings and heads often are."""
    fully_shard(model.start, **options)
    fully_shard(model.norm, reshard_after_forward=False, **options)
    return fully_sharded(model, **options)


def beside_plain(made: Callable[[], nn.Module], x: torch.Tensor, last_rows: int) -> dict[str, Any]:
    """Hold a parallel model under a plan against the same without one, also with a last batch that only some have."""
    alone, others = made(), live()
    others.pop(x.untyped_storage().data_ptr())
    peak, running = peak_of(lambda: planner.auto_wrap(made(), **grouped(**QUICK)), x, others)
    step(alone, x)
    result = reported(planner.plan_of(running), gradients(running), gradients(alone), peak)
    step(running, x[:last_rows]), step(alone, x[:last_rows])
    return result | {"last_equal": same(gradients(running), gradients(alone))}


def divided_experts(rank: int) -> dict[str, Any]:
    """Train a model whose experts are divided, and whose ranks therefore have other sizes; also with other batches."""
    mesh, small = init_device_mesh("cpu", (RANKS,)), {**QUICK, "activation_budget": "50%"}
    alone, x = exchanging.with_divided_experts(mesh), exchanging.tokens(rank)
    others = live()
    others.pop(x.untyped_storage().data_ptr())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peak, running = peak_of(
            lambda: planner.auto_wrap(exchanging.with_divided_experts(mesh), **grouped(**small)), x, others
        )
        plan = planner.plan_of(running)
        equal = []
        for seed in (rank, 2 + rank, 4 + rank, 6 + rank):
            step(running, exchanging.tokens(seed)), step(alone, exchanging.tokens(seed))
            equal.append(same(gradients(running), gradients(alone)))
    tight = exchanging.with_divided_experts(mesh)
    budget = {**QUICK, "activation_budget": "1%" if rank else "75%"}
    return reported(plan, {}, {}, peak) | {
        "equal": all(equal),
        "modules": modules_of(plan),
        "said": [str(one.message) for one in said],
        "tight": refused(lambda: step(planner.auto_wrap(tight, **grouped(**budget)), x)),
    }


def divided_sequence(rank: int) -> dict[str, Any]:
    """Train a model whose attention exchanges tokens, by functional collectives and by others."""

    def found(exchange: Callable[[torch.Tensor], torch.Tensor], runtime: str) -> dict[str, Any]:
        made, x = partial(exchanging.Model, partial(exchanging.DividedAttention, exchange)), exchanging.tokens(rank)
        alone, others = made(), live()
        others.pop(x.untyped_storage().data_ptr())
        step(alone, x)
        peak, running = peak_of(lambda: planner.auto_wrap(made(), **grouped(runtime=runtime, **QUICK)), x, others)
        plan = planner.plan_of(running)
        again = [key for keys in plan.recomputations.values() for key in keys]
        exchanges = [key for key in again if "all_to_all" in key or "c10d" in key]
        modules = modules_of(plan) if runtime == "modules" else ()
        return reported(plan, gradients(running), gradients(alone), peak, exchanges=exchanges, modules=modules)

    own = exchanging.Exchange.apply
    return {
        "functional, graph": found(exchanging.exchanged, "graph"),
        "functional, modules": found(exchanging.exchanged, "modules"),
        "in place, regional": found(own, "regional"),
        "in place, parts": found(own, "parts"),
    }


QUICK = {"activation_budget": "75%", "time_limit_seconds": 1.0, "deterministic": True}

MICRO_BATCHES = 4


class Part(nn.Sequential):
    """Two blocks and a dropout: a stage of a pipeline."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(index)
        super().__init__(Block(), nn.Dropout(0.1), Block())


def scheduled(
    kind: type[Any],
    rank: int,
    micro_batches: int = MICRO_BATCHES,
    around: Callable[[nn.Module], nn.Module] = lambda m: m,
    group: Any = None,
) -> tuple[list[Any], Any]:
    """Make the stages of a rank, two for schedules of several, with something around each, and the schedule."""
    is_single, ranks = issubclass(kind, PipelineScheduleSingle), dist.get_world_size(group)
    indices = [rank] if is_single else [rank, 2 * ranks - 1 - rank] if "V" in kind.__name__ else [rank, ranks + rank]
    place = {"num_stages": ranks * len(indices), "device": torch.device("cpu"), "group": group}
    stages = [PipelineStage(around(Part(index)), index, **place) for index in indices]
    return stages, kind(stages[0] if is_single else stages, micro_batches, loss_fn=F.mse_loss)


def given(stages: list[Any], seed: int = 2) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return what ``schedule.step`` is called with on the rank of these stages."""
    args = (data(seed),) if stages[0].is_first else ()
    return args, {"target": data(seed + 1)} if stages[-1].is_last else {}


def sharded_pipeline(_rank: int) -> dict[str, Any]:
    """Run pipelines of two stages, each of which two ranks share the parameters of."""
    meshes = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("pipeline", "shard"))
    rank, seed = meshes.get_local_rank("pipeline"), 10 * meshes.get_local_rank("shard")
    around = partial(fully_shard, mesh=meshes["shard"])
    place = {"around": around, "group": meshes["pipeline"].get_group()}
    return {
        "1f1b": pipeline(rank, pipelining.Schedule1F1B, "92%", place, seed),
        "gpipe": pipeline(rank, pipelining.ScheduleGPipe, "75%", place, seed),
    }


def pipeline(
    rank: int, kind: type[Any], budget: str, place: dict[str, Any] | None = None, seed: int = 2, **options: Any
) -> dict[str, Any]:
    """Run a schedule without a plan and with one, from the same random state."""
    _, expected, _ = run_pipeline(rank, kind, None, place, seed, **options)
    asked = {"budget": budget, "time_limit_seconds": 1.0, "deterministic": True}
    peak, found, plan = run_pipeline(rank, kind, asked, place, seed, **options)
    assert plan is not None
    return {
        "equal": all(map(torch.equal, found, expected)),
        "peak_bytes": peak,
        "predicted_bytes": plan.peak_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "budget_bytes": plan.plans[0].budget_bytes,
        "in_flight": plan.micro_batches_in_flight,
        "recomputed": [len(one.recomputations) for one in plan.plans],
    }


def run_pipeline(
    rank: int,
    kind: type[Any],
    asked: dict[str, Any] | None = None,
    around: dict[str, Any] | None = None,
    seed: int = 2,
    **options: Any,
) -> tuple[int, list[torch.Tensor], StagePlan | None]:
    """Return the peak of a later step, with all that is resident, gradients, and the plan if one is asked for."""
    others = live()
    stages, schedule = scheduled(kind, rank, **(around or {}))
    args, kwargs = given(stages, seed)
    labels = kwargs.get("target")
    plan = wrap_pipeline(schedule, *args, labels=labels, **grouped(**options, **asked)) if asked else None

    def run() -> None:
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        schedule.step(*args, **kwargs, **options)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    assert not [one for one in said if "budget" in str(one.message)], said
    peaks = []
    for _ in range(6 if around and asked else 1):  # gloo's threads may be the last to hold what is spread: see peak_of
        for stage in stages:
            stage.clear_runtime_states()
            stage.submod.zero_grad(set_to_none=True)
        forget_handed_over(stages)
        resident_bytes = sum(size_bytes for place, size_bytes in live().items() if place not in others)
        peaks.append(resident_bytes + measure_peak(lambda: [run(), run()], torch.device("cpu"))[0])
    found = [gradient for stage in stages for gradient in gradients(stage.submod).values()]
    return min(peaks), found, plan


def forget_handed_over(stages: list[Any]) -> None:
    """Forget what stages of this rank have handed to each other.

    The profiler does not see that goes what was there before it. What a first step hands over it sees go in the second.
    """
    indices = {stage.stage_index for stage in stages}
    given = [stage.args_recv_info for stage in stages if stage.stage_index - 1 in indices]
    given += [stage.grad_recv_info for stage in stages if stage.stage_index + 1 in indices]
    for info in (info for one in given for infos in one.values() for info in infos):
        info.buffer = None


def documented(rank: int) -> dict[str, Any]:
    """Run what the page on pipelines shows."""
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    x, y = data(RANKS), data(RANKS + 1)
    names = {name: getattr(pipelining, name) for name in ("PipelineStage", "Schedule1F1B")}
    names |= {"planner": planner, "rank": rank, "world_size": RANKS, "device": torch.device("cpu"), "x": x, "y": y}
    names |= {"module": Part(rank), "loss_fn": F.mse_loss, "batches": [(x, y)] * 2}
    exec(compile(code, "pipelines.md", "exec"), names)
    return {"micro_batches_in_flight": names["plan"].micro_batches_in_flight}


def wrapped(rank: int, kind: type[Any], micro_batches: int = MICRO_BATCHES, **options: Any) -> None:
    stages, schedule = scheduled(kind, rank, micro_batches)
    args, kwargs = given(stages)
    asked = {"budget": "80%", "labels": kwargs.get("target"), **options}
    wrap_pipeline(schedule, *args, **grouped(**asked))


def in_parts(module: Any) -> nn.Module:
    """Shard a module, and a part of it by itself."""
    meshes = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pipeline", "shard"))
    for part in (module[0], module):
        fully_shard(part, mesh=meshes["shard"])
    return module


def pipeline_errors(rank: int) -> dict[str, Any]:
    """Ask for what cannot be planned: of some only one rank knows it."""
    gpipe = pipelining.ScheduleGPipe
    stages, own_weights = scheduled(pipelining.ScheduleZBVZeroBubble, rank)
    stages[0].dw_builder = lambda: lambda: None
    return {
        "own_weights": refused(lambda: wrap_pipeline(own_weights, budget="80%")),
        "differ": refused(lambda: wrapped(rank, gpipe, MICRO_BATCHES + 2 * rank)),
        "tight": refused(lambda: wrapped(rank, gpipe, budget="1%" if rank else "80%")),
        "no_target": refused(lambda: wrapped(rank, gpipe, labels=None)),
        "sharded": refused(lambda: wrap_pipeline(scheduled(gpipe, rank, around=in_parts)[1], budget="80%")),
        "no_schedule": refused(lambda: wrap_pipeline(Part(0), data(0), budget="80%")),
    }


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ddp": lambda rank: train(rank, "ddp"),
    "fsdp2": lambda rank: train(rank, "fsdp2"),
    "compiled_blocks": compiled_blocks,
    "mixed_precision": mixed_precision,
    "sharded_first": sharded_first,
    "last_batch": last_batch,
    "saved": saved,
    "shardings": shardings,
    "micro_batches": micro_batches,
    "more_micro_batches": more_micro_batches,
    "micro_batches_of_four": micro_batches_of_four,
    "tensor_parallel": tensor_parallel,
    "two_meshes": two_meshes,
    "divided_experts": divided_experts,
    "divided_sequence": divided_sequence,
    "sharded_pipeline": sharded_pipeline,
    "dies": dies,
    "fails_on_rank_0": fails_on_rank_0,
    "fails_on_rank_1": fails_on_rank_1,
    "fails_where_layers_are_shared": fails_where_layers_are_shared,
    "differs": differs,
    "wrong_order": wrong_order,
    "1f1b": lambda rank: pipeline(rank, pipelining.Schedule1F1B, "92%"),
    "1f1b_without_outputs": lambda rank: pipeline(rank, pipelining.Schedule1F1B, "92%", return_outputs=False),
    "gpipe": lambda rank: pipeline(rank, pipelining.ScheduleGPipe, "70%"),
    "interleaved": lambda rank: pipeline(rank, pipelining.ScheduleInterleaved1F1B, "75%"),
    "breadth_first": lambda rank: pipeline(rank, pipelining.ScheduleLoopedBFS, "75%", return_outputs=False),
    "zero_bubble": lambda rank: pipeline(rank, pipelining.ScheduleInterleavedZeroBubble, "75%"),
    "zero_bubble_v": lambda rank: pipeline(rank, pipelining.ScheduleZBVZeroBubble, "88%"),
    "dual_pipe_v": lambda rank: pipeline(rank, pipelining.ScheduleDualPipeV, "75%"),
    "documented": documented,
    "pipeline_errors": pipeline_errors,
}


def main() -> None:
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch._dynamo.config.run_gc_after_compile = False
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=RANKS)
    for name in names:
        gc.collect()
        gc.freeze()  # what is imported, and what earlier ones left: each of the many collections to come would walk it
        (folder / f"{name}.{rank}.json").write_text(json.dumps(SCENARIOS[name](rank)), encoding="utf-8")
    if dist.is_initialized() and "dies" not in names:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
