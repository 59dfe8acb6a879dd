"""Does it take as long to compile planned blocks however many there are? Equal blocks, 12 of them and 48.

Each way runs in a process of its own, with Inductor's cache empty: planned blocks (runtime ``inductor_blocks``) without
recompute and within a budget, each block by its own ``compile()`` as torchtitan does it, and ``torch.compile`` of the
whole model. Seconds are the processor's, to the end of the first step, imports left out. Step times are held against
eager's in the same process, in turn. Exit code 1 if compiling four times as many planned blocks takes over 1.5 times as
long, planning left out, or if a step holds more than was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

import planner
from benchmarks import common
from benchmarks.common import Result, mebibytes
from benchmarks.steps import in_turn, peak_bytes, step_of
from planner.errors import PlannerError
from planner.plans.plan import Plan
from planner.runtimes.regional import blocks_of, decisions_on
from planner.zoo import ZooModel

DEPTHS = (12, 48)
ROOM = 2**40
WAYS = {
    "planned, all kept": {"budget": ROOM},
    "planned, 60% of eager's activations": {"activation_budget": "60%"},
    "each block by its own compile()": None,
    "torch.compile of the model": None,
}
SIZES = {"n_embd": 256, "n_head": 8, "vocab_size": 2000, "n_positions": 128}
BATCH = 8
GOAL = 1.5


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("compiled_blocks", __doc__)
    parser.add_argument("--depths", metavar="N,N", default=",".join(map(str, DEPTHS)), help="(default: 12,48)")
    parser.add_argument("--child", nargs=2, metavar=("DEPTH", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        print(json.dumps(_measured(int(args.child[0]), args.child[1])))
        return 0
    common.check_destination(args.json)
    result: Result = {**common.environment("compiled_blocks", arguments), "rows": []}
    for way in WAYS:
        for depth in map(int, args.depths.split(",")):
            common.progress(f"{way}, {depth} blocks")
            result["rows"].append({"way": way, "depth": depth, **_in_a_process(depth, way)})
            common.write(args.json, result, _page(result))
    return 0 if all(_is_met(rows) for way, rows in _by_way(result).items() if WAYS[way]) else 1


def _in_a_process(depth: int, way: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.compiled_blocks", "--child", str(depth), way]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlannerError(f"{way}, {depth} blocks: {done.stderr.strip().splitlines()[-1]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(depth: int, way: str) -> Result:
    """Compile a model in one way, run it, and time it beside eager."""
    plain, loaded = _built(depth), _built(depth)
    eager = step_of(plain)
    eager()  # what a process does once is not of compiling
    begun = _cpu_seconds()
    step, plan = _prepared(loaded, way)
    planned = _cpu_seconds()
    step()
    done = _cpu_seconds()
    ways = [(partial(each.model.zero_grad, True), run) for each, run in ((plain, eager), (loaded, step))]
    seconds = in_turn(ways, 20.0)
    device = torch.device("cpu")
    return {
        "planning_seconds": planned - begun,
        "first_step_seconds": done - planned,
        "step_ratio": median(own / plain for plain, own in seconds),
        "peak_bytes": peak_bytes(*ways[1], device),
        "eager_peak_bytes": peak_bytes(*ways[0], device),
        "predicted_bytes": plan.peak_bytes - plan.total_static_bytes if plan else None,
        "kinds": len({decisions_on(plan, path) for path in blocks_of(plan)}) if plan else None,
    }


def _built(depth: int) -> ZooModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=depth, use_cache=False, **SIZES)
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, SIZES["n_positions"]))
    model = transformers.GPT2LMHeadModel(config).train()
    return ZooModel(name="gpt2", model=model, example_kwargs={"input_ids": tokens, "labels": tokens})


def _cpu_seconds() -> float:
    """Return the processor's time of this process and of those that it ran, such as compilers."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _prepared(loaded: ZooModel, way: str) -> tuple[Any, Plan | None]:
    """Return what runs a step in one way, and its plan if there is one."""
    model, options = loaded.model, WAYS[way]
    if options is not None:
        given = {"example_kwargs": loaded.example_kwargs, "runtime": "inductor_blocks"}
        planner.auto_wrap(model, **given, **options)
        return step_of(loaded), planner.plan_of(model)
    if way == "torch.compile of the model":
        model.compile()
        return step_of(loaded), None
    blocks = next(child for child in model.modules() if isinstance(child, nn.ModuleList))
    for block in blocks:
        block.compile()
    return step_of(loaded), None


def _by_way(result: Result) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for row in result["rows"]:
        found.setdefault(row["way"], []).append(row)
    return found


def _grows(rows: Sequence[Result]) -> float:
    """Return how much longer the first step of the most blocks takes than that of the fewest."""
    return float(rows[-1]["first_step_seconds"] / rows[0]["first_step_seconds"])


def _is_met(rows: Sequence[Result]) -> bool:
    return _grows(rows) <= GOAL and all(row["peak_bytes"] <= row["predicted_bytes"] for row in rows)


def _page(result: Result) -> str:
    headings = ["way", "blocks", "kinds", "planned in", "first step", "step / eager", "peak", "predicted", "eager's"]
    rows = [
        [
            row["way"],
            row["depth"],
            row["kinds"] or "-",
            f"{row['planning_seconds']:.1f} s",
            f"{row['first_step_seconds']:.1f} s",
            f"{row['step_ratio']:.2f}",
            mebibytes(row["peak_bytes"]),
            mebibytes(row["predicted_bytes"]),
            mebibytes(row["eager_peak_bytes"]),
        ]
        for row in result["rows"]
    ]
    growth = [
        f"- {way}: the first step takes {_grows(found):.2f} times as long for {found[-1]['depth']} blocks as for "
        f"{found[0]['depth']}" + (f" (goal {GOAL})" if WAYS[way] else "")
        for way, found in _by_way(result).items()
        if len(found) > 1
    ]
    told = (
        f"GPT-2 with {common.sizes_text(SIZES)}, batch {BATCH}. Seconds of the processor; the first step has all of "
        "compiling in it. Kinds are blocks of which a plan asks different things. Peaks are MiB that a step allocates."
    )
    return common.page("Blocks compiled once", result, told, common.table(headings, rows), "\n".join(growth))


if __name__ == "__main__":
    sys.exit(common.run(main))
