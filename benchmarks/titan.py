"""torchtitan's debug Llama on two ranks: its own checkpointing modes beside plans, over twenty steps.

Model, sharding and checkpointing are torchtitan's own (``model_registry``, ``parallelize_llama``, its policies).
Attention is its ``ScaledDotProductAttention``, since flex attention needs a compiler on a CPU. Types are float32: most
CPUs multiply bfloat16 many times slower (one with AVX2 alone, sixteen times). torchtitan is no
dependency: put it on ``PYTHONPATH``. Peaks are of forward, loss and backward beside what is resident; of several steps
the lowest, since the profiler does not see what gloo's threads free. Recompute is counted and not timed: the products
that run on top of those of a step without checkpointing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import planner
from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from planner.capture.memory import measure_peak

RANKS, STEPS, BATCH, LENGTH = 2, 20, 1, 512
SHARES = (0.95, 0.8)
"""Budgets of plans, in parts of the peak of one of torchtitan's modes."""

RATIOS = (0.5, 0.2)
"""Of its mode that leaves the choice to PyTorch's partitioner."""

_HEADINGS = [
    "mode",
    "losses as without",
    "peak, MiB",
    "of none",
    "predicted, MiB",
    "products again",
    "attentions again",
]


def main(arguments: Sequence[str]) -> int:
    """Run every mode on two ranks, one after the other."""
    asked = common.parser("titan", __doc__)
    asked.add_argument("--rank-of", help="what one rank is to run; not for people")
    options = asked.parse_args(arguments)
    if options.rank_of:
        _run_rank(json.loads(options.rank_of))
        return 0
    common.check_destination(options.json)
    result: Result = common.environment("titan", arguments)
    result["rows"] = rows = []
    for mode in ("none", "full", "selective"):
        rows.append(_ran(mode, mode=mode))
    _plans(rows, "selective", SHARES)
    result["compiled"] = rows = []
    for mode in ("none", "selective", *(f"memory budget {ratio}" for ratio in RATIOS)):
        rows.append(_ran(mode, mode=mode, compiled=True))
    for mode in ("selective", f"memory budget {RATIOS[0]}"):
        _plans(rows, mode, SHARES, compiled=True)
    common.write(options.json, result, _page(result))
    return 0


def _plans(rows: list[Result], beside: str, shares: Sequence[float], **asked: Any) -> None:
    """Add rows of plans whose budgets are shares of the peak of a mode."""
    (peak_bytes,) = (row["peak_bytes"] for row in rows if row["name"] == beside)
    for share in shares:
        name = f"plan, {share:.0%} of {beside}"
        rows.append(_ran(name, mode="plan", budget_bytes=int(share * peak_bytes), **asked))


def _ran(name: str, **asked: Any) -> Result:
    """Return what both ranks found: the higher peak, and of everything else what rank 0 says."""
    common.progress(name)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.titan", "--rank-of", json.dumps({**asked, "folder": folder})]
        environment = {**os.environ, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(RANKS)]
        for rank in ranks:
            if rank.wait():
                raise planner.errors.PlannerError(f"a rank of {name} failed: see above")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    return {"name": name, **found[0], "peak_bytes": max(one["peak_bytes"] for one in found)}


