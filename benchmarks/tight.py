"""How good are plans near the smallest budget? Models and random graphs at 1.00 to 1.5 times their lowest peak.

First the lowest peak is looked for: what no plan goes below, and what a plan was found for. Of the second, budgets are
multiples, and its plan is known from there on, as it is to ``plan`` once it has named that peak. For each: overhead,
proven bound, the gap in points, and the seconds it took, of time and of the processor.
Models are captured without memory, and costs are those of the roofline of the device, so that no number but seconds
depends on the machine, beside what solvers come to in their time.

Exit code 1 if a gap is above 0.5 points at 1.05 and more, or above 1 point below, or a lowest peak is not proven to
within 1%.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import common
from benchmarks.cases import ARCHITECTURES
from benchmarks.common import Result, mebibytes, percent
from benchmarks.diffusion import diffusion_unet
from planner import solvers, zoo
from planner.capture.fake_internals import fake_mode
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.common.limits import SolveLimits
from planner.common.options import Target
from planner.errors import InfeasibleBudgetError
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem, Solution
from planner.ir.schedule import Schedule
from planner.measure.costing import operation_costs
from planner.session.step import Options, lower_step
from planner.solvers.auto import AutoSolver
from planner.solving.peak_bounds import proven_lowest
from planner.zoo import ZooModel

FACTORS = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5)
"""Budgets, as multiples of the lowest peak that was reached."""

GOAL_POINTS, GOAL_POINTS_NEAR, NEAR, GOAL_FLOOR = 0.5, 1.0, 1.05, 0.01
"""The largest gaps: at so many times the floor and more, below that, and between the proven and the reached floor."""

Costed = tuple[TrainingGraph, tuple[OperationCost, ...]]


class StackedCells(nn.Module):
    """Recurrent cells on top of each other, each step of each a few operations of its own."""

    def __init__(self, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        xs = list(self.tokens(input_ids).unbind(1))
        for cell in self.cells:
            state = (torch.zeros_like(xs[0]), torch.zeros_like(xs[0]))
            for position, x in enumerate(xs):
                state = cell(x, state)
                xs[position] = state[0]
        return functional.cross_entropy(self.head(torch.stack(xs, 1)).flatten(0, 1), labels.flatten())


class _Mixed(nn.Module):
    """Four ways side by side, put together again."""

    def __init__(self, channels: int) -> None:
        super().__init__()

        def way(*sizes: int) -> nn.Sequential:
            parts: list[nn.Module] = []
            last = channels
            for size in sizes:
                width = channels // 4
                parts += [nn.Conv2d(last, width, size, padding=size // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                last = width
            return nn.Sequential(*parts)

        self.ways = nn.ModuleList([way(1), way(1, 3), way(1, 3, 3), nn.Sequential(nn.MaxPool2d(3, 1, 1), *way(1))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


class _Grown(nn.Module):
    """Adds a few channels to all that came before."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Pictures(nn.Module):
    """Blocks between a first convolution and a classifier, halved where that is said."""

    def __init__(self, channels: int, blocks: Sequence[nn.Module], last: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(last, 100)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(self.first(pixel_values)).mean((2, 3))), labels)


def _inception() -> nn.Module:
    stages = [[_Mixed(128) for _ in range(3)], [_Mixed(128) for _ in range(3)], [_Mixed(128) for _ in range(2)]]
    return Pictures(128, [part for stage in stages for part in (*stage, nn.MaxPool2d(2))], 128)


def _densenet() -> nn.Module:
    parts: list[nn.Module] = []
    channels, growth = 64, 32
    for depth in (4, 6, 8):
        for _ in range(depth):
            parts.append(_Grown(channels, growth))
            channels += growth
        parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    return Pictures(64, parts, channels)


def _own(make: Callable[[], nn.Module], *, size: int) -> ZooModel:
    images = {"pixel_values": torch.randn(16, 3, size, size), "labels": torch.randint(100, (16,))}
    return ZooModel(name="", model=make().train(), example_kwargs=images)


def _stacked_cells() -> ZooModel:
    example = {name: torch.randint(1000, (64, 24)) for name in ("input_ids", "labels")}
    return ZooModel(name="", model=StackedCells().train(), example_kwargs=example)


MODELS: dict[str, Callable[[], ZooModel]] = {
    **{
        name: partial(zoo.build, name)
        for name in (
            "vit-b16", "resnet50", "unet", "convnext-tiny", "whisper-small-encoder", "gpt2",
            "bert-large", "gpt2-774m", "t5-base",
        )
    },
    **{name: ARCHITECTURES[name] for name in ("mamba2", "bamba", "swin", "deberta-v2", "mobilenet-v2")},
    "diffusion-unet": diffusion_unet,
    "stacked-cells": _stacked_cells,
    "inception": partial(_own, _inception, size=64),
    "densenet": partial(_own, _densenet, size=64),
}  # fmt: skip
"""Of the zoo at its usual sizes; small ones of other architectures; three that are hard to plan."""

