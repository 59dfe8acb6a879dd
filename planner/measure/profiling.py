"""Time a step's operations one by one: each distinct one runs alone on the device that is here."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from statistics import median, median_low
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from cost_models.base import OperationCost
from cost_models.measured import Measurement, Profile, ProfiledOperation
from planner.capture import operands
from planner.capture.in_place import called_over, overwritten_argument
from planner.capture.lowering import LoweredGraph
from planner.common import cache_folder
from planner.common.json_reader import parse, to_data
from planner.errors import UsageError
from planner.ir.caches import CACHE_BYTES
from planner.ir.problem import Progress
from planner.measure.runs import Run, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """How often an operation is run: until it took so long altogether, within these numbers of runs."""

    least_runs: int
    most_runs: int
    seconds: float
    long_seconds: float
    """One whose first run takes longer is not run again."""

    takes_what_is_known: bool = False
    """Whether what another process measured will do, and a first run where there is no time for more."""
    little: float = 0.0
    """Share of the step's time below which one run without page faults will do; above ten times it, two more count."""

    def of_share(self, share: float) -> Trials:
        """Return the trials of an operation that takes such a share of the step's time."""
        if share < self.little:
            return replace(self, least_runs=1, most_runs=3, seconds=0.0)
        return replace(self, least_runs=self.least_runs + 2) if self.little and share > 10 * self.little else self

    def suffices(self, run: Run, times: int = 1) -> bool:
        """Whether an operation is not run again after a run that took so many times as long as a long one."""
        return run.without_faults > max(times * self.long_seconds, _MOSTLY * run.seconds)

    def are_satisfied_by(self, measured: Measurement) -> bool:
        """Whether these trials would find out no more of an operation than a measurement already says."""
        return measured.runs >= self.least_runs or measured.seconds > self.long_seconds


THOROUGH = Trials(least_runs=3, most_runs=15, seconds=0.1, long_seconds=1.0)
"""For a profile that is kept."""

QUICK = Trials(least_runs=2, most_runs=7, seconds=0.01, long_seconds=0.02, takes_what_is_known=True, little=2e-3)
"""For a plan that the user waits for: of a ResNet-152's 114 different operations 76 take 2.3% of the step together, and
would take a third of the time for measuring."""

_CACHE_BYTES = {"cpu": CACHE_BYTES, "cuda": 256 << 20}
"""What is written between two runs, so that the next finds nothing in a cache, as the first run in a step."""

_LONG_COLD_SECONDS = 2e-3
"""From how long on one run after all was evicted will do: what a cache saves is then a small part."""

_LEAST_BYTES_PER_SECOND = 2e9
"""How fast memory is read at least: a cold run that takes longer was disturbed."""

_LONG_ONES = 3
"""How many long runs' time all runs of an operation may take."""

_SURELY_LONG = 5
"""How many times as long as a long one a process' first run is, to be the only one: shorter ones may have waited for
another process, or for a library to write code. A HiFi-GAN whose step takes 50 ms was once predicted at 92."""

_MOSTLY = 0.7
"""Share of a long first run that is not page faults, if it is not run again."""

_TRIED_AGAIN, _AS_BEFORE = 2, 0.7
"""How many operations whose times were kept are timed again, and the share of these times below which none is used."""

_TOLD_EVERY_SECONDS = 1.0

_known: dict[tuple[str, str], Measurement] = {}
"""By place and digest of the signature: planning again in one process measures nothing twice."""

_trusted: set[str] = set()
"""Places whose kept times were tried again in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a measurement came to, by signature, and how long it took."""

    measurements: dict[str, Measurement]
    failed: dict[str, str]
    """Signatures that could not be run, with the reason."""
    skipped: tuple[str, ...]
    """Those that there was no time for."""
    seconds: float


