"""Loops as people write them: does a whole training step keep its budget, and is its peak the predicted one.

Each loop is run plain and wrapped, with the product's defaults, under a budget that leaves it a share of what it
allocates. Peaks are of the whole iteration. In a run of its own an early step is measured, and in another the eighth.
On a GPU, or a stand-in for one, all that is on the device counts. On a CPU what the wrapped models have and what a loop
makes count, but not a second model that was there before. Exit code 1 if a step is above its budget, or if bits differ
from the plain loop's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from benchmarks import common
from benchmarks.common import Result
from planner.capture.memory import measure_peak, record
from planner.common.units import format_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = (3, 8) if DEVICE.type == "cpu" else (4, 8)
"""The steps that are measured; in the third, kernels are tried on a GPU before it is planned again."""
WIDTH, ROWS, WORDS = 64, 256, 512


class Tower(nn.Module):
    """Blocks of a transformer without attention, and a head."""

    def __init__(self, outputs: int = WORDS, blocks: int = 8, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class WithLoss(Tower):
    """Returns its loss beside its logits, as models of Hugging Face do."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Images(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) for _ in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@dataclass
class Loop:
    """A loop: what is wrapped, what else is on the device, and an iteration."""

    wrapped: list[nn.Module]
    run: Callable[[], Any]
    data: list[Tensor] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    beside: list[nn.Module] = field(default_factory=list)
    """What is made on the way."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Outputs of the last iteration."""
    runtime: str = "auto"
    share: float = 1.0
    """Of the usual budget."""

    def resident_bytes(self) -> int:
        """Return what is on the device between two iterations."""
        if DEVICE.type == "cuda":
            return torch.cuda.memory_allocated()
        tensors = [t for model in (*self.wrapped, *self.beside) for t in (*model.parameters(), *model.buffers())]
        tensors += [p.grad for p in tensors if p.grad is not None] + self.data
        tensors += [output for outputs in self.kept.values() for output in outputs.values()]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        storages = {s.data_ptr(): s.nbytes() for t in tensors for s in [t.untyped_storage()]}
        return sum(storages.values())


LOOPS: dict[str, Callable[[], Loop]] = {}


def loop(name: str) -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    """Register a loop under a name."""

    def registered(make: Callable[[], Loop]) -> Callable[[], Loop]:
        LOOPS[name] = make
        return make

    return registered


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.arange(ROWS) % WORDS


def _adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-3)


def _step(optimizer: torch.optim.Optimizer) -> None:
    with torch.device("cpu"):  # where torch 2.11 else counts AdamW's steps on the default device, which may be fake
        optimizer.step()
    optimizer.zero_grad()


Iteration = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def iteration(name: str, kind: type[Tower] = Tower) -> Callable[[Iteration], Iteration]:
    """Register the loop of one model, AdamW and a batch that has this iteration."""

    def registered(iterate: Iteration) -> Iteration:
        def made() -> Loop:
            model, (x, y) = kind(), _batch()
            optimizer = _adamw(model)
            return Loop([model], partial(iterate, model, optimizer, x, y), data=[x, y], optimizers=[optimizer])

        LOOPS[name] = made
        return iterate

    return registered


@iteration("loss outside, AdamW")
def _outside(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    _step(optimizer)


@loop("loss outside, logits held, label smoothing, accuracy")
def _accuracy() -> Loop:
    model, (x, y) = Tower(), _batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        accuracy = (logits.argmax(1) == y).float().mean()
        loss.backward()
        _step(optimizer)
        assert accuracy.item() >= 0

    return Loop([model], run, data=[x, y], optimizers=[optimizer])


@loop("images, autocast, clipping")
def _images() -> Loop:
    model, x, y = Images(), torch.randn(8, 3, 32, 32), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _step(optimizer)

    return Loop([model], run, data=[x, y], optimizers=[optimizer])


@iteration("own loss, logits dropped (Trainer)", WithLoss)
def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x, y)["loss"]
    loss.backward()
    _step(optimizer)


@loop("own loss, outputs bound again")
def _kept() -> Loop:
    model, (x, y) = WithLoss(), _batch()
    optimizer = _adamw(model)
    kept: dict[str, Any] = {}

    def run() -> None:
        kept["outputs"] = model(x, y)
        kept["outputs"]["loss"].backward()
        _step(optimizer)

    return Loop([model], run, data=[x, y], optimizers=[optimizer], kept=kept)