def _run_rank(asked: Result) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    store = (Path(asked["folder"]) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = _debug_llama(asked["mode"], compiled=asked.get("compiled", False))
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(2048, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    labels = batches[0][:, 1:]

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    if asked["mode"] == "plan":
        planner.auto_wrap(
            model, activation_budget=asked["budget_bytes"], loss_fn=loss_of, time_limit_seconds=20.0, deterministic=True
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    losses = []
    for batch in batches:
        labels = batch[:, 1:]
        loss = loss_of(model(batch[:, :-1].contiguous()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss

    tokens = batches[-1][:, :-1].contiguous()

    def step() -> None:
        loss_of(model(tokens)).backward()

    peaks = []
    for _ in range(6):
        optimizer.zero_grad()
        peaks.append(measure_peak(step, torch.device("cpu"))[0])
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, profile_memory=True) as seen:
        step()
    ran = [event for event in seen.events() if _ran_here(event)]
    plan = planner.plan_of(model) if asked["mode"] == "plan" else None
    found = {
        "losses": losses,
        "peak_bytes": min(peaks),
        "predicted_bytes": plan.peak_bytes - sum(plan.static_bytes.values()) if plan else None,
        "budget_bytes": asked.get("budget_bytes"),
        "flops": sum(event.flops or 0 for event in ran),
        "attentions": sum(event.name == _ATTENTION for event in ran),
        "runtime": plan.runtime if plan else None,
    }
    (Path(asked["folder"]) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _ran_here(event: Any) -> bool:
    """Whether an operator ran its kernel, and was not only passed on by a dispatch mode, or taken from what it kept."""
    inside = list(event.cpu_children)
    for child in inside:
        inside += child.cpu_children
    return event.cpu_memory_usage > 0 and all(child.name != event.name for child in inside)


_MODULES = (
    "config", "distributed.parallel_dims", "distributed.activation_checkpoint", "models.common.attention",
    "models.llama3",
)  # fmt: skip


def _debug_llama(mode: str, *, compiled: bool) -> nn.Module:
    """Return torchtitan's model as its trainer has it: sharded over the ranks, and under one of its policies.

    Compiled are its blocks, each by itself.
    """
    titan: dict[str, Any] = {name: import_module(f"torchtitan.{name}") for name in _MODULES}
    config, parallel_dims = titan["config"], titan["distributed.parallel_dims"]
    policies = titan["distributed.activation_checkpoint"]
    parallel_dims.device_type = "cpu"  # where there is no accelerator it takes CUDA
    spec = titan["models.llama3"].model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = titan["models.common.attention"].ScaledDotProductAttention.Config()
    backend, alone = "partial_dtensor", dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1)
    dims = parallel_dims.ParallelDims(dp_shard=RANKS, world_size=RANKS, spmd_backend=backend, **alone)
    torch.manual_seed(0)
    model: Any = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.TrainingConfig(mixed_precision_param="float32"),
        parallelism=config.ParallelismConfig(spmd_backend=backend),
        compile_config=config.CompileConfig(enable=compiled, components=["model"]),
        ac_config={
            "full": policies.FullAC.Config(),
            "selective": policies.SelectiveAC.Config(),
            **{f"memory budget {ratio}": policies.MemoryBudgetAC.Config(memory_budget=ratio) for ratio in RATIOS},
        }.get(mode),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo scales no gradients while it sums them
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    return model


def _table(rows: Sequence[Result]) -> str:
    """Show modes beside the first of them, which is without checkpointing."""
    none = rows[0]
    cells = [
        [
            row["name"],
            f"{sum(map(float.__eq__, row['losses'], none['losses']))} of {STEPS}",
            mebibytes(row["peak_bytes"]),
            percent(row["peak_bytes"] / none["peak_bytes"]),
            mebibytes(row["predicted_bytes"]),
            percent(row["flops"] / none["flops"] - 1),
            row["attentions"] - none["attentions"],
        ]
        for row in rows
    ]
    return common.table(_HEADINGS, cells)


def _page(result: Result) -> str:
    furthest = max(
        abs(own - plain)
        for row in result["compiled"]
        for own, plain in zip(row["losses"], result["rows"][0]["losses"], strict=True)
    )
    return common.page(
        "torchtitan",
        result,
        f"torchtitan's debug Llama (six blocks of width 256), sharded by its own code over {RANKS} ranks of gloo on "
        f"CPUs: float32, {BATCH} sequence of {LENGTH} tokens on each rank, AdamW, "
        f"{STEPS} steps. *Full* and *selective* are its own checkpointing modes, *none* is without. A plan's budget is "
        "for what a step adds to what is resident: a part of the peak of another mode. Losses are compared bit for "
        "bit. Peaks are of the higher rank; a prediction counts the logits as held to the end of the step, which this "
        "loop lets go. *Products again*: flops of matrix products beyond those of *none*.",
        _table(result["rows"]),
        "## Its blocks compiled",
        "Each block is compiled by torchtitan's own code (`compile.enable`), without a plan and with *memory budget* "
        "by `torch.compile`, with a plan by the runtime `inductor_blocks`, which is taken without being named. Losses "
        f"are compared with those of *none*, compiled; none of any mode is further than {furthest:.1e} from *none* in "
        "eager.",
        _table(result["compiled"]),
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
