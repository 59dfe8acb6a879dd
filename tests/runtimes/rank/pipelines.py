"""Scenarios of pipelines: schedules of torch, run with a plan and without one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import planner
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from planner.extras.pipelines import StagePlan, wrap_pipeline
from tests.runtimes.rank.common import RANKS, Block, data, gradients, live, refused

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
        resident_bytes = sum(size_bytes for place, size_bytes in live().items() if place not in others)
        peaks.append(resident_bytes + measure_peak(lambda: [run(), run()], torch.device("cpu"))[0])
    found = [gradient for stage in stages for gradient in gradients(stage.submod).values()]
    return min(peaks), found, plan


def documented(rank: int) -> dict[str, Any]:
    """Run what the page on pipelines shows."""
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")
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
    return {
        "zero_bubble": refused(lambda: wrapped(rank, pipelining.ScheduleZBVZeroBubble)),
        "differ": refused(lambda: wrapped(rank, gpipe, MICRO_BATCHES + 2 * rank)),
        "tight": refused(lambda: wrapped(rank, gpipe, budget="1%" if rank else "80%")),
        "no_target": refused(lambda: wrapped(rank, gpipe, labels=None)),
        "sharded": refused(lambda: wrap_pipeline(scheduled(gpipe, rank, around=in_parts)[1], budget="80%")),
        "no_schedule": refused(lambda: wrap_pipeline(Part(0), data(0), budget="80%")),
    }


SCHEDULES: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "1f1b": (pipelining.Schedule1F1B, "92%", {}),
    "1f1b_without_outputs": (pipelining.Schedule1F1B, "92%", {"return_outputs": False}),
    "gpipe": (pipelining.ScheduleGPipe, "70%", {}),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "75%", {}),
    "breadth_first": (pipelining.ScheduleLoopedBFS, "75%", {"return_outputs": False}),
}
"""Schedules of torch, with a budget at which some of their stages recompute."""
