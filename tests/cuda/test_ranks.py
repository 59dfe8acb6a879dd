"""Two ranks on two devices, by gloo or NCCL: DDP and FSDP2 hold what plans say, in every micro-batch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import planner
from benchmarks.gpu_cases import Tower
from planner.common.options import grouped
from tests.cuda import gpu

gpu.required()

RANKS, MICRO_BATCHES = 2, 3
WATCHDOG_SECONDS = 0.3
"""After so long torch's watchdog of NCCL has seen that what was sent is, and lets go of it: of DDP's first buckets."""


def train(rank: int, kind: str, backend: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    where = f"file://{folder}/rendezvous"
    distributed.init_process_group(f"cpu:gloo,cuda:{backend}", init_method=where, rank=rank, world_size=RANKS)
    offloads = kind == "fsdp2, offloaded"
    model, x = Tower(256, 4).to("cpu" if offloads else "cuda"), torch.randn(2048, 256, device="cuda")
    if kind.startswith("fsdp2"):
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        mesh = init_device_mesh("cuda", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
    ranks = {"data_parallel": "ddp", "ranks": RANKS} if kind == "ddp" else {}
    options = {"activation_budget": "60%", "time_limit_seconds": 1, "cost_model": "roofline", **ranks}
    planner.auto_wrap(model, x, **grouped(**options))
    trained = nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if kind == "ddp" else model
    for number in range(3 * MICRO_BATCHES):
        sends = number % MICRO_BATCHES == MICRO_BATCHES - 1
        if kind != "ddp":
            trained.set_requires_gradient_sync(sends)
        torch.cuda.reset_peak_memory_stats()
        with trained.no_sync() if kind == "ddp" and not sends else nullcontext():
            trained(x).backward()
        plan = planner.plan_of(model)
        if number >= MICRO_BATCHES:
            allocated_bytes = torch.cuda.max_memory_allocated()
            assert allocated_bytes <= plan.budget_bytes
            assert plan.reserved and allocated_bytes == pytest.approx(plan.reserved.allocated_bytes, rel=0.01)
            assert torch.cuda.memory_stats()["requested_bytes.all.peak"] == pytest.approx(plan.peak_bytes, rel=1e-3)
        if sends:
            trained.zero_grad()
            time.sleep(WATCHDOG_SECONDS)
    distributed.destroy_process_group()


@gpu.two_devices
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2, offloaded"])
def test_ranks_hold_what_plans_say(kind: str, backend: str, tmp_path: Path) -> None:
    multiprocessing.spawn(train, (kind, backend, str(tmp_path)), nprocs=RANKS)