@iteration("four micro-batches", WithLoss)
def _micro(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for part in range(4):
        (model(x, y.roll(part))["loss"] / 4).backward()
    _step(optimizer)


@iteration("gradients zeroed after the forward (Lightning)", WithLoss)
def _zeroed_late(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x, y)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@loop("two calls, contrastive loss")
def _contrastive() -> Loop:
    model, (x, _) = Tower(128), _batch()
    other, optimizer = x + 0.1 * torch.randn_like(x), _adamw(model)

    def run() -> None:
        left, right = F.normalize(model(x)), F.normalize(model(other))
        F.cross_entropy(left @ right.T / 0.1, torch.arange(ROWS)).backward()
        _step(optimizer)

    return Loop([model], run, data=[x, other], optimizers=[optimizer])


@loop("a cell, called six times")
def _cell() -> Loop:
    model, (x, _) = Tower(WIDTH, blocks=3), _batch()
    optimizer = _adamw(model)

    def run() -> None:
        state, total = torch.zeros_like(x), torch.zeros(())
        for _ in range(6):
            state = model(x + state)
            total = total + state.square().mean()
        total.backward()
        _step(optimizer)

    return Loop([model], run, optimizers=[optimizer])


@loop("generator and discriminator")
def _gan() -> Loop:
    maker, judge, (real, _) = Tower(WIDTH), Tower(1), _batch()
    of_maker, of_judge = _adamw(maker), _adamw(judge)

    def run() -> None:
        made = maker(torch.randn(ROWS, WIDTH))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        loss.backward()
        _step(of_judge)
        F.softplus(-judge(made)).mean().backward()
        _step(of_maker)
        of_judge.zero_grad()

    return Loop([maker, judge], run, data=[real], optimizers=[of_maker, of_judge])


@loop("teacher and student")
def _teacher() -> Loop:
    student, teacher, (x, _) = Tower(blocks=6), Tower(blocks=10).requires_grad_(False), _batch()
    optimizer = _adamw(student)

    def run() -> None:
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        F.kl_div(F.log_softmax(student(x) / 2, -1), wanted, reduction="batchmean").backward()
        _step(optimizer)

    return Loop([student], run, data=[x], optimizers=[optimizer])


@loop("preferences with a reference (DPO)")
def _preferences() -> Loop:
    model, reference, (x, y) = Tower(), Tower().requires_grad_(False), _batch()
    optimizer = _adamw(model)

    def run() -> None:
        chosen = -F.cross_entropy(model(x), y, reduction="none")
        with torch.no_grad():
            base = -F.cross_entropy(reference(x), y, reduction="none")
        ratio = (chosen - base).view(2, -1)
        F.softplus(0.1 * (ratio[1] - ratio[0])).mean().backward()
        _step(optimizer)

    return Loop([model], run, data=[x, y], optimizers=[optimizer])


@loop("cached representations (GradCache)")
def _cached() -> Loop:
    model, x = Tower(64, dropout=0.0), torch.randn(2 * ROWS, WIDTH)
    optimizer = _adamw(model)

    def run() -> None:
        with torch.no_grad():
            found = torch.cat([model(part) for part in x.chunk(2)])
        found.requires_grad_()
        F.cross_entropy(found @ found.T, torch.arange(len(x))).backward()
        assert found.grad is not None
        for part, gradient in zip(x.chunk(2), found.grad.chunk(2), strict=True):
            (model(part) * gradient).sum().backward()
        _step(optimizer)

    return Loop([model], run, data=[x], optimizers=[optimizer])


@iteration("two backwards of two calls (GRPO)")
def _two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for part in range(2):
        first = F.cross_entropy(model(x), y.roll(part))
        second = F.cross_entropy(model(x.flip(0)), y)
        (first + second).backward()
    _step(optimizer)


@iteration("two losses, retain_graph")
def _retained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    logits = model(x)
    F.cross_entropy(logits, y).backward(retain_graph=True)
    logits.square().mean().backward()
    _step(optimizer)


@loop("gradient penalty around the model")
def _penalty() -> Loop:
    model, (x, _) = Tower(1, dropout=0.0), _batch()
    optimizer, given = _adamw(model), x.clone().requires_grad_()

    def run() -> None:
        score = model(given).sum()
        (gradient,) = torch.autograd.grad(score, given, create_graph=True)
        (score + (gradient.norm(dim=1) - 1).square().mean()).backward()
        given.grad = None
        _step(optimizer)

    return Loop([model], run, data=[given], optimizers=[optimizer], runtime="modules", share=1.3)


@loop("average of weights, made after the first step")
def _average() -> Loop:
    model, (x, y) = WithLoss(), _batch()
    optimizer, average = _adamw(model), nn.ParameterList()

    def run() -> None:
        model(x, y)["loss"].backward()
        _step(optimizer)
        with torch.no_grad():
            if not average:
                average.extend(p.detach().clone() for p in model.parameters())
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    return Loop([model], run, data=[x, y], optimizers=[optimizer], beside=[average])


@loop("an optimizer for each parameter, in the backward")
def _in_backward() -> Loop:
    model, (x, y) = WithLoss(), _batch()
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, its=optimizer: _step(its))
    return Loop([model], lambda: model(x, y)["loss"].backward(), data=[x, y], optimizers=[*optimizers.values()])


@iteration("saved tensors on the host (save_on_cpu around)", WithLoss)
def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = model(x, y)["loss"]
    loss.backward()
    _step(optimizer)


@contextmanager
def _warned() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if "planner" in str(w.filename) or "plan" in str(w.message)]


