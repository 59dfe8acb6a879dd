"""How long and how much memory does planning a large model take? The whole command, each in its own process.

Runs ``python cli.py plan MODEL ...`` under a wall clock and reads the peak resident memory of the
process, and what its JSON says about where the time went. Exit code 1 if a command fails or
misses a goal: under 30 s, under 3 GiB.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Result, percent
from planner.errors import PlannerError

COMMANDS: dict[str, list[str]] = {
    "llama-7b": ["--batch-size", "4", "--seq-len", "2048"], "gpt2-774m": [], "bert-large": [], "resnet152": [],
}  # fmt: skip
"""Options of each model; without any its sizes are those of ``python cli.py models``."""

FIRST_STEPS: dict[str, dict[str, int]] = {
    "gpt2-774m": {"batch_size": 2, "seq_len": 256},
    "bert-large": {"batch_size": 8, "seq_len": 128},
    "resnet152": {"batch_size": 8},
    "vit-b16": {"batch_size": 8, "layers": 24},
}
"""Sizes of models, as deep as in use, whose first step is held against ``torch.compile``'s with ``aot_eager``."""

WAYS = ("aot_eager", "planned", "before")
"""Compiled and not planned; planned by default; planned once the whole search is over."""

GOAL_RATIO = 1.5
GOAL_SECONDS = 30.0
GOAL_BYTES = 3 * 2**30
LIMIT_SECONDS = 300.0

IMPORTS = "import planner.api, planner.zoo, planner.report, transformers, torch._dynamo, highspy"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a child process left behind."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    peak_resident_bytes: int
    output: str
    errors: str


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("capture", __doc__)
    parser.add_argument("--first-step", action="store_true", help="time first training steps in place of commands")
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--activation-budget", metavar="SIZE", default="50%", help="(default: 50%%)")
    parser.add_argument("--layers", metavar="N", help="in place of each model's own")
    args = parser.parse_args(arguments)
    names = common.chosen(args.models, list(FIRST_STEPS if args.first_step else COMMANDS))
    common.check_destination(args.json)
    if args.first_step:
        return _first_steps(names, args.json, arguments)
    imports = finish([sys.executable, "-c", IMPORTS])
    if imports.exit_code:
        raise PlannerError(f"cannot import what a plan needs: {(imports.errors.strip().splitlines() or ['?'])[-1]}")
    result = {
        **common.environment("capture", arguments),
        "goal_seconds": GOAL_SECONDS,
        "goal_peak_resident_bytes": GOAL_BYTES,
        "import_seconds": imports.seconds,
        "rows": [],
    }
    for name in names:
        options = [*COMMANDS[name], *(["--layers", args.layers] if args.layers else [])]
        command = ["cli.py", "plan", name, *options, "--activation-budget", args.activation_budget]
        common.progress(f"python {' '.join(command)}")
        row = _row(name, command)
        result["rows"].append(row)
        common.progress(f"  {' | '.join(map(str, _cells(row)))}")
        if args.json != "-":
            common.write(args.json, result, _markdown(result))
    if args.json == "-":
        common.write("-", result, "")
    return 0 if all(row["within_goals"] for row in result["rows"]) else 1


_LAUNCHER = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
code = subprocess.call(sys.argv[2:])
seconds = time.perf_counter() - begun
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([code, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss], file)
"""
"""Runs a command from a small process: on Linux a child's peak begins at what its parent holds, here all of torch."""


