"""Two ranks on two devices, which speak by gloo: DDP and FSDP2 hold what plans say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.gpu_cases import Tower
from tests.cuda import gpu

gpu.required()

RANKS = 2


def train(rank: int, kind: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    where = f"file://{folder}/rendezvous"
    distributed.init_process_group("cpu:gloo,cuda:gloo", init_method=where, rank=rank, world_size=RANKS)
    model, x = Tower(256, 4).to("cuda"), torch.randn(2048, 256, device="cuda")
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    ranks = {"data_parallel": "ddp", "ranks": RANKS} if kind == "ddp" else {}
    options = {"activation_budget": "60%", "time_limit_seconds": 1, "cost_model": "roofline", **ranks}
    planner.auto_wrap(model, x, **options)
    trained = nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if kind == "ddp" else model
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        trained(x).backward()
        trained.zero_grad()
    plan = planner.plan_of(model)
    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] == pytest.approx(plan.peak_bytes, rel=1e-3)
    distributed.destroy_process_group()


@gpu.two_devices
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_hold_what_plans_say(kind: str, tmp_path: Path) -> None:
    multiprocessing.spawn(train, (kind, str(tmp_path)), nprocs=RANKS)