RANDOM = (300, 1000, 3000, 7000)
"""Operations of the random graphs, about."""

NAMES = (*MODELS, *(f"random-{count}" for count in RANDOM))


def costed(name: str, device: str) -> Costed:
    """Capture a model without memory, or make a random graph; with costs."""
    if name not in MODELS:
        return random_step(int(name.removeprefix("random-")), seed=0)
    return lowered(name, MODELS[name], device)


def lowered(name: str, make: Callable[[], ZooModel], device: str) -> Costed:
    """Capture a model without memory, with costs."""
    with fake_mode():
        made = make()
    joint = capture(made.model, Inputs.of(made.example_args or None, made.example_kwargs or None))
    options = Options(target=Target(device), name=name)
    step = lower_step(made.model, joint, options)
    return step.lowered.graph, tuple(operation_costs(step.lowered.graph, step.spec, options.target.cost_model))


def random_step(operations: int, *, seed: int) -> Costed:
    """Make a training step of a random forward: each operation reads results that are not long made.

    Its backward goes the same way back. For each operation it reads the gradient of the result and some of what the
    forward read and made, and makes a gradient of each input, which are added up where there are several.
    """
    rng = random.Random(seed)
    tape = _Tape()
    forward: list[tuple[tuple[int, ...], int]] = []
    made: list[int] = []
    for _ in range(operations * 3 // 7):
        near = made[-8:] if rng.random() < 0.9 else made
        inputs = tuple(sorted(set(rng.choices(near, k=rng.choice([1, 1, 2]))))) if made else ()
        output = tape.run(inputs, rng.choice([1, 2, 4, 8]) * 2**20, rng.choice([1, 2, 4, 20, 40]), Phase.FORWARD)
        forward.append((inputs, output))
        made.append(output)
    loss = tape.run(tuple(made[-8:]), 512, 1, Phase.LOSS)
    gradients: dict[int, int] = dict.fromkeys(made[-8:], loss)
    for inputs, output in reversed(forward):
        if output not in gradients:
            continue
        saved = tuple(u for u in (*inputs, output) if rng.random() < 0.7)
        read = tuple(dict.fromkeys((gradients[output], *saved)))
        tape.run(read, 2**16, rng.choice([2, 8, 40]), Phase.BACKWARD, retained=True)
        for u in inputs:
            own = tape.run(read, tape.values[u].size_bytes, rng.choice([2, 8, 40]), Phase.BACKWARD)
            both = (gradients.get(u, own), own)
            gradients[u] = own if u not in gradients else tape.run(both, tape.values[u].size_bytes, 1, Phase.BACKWARD)
    return TrainingGraph(operations=tuple(tape.operations), values=tuple(tape.values)), tuple(tape.costs)


class _Tape:
    """Operations of one result each."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.values: list[Value] = []
        self.costs: list[OperationCost] = []

    def run(self, inputs: Sequence[int], size_bytes: int, cost: int, phase: Phase, *, retained: bool = False) -> int:
        """Add an operation of some tens of microseconds; give its result."""
        u, name = len(self.values), f"o{len(self.operations)}"
        self.values.append(Value(name=name, size_bytes=size_bytes, retained=retained))
        made = Operation(name=name, key=name, target="random", inputs=tuple(inputs), outputs=(u,), phase=phase)
        self.operations.append(made)
        self.costs.append(OperationCost(seconds=cost * 1e-5))
        return u


def floor_of(name: str, step: Costed, limits: SolveLimits) -> tuple[Result, Schedule]:
    """Look for the lowest peak from both sides; give its plan, too."""
    graph, costs = step
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    started, processor = time.perf_counter(), time.process_time()
    proven_bytes = proven_lowest(problem)
    lowest = AutoSolver().lowest(replace(problem, budget_bytes=proven_bytes), effort=limits)
    reached_bytes = problem.evaluate(lowest).peak_bytes
    floor = {
        "case": name, "operations": len(graph.operations), "peak_bytes": problem.baseline.peak_bytes,
        "proven_bytes": proven_bytes, "reached_bytes": reached_bytes, "gap": reached_bytes / proven_bytes - 1,
        "seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - processor,
    }  # fmt: skip
    return floor, lowest


def planned(floor: Result, lowest: Schedule, step: Costed, factor: float, limits: SolveLimits) -> Result:
    """Plan for a multiple of the lowest peak that was reached; its plan is known, unless seconds do not count."""
    graph, costs = step
    problem = Problem(graph=graph, costs=costs, budget_bytes=int(factor * floor["reached_bytes"]))
    row: Result = {"case": floor["case"], "factor": factor, "budget_bytes": problem.budget_bytes}
    started, processor = time.perf_counter(), time.process_time()
    found: Solution | None = None
    with suppress(InfeasibleBudgetError):
        found = solvers.solved(problem, AutoSolver(None if limits.deterministic else lowest), effort=limits)
    row["seconds"], row["processor_seconds"] = time.perf_counter() - started, time.process_time() - processor
    if found is None:
        return {**row, "overhead": None, "bound": None, "gap_points": None}
    whole = problem.baseline.seconds
    return {
        **row,
        "overhead": found.recompute_seconds / whole,
        "bound": found.lower_bound_seconds / whole,
        "gap_points": 100 * (found.recompute_seconds - found.lower_bound_seconds) / whole,
        "solver": found.solver,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("tight", __doc__, resumes=True)
    parser.add_argument("--cases", metavar="NAMES", help=f"of {', '.join(NAMES)} (default: all)")
    multiples = partial(common.ratios, are_multiples=True)
    parser.add_argument("--factors", metavar="PERCENT", type=multiples, default=FACTORS, help="default: 100 to 150")
    parser.add_argument("--device", default="a100-80", help="whose roofline (default: a100-80)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    parser.add_argument("--deterministic", action="store_true", help="count work, and not seconds")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    names = common.chosen(args.cases, NAMES)
    before = common.earlier("tight", args.json) if args.resume else {}
    result: Result = {
        **common.environment("tight", arguments),
        "floors": list(before.get("floors", [])),
        "rows": list(before.get("rows", [])),
    }
    done = {row["case"] for row in result["floors"]}
    limits = SolveLimits(time_limit_seconds=args.time_limit, deterministic=args.deterministic)
    for name in names:
        if name in done:
            continue
        step = costed(name, args.device)
        floor, lowest = floor_of(name, step, limits)
        common.progress(" | ".join(map(str, _floor_cells(floor))))
        rows = []
        for factor in args.factors:
            rows.append(planned(floor, lowest, step, factor, limits))
            common.progress("  " + " | ".join(map(str, _cells(rows[-1]))))
        result["floors"].append(floor)
        result["rows"] += rows
        common.write(args.json, result, _markdown(result))
    print(_markdown(result), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0 if not _missed(result) else 1


def _misses(row: Result) -> bool:
    goal = GOAL_POINTS if row["factor"] >= NEAR else GOAL_POINTS_NEAR
    return row["gap_points"] is None or row["gap_points"] > goal


def _missed(result: Result) -> list[Result]:
    floors = [row for row in result["floors"] if row["gap"] > GOAL_FLOOR]
    return [*floors, *filter(_misses, result["rows"])]


def _markdown(result: Result) -> str:
    rows, floors = result["rows"], result["floors"]
    near, far = ([row for row in rows if (row["factor"] >= NEAR) == is_far] for is_far in (False, True))

    def kept(some: list[Result]) -> str:
        return f"{sum(not _misses(row) for row in some)} of {len(some)}"

    proven = sum(row["gap"] <= GOAL_FLOOR for row in floors)
    return common.page(
        "Tight budgets",
        result,
        "Budgets are multiples of the lowest peak that was reached, whose plan is known from there on, as it is to "
        "`plan` once it has named that peak; peaks are above what is resident. Overhead is the "
        "time of recomputation over the step without any. Seconds *of processor* are what all threads got: less than "
        "the time that passed where others use the machine, more where both threads of a solve had a core each.",
        f"Gaps of at most {GOAL_POINTS:g} points at {NEAR:g} and above: {kept(far)}; of at most "
        f"{GOAL_POINTS_NEAR:g} below: {kept(near)}. Lowest peaks proven to within {percent(GOAL_FLOOR, 0)}: "
        f"{proven} of {len(floors)}.",
        common.table(
            [
                "case", "operations", "as it is, MiB", "reached, MiB", "none below, MiB", "gap", "seconds",
                "of processor",
            ],
            [_floor_cells(row) for row in floors],
        ),
        common.table(
            ["case", "budget", "overhead", "bound", "gap, points", "seconds", "of processor", "solver"],
            [_cells(row) for row in rows],
        ),
    )  # fmt: skip


def _floor_cells(row: Result) -> list[Any]:
    sizes = [mebibytes(row[name]) for name in ("peak_bytes", "reached_bytes", "proven_bytes")]
    return [row["case"], row["operations"], *sizes, percent(row["gap"]), *_times(row)]


def _cells(row: Result) -> list[Any]:
    return [
        row["case"], f"{row['factor']:.2f}", percent(row["overhead"], 2), percent(row["bound"], 2),
        "no plan" if row["gap_points"] is None else f"{row['gap_points']:.2f}", *_times(row), row.get("solver", "-"),
    ]  # fmt: skip


def _times(row: Result) -> list[str]:
    return [f"{row[name]:.1f}" for name in ("seconds", "processor_seconds")]


if __name__ == "__main__":
    sys.exit(common.run(main))
