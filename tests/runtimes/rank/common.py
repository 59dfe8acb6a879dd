"""What the processes of ``test_distributed.py`` share: a model, ways to spread it, and the peak of a step."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel

import planner
from planner import errors
from planner.capture.memory import measure_peak, record
from planner.common.options import grouped
from planner.plans.plan import Plan
from tests.models import Layers, linear

WIDTH, ROWS = 64, 384
FEW_ROWS = 32
"""Few enough for gradients to be most of what a step holds."""

IN_FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_16_BITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LARGER = ("own", "16 bits, larger", "modules", "inside")
"""Ways to shard a model first after which it is given a larger batch: others are planned anew as the first is."""
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # pytest looks for doctests here
QUICK = {"activation_budget": "75%", "time_limit_seconds": 1.0, "deterministic": True}


class Block(Layers, norm=lambda: nn.LayerNorm(WIDTH), rise=linear(WIDTH, 4 * WIDTH), fall=linear(4 * WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(F.gelu(self.rise(self.norm(x))))


class Model(nn.Module):
    """Something before the blocks and something after them, which stay eager."""

    def __init__(self, depth: int = 2) -> None:
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


def make(depth: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(depth)


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


def live() -> dict[int, torch.UntypedStorage]:
    """Return the storage of every tensor that is there, by its place, which no later tensor takes while this is held.

    Gloo's threads let go late of what earlier scenarios left: a gradient at such a place was not counted.
    """
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.device.type == "cpu"]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def peak_of(
    distribute: Callable[[], nn.Module], x: torch.Tensor, others: Mapping[int, Any], step: Callable[..., None] = step
) -> tuple[int, nn.Module]:
    """Return the peak of a later step, with all that is resident: every live tensor, and what distributing allocates.

    ``others`` are tensors that earlier scenarios have left.
    """
    with record() as recording:
        model = distribute()
    buckets_bytes = sum(change for _, change in recording.changes) if isinstance(model, DistributedDataParallel) else 0
    for _ in range(3):
        step(model, x)

    def measured() -> int:
        model.zero_grad(set_to_none=True)
        resident_bytes = sum(storage.nbytes() for place, storage in live().items() if place not in others)
        return resident_bytes + buckets_bytes + measure_peak(lambda: step(model, x), torch.device("cpu"))[0]

    peaks = Counter[int]()
    while not all_agree(is_settled(peaks)):
        peaks[measured()] += 1
    return settled(peaks), model


def is_settled(peaks: Counter[int]) -> bool:
    """Whether three steps held the least that was seen: a planned step holds the same each time, and threads add to it.

    The profiler does not see what gloo's threads free: a buffer that one of them was last to hold seems to stay, and a
    later tensor at its place may seem to go twice. On busy cores that is so in a tenth of all steps, where tokens are
    exchanged in one process in most. Python's own view has such a buffer too, for as long as the thread holds it.
    """
    return peaks.total() >= 30 or (bool(peaks) and peaks[min(peaks)] >= 3)


def settled(peaks: Counter[int]) -> int:
    """Return the least that three of some measured steps held, if there are such, else what most did."""
    return min((peak for peak, count in peaks.items() if count >= 3), default=peaks.most_common(1)[0][0])


def returned_when_only_python_holds(operator: Any, *args: Any) -> torch.Tensor:
    """Run a functional collective, and wait until gloo's thread has let go of what it was given and has made.

    A buffer that this thread is last to hold is freed unseen: it seems to stay. A captured graph lets go of what it
    sends before it waits: on a busy machine a peak was 65,536 bytes above its prediction for that.
    """
    result, give_up = operator.redispatch(DispatchKeySet(DispatchKey.CUDA), *args), time.monotonic() + 1.0
    torch.ops._c10d_functional.wait_tensor(result)
    while result._use_count() > 1 and time.monotonic() < give_up:
        time.sleep(1e-4)
    time.sleep(1e-3)  # what it was given goes after what it has made
    return result


_COLLECTIVES = Library("_c10d_functional", "IMPL")
for _name in ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"):
    _operator = getattr(torch.ops._c10d_functional, _name).default
    _COLLECTIVES.impl(_name, partial(returned_when_only_python_holds, _operator), "CPU")


def all_agree(is_so: bool) -> bool:
    """Whether something is so on every rank: they must take as many steps."""
    told = torch.tensor(float(is_so))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def wrap(model: Model, rank: int, way: str, **options: Any) -> Model:
    told = {**QUICK, "runtime": "regional", "data_parallel": way, "ranks": RANKS, **options}
    return planner.auto_wrap(model, data(rank), **grouped(**told))


def distributed(model: Model, way: str, **options: Any) -> nn.Module:
    if way == "ddp":
        return with_ddp(model)
    return fully_sharded(model, mesh=init_device_mesh("cpu", (RANKS,)), **options)


def with_ddp(model: Model, **options: Any) -> nn.Module:
    # Gloo frees what a first synchronisation sends unseen by the profiler.
    return DistributedDataParallel(model, init_sync=False, **options)


def fully_sharded(model: Model, **options: Any) -> Model:
    for unit in (*model.blocks, model):
        fully_shard(unit, **options)
    return model


def parallel(model: Model) -> Model:
    """Let the ranks share every block: its first product by columns, its second by rows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    return model


def beside_plain(made: Callable[[], nn.Module], x: torch.Tensor, last_rows: int) -> dict[str, Any]:
    """Hold a parallel model under a plan against the same without one, also with a last batch that only some have."""
    alone, others = made(), live()
    others.pop(x.untyped_storage().data_ptr())
    peak, running = peak_of(lambda: planner.auto_wrap(made(), **grouped(**QUICK)), x, others)
    step(alone, x)
    result = reported(planner.plan_of(running), gradients(running), gradients(alone), peak)
    step(running, x[:last_rows]), step(alone, x[:last_rows])
    return result | {"last_equal": same(gradients(running), gradients(alone))}


def refused(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        function()
    except errors.PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None}


def warnings_of(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as said:
        run()
    return [str(one.message) for one in said if one.category is UserWarning]