def finish(command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> Finished:
    """Run a command from the project's root to its end, and read what it used.

    Its peak resident memory is that of the largest process that it consists of. What takes longer
    than the limit is killed, and has exit code 124.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors, usage = (Path(folder) / name for name in ("output", "errors", "usage"))
        with output.open("w") as output_stream, errors.open("w") as errors_stream:
            launcher = subprocess.Popen(
                [sys.executable, "-S", "-c", _LAUNCHER, str(usage), *command],
                stdin=subprocess.DEVNULL,
                stdout=output_stream,
                stderr=errors_stream,
                cwd=common.ROOT,
                start_new_session=True,
            )
            try:
                launcher.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        ended = usage.exists()
        code, seconds, cpu_seconds, peak = json.loads(usage.read_text()) if ended else (124, limit_seconds, 0.0, 0)
        return Finished(
            exit_code=code,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            peak_resident_bytes=peak * (1 if sys.platform == "darwin" else 1024),
            output=output.read_text(),
            errors=errors.read_text() if ended else f"killed after {limit_seconds:g} s",
        )


def first_step(name: str, way: str, share: str) -> None:
    """Train a model for some steps in this process, and write what they took to standard output."""
    import torch

    import planner
    from planner import zoo

    made = zoo.build(name, **FIRST_STEPS[name])
    model: Any = made.model
    if way == "aot_eager":
        model = torch.compile(model, backend=way)
    else:
        search = planner.Search(wait=way == "before")
        planner.auto_wrap(model, budget=planner.Budget(activations=share), search=search)
    seconds: list[float] = []
    until = time.perf_counter() + (60 if way == "planned" else 0)  # for the search beside, and for all that is observed
    while len(seconds) < 2 or (time.perf_counter() < until and len(seconds) < 60):
        begun = time.perf_counter()
        model(**made.example_kwargs).loss.backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - begun)
    overhead = None if way == "aot_eager" else planner.plan_of(model).overhead
    print(json.dumps({"seconds": seconds, "overhead": overhead}))


def _first_steps(names: Sequence[str], destination: str, arguments: Sequence[str]) -> int:
    result = {**common.environment("capture", arguments), "rows": []}
    for name in names:
        row: Result = {"model": name, **FIRST_STEPS[name]}
        for way in WAYS:
            call = f"from benchmarks.capture import first_step; first_step({name!r}, {way!r}, '85%')"
            common.progress(f"{name}: {way}")
            ran = finish([sys.executable, "-c", call])
            if ran.exit_code:
                raise PlannerError(f"{name}, {way}: {(ran.errors.strip().splitlines() or ['no message'])[-1]}")
            row[way] = json.loads(ran.output.splitlines()[-1])
        row["ratio"] = row["planned"]["seconds"][0] / row["aot_eager"]["seconds"][0]
        result["rows"].append(row)
    headings = ["model", *(f"{way}, s" for way in WAYS), "ratio", "overhead", "overhead, before"]
    cells = []
    for row in result["rows"]:
        seconds = (f"{row[way]['seconds'][0]:.1f}" for way in WAYS)
        overheads = (percent(row[way]["overhead"], 2) for way in WAYS[1:])
        cells.append([row["model"], *seconds, f"{row['ratio']:.2f}", *overheads])
    legend = (
        "Seconds of the first training step, with all that is captured, measured, searched for and written for it, at "
        "85% of what eager's step allocates, beside `torch.compile` with `aot_eager`, which plans nothing. *before*: "
        "the step waits for the whole search. Overhead is that of the plan in force a minute later."
    )
    common.write(destination, result, common.page("First steps", result, legend, common.table(headings, cells)))
    return 0 if all(row["ratio"] <= GOAL_RATIO for row in result["rows"]) else 1


def _row(name: str, command: Sequence[str]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.plan"
        ran = finish([sys.executable, *command, "--save", str(saved)])
        plan: dict[str, Any] = {} if ran.exit_code else json.loads(saved.read_text())
    row: Result = {
        "model": name, "command": f"python {' '.join(command)}", "exit_code": ran.exit_code, "seconds": ran.seconds,
        "cpu_seconds": ran.cpu_seconds, "peak_resident_bytes": ran.peak_resident_bytes, "within_goals": False,
    }  # fmt: skip
    if ran.exit_code:
        return {**row, "error": (ran.errors.strip().splitlines() or ["no message"])[-1]}
    return {
        **row, "within_goals": ran.seconds < GOAL_SECONDS and ran.peak_resident_bytes < GOAL_BYTES,
        "capture_seconds": plan["capture_seconds"], "solve_seconds": plan["solver"]["seconds"],
        "solver": plan["solver"]["name"], "status": plan["status"], "operations": plan["values"]["steps"],
        "budget_bytes": plan["budget_bytes"], "activation_budget_bytes": plan["activation_budget_bytes"],
        "baseline_peak_bytes": plan["baseline"]["peak_bytes"], "predicted_peak_bytes": plan["predicted"]["peak_bytes"],
        "overhead": plan["predicted"]["overhead"], "lower_bound_overhead": plan["lower_bound"]["overhead"],
    }  # fmt: skip


def _markdown(result: Result) -> str:
    goals = f"Goals: under {result['goal_seconds']:g} s and under {result['goal_peak_resident_bytes'] / 2**30:g} GiB."
    legend = (
        f"Of each command about {result['import_seconds']:.1f} s are imports. Capture includes lowering and costs; "
        "budget, unplanned and predicted peak are GiB of the whole device; bound is the proven least overhead."
    )
    headings = [
        "model", "seconds", "CPU s", "GiB used", "goals", "capture s", "solve s", "operations", "budget",
        "unplanned", "predicted", "overhead", "bound",
    ]  # fmt: skip
    commands = "\n".join(f"- `{row['command']}`" for row in result["rows"])
    rows = common.table(headings, [_cells(row) for row in result["rows"]])
    return common.page("Planning without running", result, f"{goals} {legend}", rows, commands)


def _cells(row: Result) -> list[object]:
    start = [
        row["model"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['peak_resident_bytes'] / 2**30:.2f}",
        "met" if row["within_goals"] else "missed",
    ]  # fmt: skip
    if "error" in row:
        return [*start, f"exit code {row['exit_code']}", *["-"] * 7]
    return [
        *start,
        f"{row['capture_seconds']:.1f}",
        f"{row['solve_seconds']:.1f}",
        row["operations"],
        *(f"{row[key] / 2**30:.2f}" for key in ("budget_bytes", "baseline_peak_bytes", "predicted_peak_bytes")),
        percent(row["overhead"], 2),
        percent(row["lower_bound_overhead"], 2),
    ]


if __name__ == "__main__":
    sys.exit(common.run(main))