def measure(
    lowered: LoweredGraph,
    estimates: tuple[OperationCost, ...],
    device: torch.device,
    *,
    time_limit_seconds: float,
    trials: Trials = THOROUGH,
    first_runs: Mapping[str, Run] = MappingProxyType({}),
    over: Mapping[int, int] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Time every distinct operation of a step, those first that ``estimates`` expect to take longest.

    ``first_runs`` are runs by signature that are over: long ones count. No operation is started after the
    time limit. Memory is that of one operation at a time; a model larger than the device can be measured. The random
    state is left as it was. What was measured as well before is not measured again. With ``over`` only these operations
    are timed, each as it writes over a value, by signatures of :func:`signature_over`.
    """
    begun = time.perf_counter()
    called, totals = _calls(lowered, estimates, over)
    order, whole = sorted(totals, key=lambda signature: -totals[signature]), sum(cost.seconds for cost in estimates)
    trials_of = {signature: trials.of_share(seconds / (whole or 1.0)) for signature, seconds in totals.items()}
    place = _place(device)
    before = found_before(place) if trials.takes_what_is_known else {}
    elsewhere = _evicting(lowered, device)
    found: dict[str, Measurement] = {}
    new: dict[str, Measurement] = {}
    failed: dict[str, str] = {}
    told = begun

    def tried(signature: str) -> Measurement | None:
        nonlocal told
        first, now = first_runs.get(signature), time.perf_counter()
        if now - begun > time_limit_seconds or (first and trials.suffices(first, _SURELY_LONG)):
            return None if first is None else Measurement(seconds=first.without_faults, runs=0)
        if progress and now - told > _TOLD_EVERY_SECONDS:
            told = now
            progress(f"measuring: {len(found)} of {len(order)} different operations, {now - begun:.0f} s")
        return _time(called[signature], device, trials_of[signature], elsewhere)

    with operands.running_alone(device):
        if place not in _trusted and not _hold_now(place, before, order, tried):
            before = {}
            _write(place, before)  # or what is asked next would be found among times of that machine
        for signature in order:
            key = _digest(signature)
            needed, kept = trials_of[signature], before.get(key)
            known = _known.get((place, key)) or (kept if kept and needed.are_satisfied_by(kept) else None)
            if known is None or not (trials.takes_what_is_known or needed.are_satisfied_by(known)):
                try:
                    known = tried(signature)
                except (RuntimeError, IndexError, ValueError, TypeError, MemoryError, NotImplementedError) as error:
                    failed[signature] = " ".join(str(error).split())[:200] or type(error).__name__
                    if device.type == "cuda":
                        torch.cuda.empty_cache()  # it may have been memory that ran out
                    continue
                if known is None:
                    continue  # there is no time, but others may be known
                _known[place, key] = known
                if needed.are_satisfied_by(known):  # what a library does once is in a short first run
                    new[key] = known
            found[signature] = replace(known, workspace_bytes=called[signature].workspace_bytes)
        elsewhere = torch.empty(0)  # freed here, or the allocator would keep it cached during training
    keep(place, new)
    skipped = tuple(signature for signature in order if signature not in found and signature not in failed)
    return Outcome(measurements=found, failed=failed, skipped=skipped, seconds=time.perf_counter() - begun)


class _Call(NamedTuple):
    """A call to be timed, with the argument that it writes over, if any."""

    node: fx.Node
    over: fx.Node | None
    workspace_bytes: int


def _calls(
    lowered: LoweredGraph, estimates: tuple[OperationCost, ...], over: Mapping[int, int] | None
) -> tuple[dict[str, _Call], dict[str, float]]:
    """Return by signature what is called, and how long all such calls take by their estimates."""
    called: dict[str, _Call] = {}
    totals: defaultdict[str, float] = defaultdict(float)
    for index, (node, estimate) in enumerate(zip(lowered.operation_nodes, estimates, strict=True)):
        signature = lowered.graph.operations[index].signature
        if not signature or node is None or (over is not None and index not in over):
            continue
        argument = overwritten_argument(lowered, node, over[index]) if over else None
        signature = signature_over(lowered, index, over[index]) if over else signature
        called[signature] = _Call(node, argument, estimate.workspace_bytes)
        totals[signature] += estimate.seconds
    return called, totals


def _hold_now(
    place: str, before: Mapping[str, Measurement], order: list[str], tried: Callable[[str], Measurement | None]
) -> bool:
    """Whether the costliest operations take as long as was kept: times of a busy machine were once 8 times too long."""
    kept = {signature: found for signature in order if (found := before.get(_digest(signature))) is not None}
    with suppress(RuntimeError, MemoryError):  # there may be no memory for them now
        for signature in sorted(kept, key=lambda signature: -kept[signature].seconds)[:_TRIED_AGAIN]:
            now = tried(signature)
            if now is not None and now.seconds < _AS_BEFORE * kept[signature].seconds:
                return False
    _trusted.add(place)
    return True


def _place(device: torch.device) -> str:
    """Name what times hold for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{platform.node()}, {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.__version__}"


def _evicting(lowered: LoweredGraph, device: torch.device) -> torch.Tensor:
    """Return what is to be written between two runs: nothing for a step that a cache holds whole."""
    cache_bytes = _CACHE_BYTES[device.type]
    fits = sum(value.size_bytes for value in lowered.graph.values) <= cache_bytes
    # A GPU is always kept busy so: what is measured is then in its queue before its turn comes.
    skips = fits and device.type == "cpu"
    for size_bytes in () if skips else (cache_bytes, cache_bytes // 8):
        with suppress(torch.OutOfMemoryError):  # the model and its optimizer may leave little room
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device)


def signature_over(lowered: LoweredGraph, index: int, value: int) -> str:
    """Return the signature of an operation that writes over a value."""
    node = lowered.operation_nodes[index]
    assert node is not None
    argument = overwritten_argument(lowered, node, value)
    return f"{lowered.graph.operations[index].signature} over {node.args.index(argument)}"


def _time(called: _Call, device: torch.device, trials: Trials, elsewhere: torch.Tensor) -> Measurement:
    """Run one operation until its median is trustworthy."""
    node, over, _ = called
    args, kwargs = operands.arguments(node, device)

    def call() -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    if over is not None:
        call = called_over(node, over, args, kwargs)
    if device.type == "cuda":
        return _time_on_cuda(call, device, trials, elsewhere)
    first = timed(call)[1]
    if trials.suffices(first):
        return Measurement(seconds=first.without_faults)

    def evict() -> None:
        elsewhere.zero_()
        if over is not None:  # what is written over was made just before
            args[node.args.index(over)].zero_()

    cold: list[float] = []
    reads = sum(tensor.nbytes for tensor in args if isinstance(tensor, torch.Tensor))
    if trials.seconds and elsewhere.numel() > reads:
        # Before the others: a cache keeps what was read several times from what is only written once. A silu_backward
        # of two layouts took 0.64 ms, 0.65 when it was evicted after seven runs, 1.7 before them, and 1.7 in the step.
        needed = trials.least_runs if first.seconds < _LONG_COLD_SECONDS else 1
        cold = _several(call, replace(trials, seconds=0.0, least_runs=needed), evict)
    hot = _several(call, trials, lambda: None)
    # Of two runs the shorter: where others use the processor, one may take several times as long.
    seconds = median_low(hot)
    cold_seconds = min(max(0.0, median_low(cold) - seconds), reads / _LEAST_BYTES_PER_SECOND) if cold else 0.0
    return Measurement(seconds=seconds, cold_seconds=cold_seconds, runs=len(hot))


def _several(call: Callable[[], Any], trials: Trials, before: Callable[[], Any]) -> list[float]:
    """Run an operation as often as trials say, each time after something else, and leave out runs with page faults.

    Where all have some, as with results that are too large to be kept by the allocator, a few do.
    """
    every: list[float] = []
    clean: list[float] = []
    most_seconds = _LONG_ONES * trials.long_seconds
    while (
        len(every) < trials.most_runs
        and (len(clean) < trials.least_runs or sum(clean) < trials.seconds)
        and sum(every) < most_seconds
    ):
        before()
        run = timed(call)[1]
        every.append(run.seconds)
        if run.is_clean:
            clean.append(run.seconds)
    return clean or every


def _time_on_cuda(
    call: Callable[[], Any], device: torch.device, trials: Trials, elsewhere: torch.Tensor
) -> Measurement:
    """Put all runs into the queue, each between two events and after the cache was overwritten, and wait once.

    As ``triton.testing.do_bench`` does it: the host launches a kernel while the cache is overwritten, so that launching
    does not count as the kernel's time.
    """

    def between_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        elsewhere.zero_()
        begin.record()
        call()
        end.record()
        return begin, end

    begin, end = between_events()
    end.synchronize()
    first = float(begin.elapsed_time(end)) / 1e3
    if first > trials.long_seconds:
        return Measurement(seconds=first)
    runs = min(max(trials.least_runs, int(trials.seconds / max(first, 1e-6))), trials.most_runs)
    events = [between_events() for _ in range(runs)]
    torch.cuda.synchronize(device)
    return Measurement(seconds=median(begin.elapsed_time(end) for begin, end in events) / 1e3, runs=runs)


def profile_of(
    lowered: LoweredGraph, outcome: Outcome, *, model: str, device: str, inputs: tuple[tuple[int, ...], ...]
) -> Profile:
    """Make a profile that can be kept of what was measured."""
    return Profile(
        model=model,
        device=device,
        torch=torch.__version__,
        date=date.today().isoformat(),
        inputs=inputs,
        measurements=outcome.measurements,
        operations=tuple(
            ProfiledOperation(
                **{name: getattr(o, name) for name in ("key", "signature", "target", "dtype", "flops", "moved_bytes")}
            )
            for o in lowered.graph.operations
        ),
    )


# Times are kept on disk, so that planning a similar model again measures little or nothing.

KIND = "measurements"

MOST = 50_000
"""How many operations are kept of a place; then those go that were measured longest ago."""

LIMIT_BYTES = 64 << 20
"""How large the measurements of all places together may become."""


def found_before(place: str) -> dict[str, Measurement]:
    """Return what is kept for a place, by a digest of the signature."""
    return cache_folder.find(KIND, _digest(place), partial(_read, place), LIMIT_BYTES) or {}


def keep(place: str, found: Mapping[str, Measurement]) -> None:
    """Add measurements, likewise, to those of a place: machine, device, threads and version of torch."""
    if found:
        _write(place, dict([*{**found_before(place), **found}.items()][-MOST:]))


def _write(place: str, took: Mapping[str, Measurement]) -> None:
    text = json.dumps({"place": place, "took": to_data(took)}, allow_nan=False)
    cache_folder.keep(KIND, _digest(place), text, LIMIT_BYTES)


def _digest(name: str) -> str:
    """Return a short name for a signature, or a place."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _read(place: str, text: str) -> dict[str, Measurement]:
    root = parse(text, "file of measurements")
    if root["place"].read(str) != place:
        raise UsageError("not what was written")
    return root["took"].read(dict[str, Measurement])