def _peak(made: Loop, steps: int) -> tuple[int, int]:
    """Return what is on the device before an iteration that comes after others, and the peak that it adds."""
    for _ in range(steps - 1):
        made.run()
    gc.collect()
    with record() if DEVICE.type == "cpu" else nullcontext():  # torch sees go only what it saw come
        for key, outputs in made.kept.items():
            made.kept[key] = {name: output.detach().clone() for name, output in outputs.items()}
    found_bytes = made.resident_bytes()
    peak_bytes, _ = measure_peak(made.run, DEVICE)
    return found_bytes, peak_bytes


def _made(make: Callable[[], Loop]) -> Loop:
    torch.manual_seed(0)
    return make()


def tried(make: Callable[[], Loop], share: float, seconds: float) -> Result:
    """Run one loop plain and wrapped."""
    plain = _made(make)
    found_bytes, added_bytes = _peak(plain, max(STEPS))
    budget_bytes = found_bytes + int(added_bytes * share * plain.share)
    expected = [p.detach().cpu() for model in plain.wrapped for p in model.parameters()]
    del plain
    result: Result = {"plain_bytes": found_bytes + added_bytes, "budget_bytes": budget_bytes, "steps": [], "said": []}
    for steps in STEPS:
        gc.collect()  # nothing of a run before is to be on the device
        try:
            planned = _planned(make, budget_bytes, seconds, steps)
        except planner.errors.PlannerError as error:
            return result | {"refused": f"{type(error).__name__}: {error}"}
        result["steps"].append(planned["step"])
        result["runtimes"] = planned["runtimes"]
        result["said"] = list(dict.fromkeys([*result["said"], *planned["said"]]))
        result["equal"] = all(map(torch.equal, expected, planned["parameters"]))
    return result


def _planned(make: Callable[[], Loop], budget_bytes: int, seconds: float, steps: int) -> Result:
    """Run a loop wrapped, and measure its last iteration."""
    made = _made(make)
    with _warned() as said:
        for model in made.wrapped:
            search = planner.Search(time_limit_seconds=seconds)
            planner.auto_wrap(model, budget=budget_bytes, runtime=made.runtime, search=search)
        peak_bytes = sum(_peak(made, steps))
    plans = [planner.plan_of(model) for model in made.wrapped]
    predicted_bytes = max(plan.peak_bytes for plan in plans)
    return {
        "step": {"step": steps, "peak_bytes": peak_bytes, "predicted_bytes": predicted_bytes},
        "runtimes": [plan.runtime for plan in plans],
        "said": said,
        "parameters": [p.detach().cpu() for model in made.wrapped for p in model.parameters()],
    }


def _row(name: str, row: Result) -> list[str]:
    budget_bytes = row["budget_bytes"]
    first = [name, format_bytes(row["plain_bytes"]), format_bytes(budget_bytes)]
    if "refused" in row:
        return [*first, row["refused"], "", "", ""]
    measured = [f"{step['peak_bytes'] / budget_bytes:.1%}" for step in row["steps"]]
    off = [f"{step['peak_bytes'] / step['predicted_bytes'] - 1:+.1%}" for step in row["steps"]]
    bits = "equal" if row["equal"] else "differ"
    return [*first, " / ".join(measured), " / ".join(off), bits, ", ".join(dict.fromkeys(row["runtimes"]))]


def _markdown(result: Result) -> str:
    lines = [
        "# Loops as people write them",
        "",
        "Peaks of a whole iteration, an early one and the eighth. What a backward that is differentiated keeps of a "
        "recompute is not predicted. Kernels of stand-ins for a GPU compute nothing: their bits say nothing.",
    ]
    for under, rows in result["under"].items():
        steps = " / ".join(str(step["step"]) for step in next(iter(rows.values()))["steps"])
        head = ["loop", "plain", "budget", f"step {steps}, of budget", "measured over predicted", "bits", "runtime"]
        lines += ["", f"## {under}", "", common.table(head, [_row(name, row) for name, row in rows.items()])]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("loops", __doc__)
    parser.add_argument("--loops", metavar="NAMES", default="", help="parts of names, with commas (default: all)")
    parser.add_argument("--share", type=float, default=0.65, help="of what the plain loop allocates (default: 0.65)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=1.0, help="for each solve (default: 1)")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    torch.set_default_device(DEVICE)
    result: Result = {**common.environment("loops", arguments), "under": {}}
    with suppress(FileNotFoundError):
        result["under"] |= json.loads(Path(args.json).read_text(encoding="utf-8"))["under"]
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU"
    device = f"stand-ins for {device}" if "FAKECUDA" in os.environ else device
    rows = result["under"][f"torch {torch.__version__}, {device}"] = {}
    for name, make in LOOPS.items():
        if any(part in name for part in args.loops.split(",")):
            rows[name] = tried(make, args.share, args.time_limit)
            common.progress(f"{name}: {rows[name]}")
            common.write(args.json, result, _markdown(result))
    is_kept = all(s["peak_bytes"] <= row["budget_bytes"] for row in rows.values() for s in row["steps"])
    return 0 if is_kept and all(row.get("equal") for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
