"""Do plans hold on a GPU, and what do they gain there? What says most comes first.

Each case runs in a process of its own, with a time limit, so that the allocator starts empty and nothing that hangs or
crashes takes others along; the next one captures on free cores meanwhile. Rows are written as they come, what goes
wrong is in the log, whole. Without a GPU nothing is run. Exit code 1 if a case came to nothing, an allocated peak is
more than 0.5% from its prediction or above its budget, a reserved one more than 3% from it, or bits are further off
than those of eager's own steps.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from benchmarks.gpu_cases import READY
from planner.errors import UsageError
from planner.measure import devices

ALLOCATED_GOAL, RESERVED_GOAL = 0.005, 0.03

SIZES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama-3.2-1b": ({"batch_size": 4, "seq_len": 4096}, {"batch_size": 1, "seq_len": 256, "layers": 1}),
    "vit-l16": ({"batch_size": 128, "image_size": 224}, {"batch_size": 8, "image_size": 224, "layers": 2}),
    "resnet50": ({"batch_size": 256, "image_size": 224}, {"batch_size": 8, "image_size": 96, "layers": 2}),
    "unet": ({"batch_size": 16, "image_size": 512}, {"batch_size": 1, "image_size": 96}),
    "gpt2-774m": ({"batch_size": 8, "seq_len": 1024}, {"batch_size": 2, "seq_len": 256, "layers": 2}),
    "dit-xl2": ({"batch_size": 128, "image_size": 32}, {"batch_size": 8, "image_size": 32, "layers": 2}),
}
"""Of a run, and of a rehearsal: enough to see that everything runs."""

_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """What one process does, and how long it may take once the GPU is its."""

    what: dict[str, Any]
    seconds: float

    @property
    def title(self) -> str:
        return " ".join(str(self.what[key]) for key in ("case", "model") if key in self.what)


def cases(device: str | None, folder: str, *, rehearsal: bool) -> Iterator[Case]:
    """Give what is to be run, breadth before depth: some of everything first, then more of it."""
    sizes = {name: both[rehearsal] for name, both in SIZES.items()}
    common_to_all: Result = {"device": device, "folder": folder, "rehearsal": rehearsal}
    common_to_all |= {"solve_seconds": 1 if rehearsal else 3, "profile_seconds": 1 if rehearsal else 6}

    def case(kind: str, seconds: float, model: str = "", **more: Any) -> Case:
        of_model = {"model": model, "sizes": sizes[model]} if model else {}
        return Case({"case": kind, **of_model, **common_to_all, **more}, seconds * (2 if rehearsal else 1))

    def largest(name: str) -> Iterator[Case]:
        return (case("largest", 90, name, cap_bytes=cap * _GIB) for cap in ((3,) if rehearsal else (24, 80)))

    first, *others = sizes
    yield case("facts", 40)
    yield case("tiny", 80)
    yield from (case("peers", 120, name) for name in list(sizes)[:4])
    yield case("compiled", 160, first)
    yield from (case("peers", 120, name) for name in list(sizes)[4:])
    yield from largest(first)
    yield from (case("compiled", 160, name) for name in others)
    for name in () if rehearsal else others:  # minutes on few cores
        yield from largest(name)
    yield from (case("profile", 60, name) for name in sizes)


@dataclass
class Child:
    """The process of a case. What it writes arrives by a thread, so that waiting for it can end."""

    case: Case
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu_cases")
    log: Any = field(default_factory=tempfile.TemporaryFile)
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        # A batch that fills the card leaves no room for fragments.
        of_largest = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if "cap_bytes" in self.case.what else {}
        self.process = subprocess.Popen(
            [*self.command, json.dumps(self.case.what)], env={**os.environ, **of_largest},
            cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def is_ready(self, deadline: float) -> bool:
        """Wait until a case has captured what it needs; not so if it ended before, or time is up."""
        return next((line == READY for line in self._until(deadline) if line == READY), False)

    def rows(self, deadline: float) -> Iterator[Result]:
        """Let it have the GPU, and give what it finds until it ends or time is up."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self._until(deadline):
            if line.startswith("{"):
                yield json.loads(line)

    def _until(self, deadline: float) -> Iterator[str]:
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if line is None:
                return
            yield line

    def end(self) -> str:
        """Stop it if it runs, say how it ended, and return what it wrote to standard error."""
        cut_off = self.process.poll() is None
        if cut_off:
            try:
                self.process.wait(timeout=1)  # it may just be leaving
                cut_off = False
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self.log.seek(0)
        ended = "cut off" if cut_off else f"exit code {code}"
        return f"== {self.case.title}: {ended}\n{self.log.read().decode(errors='replace')}\n"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("gpu", __doc__)
    parser.add_argument("--seconds", metavar="S", type=float, default=540.0, help="all together (default: 540)")
    parser.add_argument("--rehearsal", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--slower", metavar="F", type=float, default=1.0, help="times all limits, on a busy machine")
    parser.add_argument("--only", metavar="NAMES", help="cases, models or both, with commas: tiny,unet,peers resnet50")
    parser.add_argument("--page", action="store_true", help="write the page of results that are there; run nothing")
    args = parser.parse_args(arguments)
    common.check_destination(args.json)
    destination = Path(args.json)
    if args.page:
        result = json.loads(destination.read_text(encoding="utf-8"))
        common.write(args.json, result, _markdown(result))
        return 0
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here: this benchmark runs on one, the others without")
    deadline = time.monotonic() + args.slower * args.seconds
    result = {**common.environment("gpu", arguments), "rehearsal": args.rehearsal, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        chosen = list(cases(devices.here(torch.device("cuda")).name, folder, rehearsal=args.rehearsal))
        chosen = [replace(case, seconds=args.slower * case.seconds) for case in chosen]
        if args.only:
            named = args.only.split(",")
            chosen = [case for case in chosen if any(f" {name} " in f" {case.title} " for name in named)]

        def keep(case: Case, row: Result) -> None:
            begun = {"case": case.what["case"], **row}
            result["rows"].append(begun)
            common.progress(f"{case.title}: " + ", ".join(f"{k} {_short(v)}" for k, v in row.items() if k != "sizes"))
            common.write(args.json, result, _markdown(result))

        run_all(chosen, deadline, keep, destination.with_suffix(".log"))
        _collect(Path(folder), destination)
    return 1 if any(map(_misses, result["rows"])) else 0


def run_all(
    chosen: Sequence[Case], deadline: float, keep: Callable[[Case, Result], None], log: Path, **of_child: Any
) -> None:
    """Run one case after the other; the next one prepares while one has the GPU."""
    log.write_text("", encoding="utf-8")
    waiting = Child(chosen[0], **of_child)
    for position, case in enumerate(chosen):
        child, begun = waiting, time.monotonic()
        is_ready = child.is_ready(min(deadline, begun + case.seconds))
        if position + 1 < len(chosen):
            waiting = Child(chosen[position + 1], **of_child)
        count = 0
        if is_ready:
            for row in child.rows(min(deadline, time.monotonic() + case.seconds)):
                keep(case, row)
                count += 1
        words = child.end()
        with log.open("a", encoding="utf-8") as file:
            file.write(words)
        how = words.splitlines()[0].rpartition(": ")[2]
        if not count or how != "exit code 0":
            keep(case, {"what": "the case", "status": "error", "error": f"{how} after {count} rows; see the log"})
        if time.monotonic() > deadline:
            left = ", ".join(c.title for c in chosen[position + 1 :])
            if left:
                common.progress(f"no time was left for {left}")
                waiting.end()
            return


def _collect(folder: Path, destination: Path) -> None:
    """Put what cases left into one file beside the results: few files may be all that comes back from a machine."""
    with zipfile.ZipFile(destination.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)


def _misses(row: Result) -> bool:
    if row.get("status") == "error" or row.get("within_control") is False or row.get("same_step") is False:
        return True
    if row.get("attention_differences") or row.get("status") == "out of memory":
        return True
    if "predicted_allocated_bytes" not in row or "measured_allocated_bytes" not in row:
        return False
    # At its cap the allocator gives cached segments back, which no prediction knows of.
    is_capped = row["predicted_reserved_bytes"] > row.get("cap_bytes", float("inf"))
    return (
        abs(_off(row, "allocated")) > ALLOCATED_GOAL
        or (abs(_off(row, "reserved")) > RESERVED_GOAL and not is_capped)
        or row["measured_allocated_bytes"] > row["budget_bytes"]
    )


def _off(row: Result, kind: str) -> float:
    return float(row[f"measured_{kind}_bytes"] / row[f"predicted_{kind}_bytes"] - 1)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


_COUNTED = ["allocated, predicted", "measured", "off", "reserved, predicted", "measured", "off"]
_HEADINGS = ["", *_COUNTED, "ms", "of eager", "tokens or images a second", "bits"]


def _markdown(result: Result) -> str:
    rows = result["rows"]
    facts: Result = next((row for row in rows if "gpu" in row), {})
    eager = {row.get("model"): row["seconds"] for row in rows if row.get("what") == "eager"}
    steps = [_step_cells(row, eager) for row in rows if "what" in row and ("seconds" in row or "status" in row)]
    others = [row for row in rows if not ("what" in row and ("seconds" in row or "status" in row)) and row is not facts]
    rehearsed = "**A rehearsal: kernels or sizes are not real, and no figure here is one of a GPU.**"
    parts = [
        *([rehearsed] if result["rehearsal"] else []),
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if name not in ("case", "gpu")),
        "MiB of the whole device; budgets are shares of what the step allocates without recompute. Times are medians.",
        common.table(_HEADINGS, steps),
        *(
            f"- {row['case']}: " + "; ".join(f"{k} {_short(v)}" for k, v in row.items() if k != "case")
            for row in others
        ),
    ]
    return common.page(f"On a GPU: {facts.get('gpu', 'unknown')}", result, *(part for part in parts if part))


def _step_cells(row: Result, eager: dict[str | None, float]) -> list[object]:
    at = f": {row['batch']} within {row['cap_bytes'] / _GIB:g} GiB" if "batch" in row else ""
    start: list[object] = [f"{row.get('model', row['case'])}, {row['what']}{at}"]
    if "seconds" not in row:
        return [*start, str(row.get("error", row["status"])).replace("|", "/")[:100], *["-"] * (len(_HEADINGS) - 2)]
    cells: list[object] = []
    for kind in ("allocated", "reserved"):
        known = f"predicted_{kind}_bytes" in row
        cells += [mebibytes(row.get(f"predicted_{kind}_bytes")), mebibytes(row[f"measured_{kind}_bytes"])]
        cells.append(percent(_off(row, kind), 2) if known else "-")
    before = None if at else eager.get(row.get("model"))
    cells += [f"{1e3 * row['seconds']:.1f}", percent(row["seconds"] / before if before else None)]
    cells.append(next((f"{row[key]:,.0f}" for key in row if key.endswith("s_per_second")), "-"))
    bits = {True: "equal", False: "within control" if row.get("within_control") else "FURTHER OFF"}
    return [*start, *cells, bits[row["bits"]] if "bits" in row else "-"]


if __name__ == "__main__":
    sys.exit(common.run(main))
