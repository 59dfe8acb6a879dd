"""What ``benchmarks.gpu`` runs on a GPU, each case in a process of its own: prepared on the CPU, then run.

``python -m benchmarks.gpu_cases JSON`` prepares a case, says ``ready``, waits for a line, and then writes each row as a
line of JSON as soon as it is known, so that a case that is cut off keeps what it has.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import planner
from benchmarks import loops
from benchmarks.attention import differences
from benchmarks.cases import of_name
from benchmarks.common import Result
from benchmarks.peers import Peer, compiled_peers, peers
from benchmarks.steps import use
from planner import api, zoo
from planner.capture import fake_mode
from planner.capture.inputs import Inputs, run_step
from planner.capture.state_restore import RandomStates
from planner.common.options import AUTO, grouped
from planner.diagnose.verification import NOISE, StepResult, distance
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.measure import calibration, devices

READY = "ready"
_WARM_UPS, _STEPS = 4, 6
_ATTEMPTS = 4

Rows = Iterator[Result]


def main(text: str) -> None:
    """Run one case; see the module."""
    case = json.loads(text)
    run = CASES[case["case"]](case)
    next(run)  # prepares
    print(READY, flush=True)
    sys.stdin.readline()
    for row in run:
        print(json.dumps(row), flush=True)


def _facts(case: Result) -> Rows:
    """Name versions and the card, ask torch for its attention kernels, and measure rates."""
    yield {}
    where = torch.device("cuda")
    facts = torch.cuda.get_device_properties(where)
    spec = devices.here(where)
    yield {
        "gpu": facts.name, "device": spec.name, "architecture": f"sm{facts.major}{facts.minor}",
        "multiprocessors": facts.multi_processor_count, "memory_bytes": torch.cuda.mem_get_info()[1],
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    asked, found = differences(where)
    yield {"attention_calls": asked, "attention_differences": len(found), "examples": found[:20]}
    rates = {"calibration": calibration.calibrate(where), "table": spec}
    single = ("bandwidth_bytes_per_second", "launch_seconds", "host_link_bytes_per_second")
    yield {
        kind: {"flops_per_second": dict(each.flops_per_second), **{name: getattr(each, name) for name in single}}
        for kind, each in rates.items()
    }


class Tower(loops.Tower):
    """Blocks with dropout; gives its loss."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__(width, depth, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def _tiny(case: Result) -> Rows:
    """Run every runtime, and offload, on a small model: bits held against what two eager steps differ by."""
    yield {}
    x = torch.randn(16384, 512, device="cuda")

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Tower().to("cuda")

    model = made()
    steps = [_left_behind(model, lambda model=model: model(x)) for _ in range(2)]
    control = distance(*steps)
    yield {"what": "eager", **_measured(lambda: model(x).backward(), model), "control": control}
    without = ("graph", "modules", "regional", "inductor")
    for runtime, offload in [*((name, False) for name in without), ("graph", True)]:
        row: Result = {"what": runtime + (" with offload" if offload else "")}
        try:
            del model
            gc.collect()
            torch.cuda.empty_cache()  # in holes that others leave, it would reserve less than a process of its own
            model = made()
            options = {"runtime": runtime, "offload": offload, "time_limit_seconds": 1}
            _wrap(model, x, "60%", options)
            apart = distance(steps[0], _left_behind(model, lambda model=model: model(x)))
            row |= _predicted(planner.plan_of(model)) | _measured(lambda model=model: model(x).backward(), model)
            row |= {
                "apart": apart if math.isfinite(apart) else str(apart),
                "bits": apart == 0.0,
                "within_control": apart <= NOISE * control,
            }
        except Exception as error:  # the next runtime is to run all the same
            row |= _failed(error)
        yield row


def _profile(case: Result) -> Rows:
    """See whether a step captured on this machine's CPU, as a laptop would, is that of the GPU; keep its profile."""
    name, sizes = case["model"], case["sizes"]

    def captured(where: str, **target: Any) -> planner.Plan:
        fake = of_name(name, where, fake_mode(), **sizes)
        options = {"time_limit_seconds": 1, "compare": False, "runtime": "graph", "cost_model": "roofline"}
        return api.plan(fake.model, fake.example_kwargs, budget="100%", **grouped(**options, **target))

    afar = captured("cpu", device=case["device"]) if case["device"] else None
    yield {}
    if afar is not None:
        same = captured("cuda").fingerprint["graph"] == afar.fingerprint["graph"]
        yield {"model": name, "what": "captured on a CPU", "same_step": same, "peak_bytes": afar.peak_bytes}
    loaded = _built(case)
    profile = api.profile(loaded.model, loaded.example_kwargs, time_limit_seconds=case["profile_seconds"], name=name)
    planner.save_profile(profile, Path(case["folder"]) / f"{name}.profile.json")
    yield {"model": name, "what": "profile", "measured_operations": len(profile.measurements)}


def _peers(case: Result) -> Rows:
    """Train under what people use, and under plans for the measured peak of each, compiled where that is."""
    yield {}
    loaded, compiled = _built(case), case["case"] == "compiled"
    peaks, offloads = {}, {}
    for peer in compiled_peers([0.5])[1:] if compiled else peers([])[:4]:
        row = _under(peer, case, loaded)
        yield row
        if peer.name != "eager" and "seconds" in row:
            peaks[f"planned at the peak of {peer.name}"] = row["measured_allocated_bytes"]
    peaks = dict(sorted(peaks.items(), key=lambda peak: peak[1]))  # the tightest first
    for what, budget in peaks.items():
        row = _planned(case, loaded, what, budget, runtime="inductor" if compiled else "auto")
        offloads[what] = row.get("host_bytes", 0) > 0
        yield row
    for what, budget in () if compiled else peaks.items():  # what a plan gains by offload, or would lose
        does = not offloads[what]
        yield _planned(case, loaded, f"{what}, {'with' if does else 'without'} offload", budget, offload=does)


def _under(peer: Peer, case: Result, loaded: zoo.ZooModel, steps: int = _STEPS) -> Result:
    """Train under what people use."""
    row: Result = {"model": case["model"], "what": peer.name}
    torch.compiler.reset()
    try:
        with peer.put_in(loaded) as call:
            use(loaded.model, call)
            row |= _measured(lambda: _step(loaded.model, loaded), loaded.model, steps)
    except Exception as error:  # the next way is to run all the same
        row |= _failed(error)
    use(loaded.model, None)
    return row


def _planned(case: Result, loaded: zoo.ZooModel, what: str, budget: int, **options: Any) -> Result:
    """Train under a plan, and say what it predicted."""
    row: Result = {"what": what, "model": case["model"]}
    try:
        options |= {"time_limit_seconds": case["solve_seconds"], "wait": True}
        begun = time.perf_counter()
        api.auto_wrap(loaded.model, loaded.example_kwargs, budget=budget, **grouped(**options))
        row["planning_seconds"] = time.perf_counter() - begun
        row |= _predicted(planner.plan_of(loaded.model))
        row |= _measured(lambda: _step(loaded.model, loaded), loaded.model)
        row |= _predicted(planner.plan_of(loaded.model))  # another, after what the first steps have shown
    except Exception as error:
        row |= _failed(error)
    with suppress(PlannerError):
        planner.unwrap(loaded.model)
    return row


def _largest(case: Result) -> Rows:
    """Train at the largest batches that fit a part of the card, layers checkpointed and planned.

    A twentieth stays free. Which batch a plan fits is found on the CPU.
    """
    name, sizes, budget = case["model"], case["sizes"], case["cap_bytes"] * 19 // 20
    fake = of_name(name, "cpu", fake_mode(), **sizes)
    options = grouped(device=case["device"], time_limit_seconds=1, compare=False, runtime="graph")

    def least(batch: int) -> int:
        try:
            return api.plan(fake.model, _of_batch(fake, batch).example_kwargs, budget=1, **options).peak_bytes
        except InfeasibleBudgetError as error:
            return error.minimum_feasible_peak_bytes

    largest = _most(least, budget, sizes["batch_size"])
    yield {}
    loaded, every_layer = _built(case), partial(_under, peers([])[1], case)

    def held(batch: int) -> int:
        return int(every_layer(_of_batch(loaded, batch), steps=1).get("measured_allocated_bytes", 2 * budget))

    checkpointed = _most(held, budget, sizes["batch_size"])
    torch.cuda.set_per_process_memory_fraction(min(1.0, case["cap_bytes"] / torch.cuda.mem_get_info()[1]))
    planned = partial(_planned, case, what="planned", budget=budget)
    for train, batch in dict.fromkeys([(every_layer, checkpointed), (planned, checkpointed), (planned, largest)]):
        row = {"cap_bytes": case["cap_bytes"], "batch": batch, **train(_of_batch(loaded, batch))}
        if "seconds" in row:
            unit = "tokens" if "seq_len" in sizes else "images"
            row[f"{unit}_per_second"] = batch * sizes.get("seq_len", 1) / row["seconds"]
        yield row


def _most(needs: Callable[[int], int], cap_bytes: int, start: int) -> int:
    """Return the largest batch that fits, or one less than a stride below it: samples need about the same."""
    known = {batch: needs(batch) for batch in (start, 2 * start)}
    while True:
        tried = sorted(known)
        low, high = 0, 64 * tried[-1]
        for batch in tried:
            low, high = (batch, high) if known[batch] <= cap_bytes else (low, min(high, batch))
        if high - low <= _stride(low):
            return low
        place = min(bisect(tried, low), len(tried) - 1) or 1
        (one, size), (other, its) = ((batch, known[batch]) for batch in tried[place - 1 : place + 1])
        guess = one + (cap_bytes - size) * (other - one) // max(1, its - size)
        guess = min(max(guess, low + _stride(low)), high - 1)
        known[guess] = needs(guess)


def _stride(batch: int) -> int:
    return max(1, batch // 64)


def _of_batch(loaded: zoo.ZooModel, batch: int) -> zoo.ZooModel:
    return replace(loaded, example_kwargs=Inputs((), loaded.example_kwargs).with_batch(batch).kwargs)


def _built(case: Result) -> zoo.ZooModel:
    """Build a model on the GPU; in a rehearsal on the CPU first, for stand-ins compile no kernels that fill it."""
    built = of_name(case["model"], "cpu" if case["rehearsal"] else "cuda", **case["sizes"])
    kwargs = tree_map_only(torch.Tensor, torch.Tensor.cuda, built.example_kwargs)
    return replace(built, model=built.model.cuda(), example_kwargs=kwargs)


def _wrap(model: nn.Module, x: torch.Tensor, share: str, options: Result) -> None:
    """Plan to the end for a share of the activations, or for the least that is known to be feasible."""
    budget: planner.Budget | int = planner.Budget(activations=share)
    for attempt in range(_ATTEMPTS):
        try:
            api.auto_wrap(model, x, budget=budget, **grouped(wait=True, **options))
            return
        except InfeasibleBudgetError as refusal:
            if attempt == _ATTEMPTS - 1:
                raise
            budget = refusal.minimum_feasible_peak_bytes


def _step(model: Any, loaded: zoo.ZooModel) -> None:
    run_step(partial(model, *loaded.example_args, **loaded.example_kwargs), None, AUTO)


def _left_behind(model: nn.Module, call: Callable[[], torch.Tensor]) -> StepResult:
    """Return loss and gradients of a step from the same random state, on the host; the first captures."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = call()
        loss.backward()
    gradients = {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return StepResult((loss.detach().cpu(),), gradients, {}, RandomStates())


def _measured(step: Callable[[], None], model: nn.Module, steps: int = _STEPS) -> Result:
    """Train some steps: their median time, and the peaks of what the allocator counts once it has settled."""
    seconds = []
    for number in range(_WARM_UPS + steps):
        if number == _WARM_UPS:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        model.zero_grad(set_to_none=True)
    stats = torch.cuda.memory_stats()
    kinds = ("requested", "allocated", "reserved")
    peaks = {f"measured_{kind}_bytes": stats[f"{kind}_bytes.all.peak"] for kind in kinds}
    return {"seconds": median(islice(seconds, _WARM_UPS, None)), **peaks}


def _predicted(plan: planner.Plan) -> Result:
    found: Result = {
        "status": plan.status, "budget_bytes": plan.budget_bytes, "predicted_requested_bytes": plan.peak_bytes,
        "predicted_seconds": plan.baseline_step_seconds * (1 + plan.overhead), "predicted_overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
        "host_bytes": plan.offloading.host_bytes if plan.offloading else 0,
    }  # fmt: skip
    if plan.reserved is not None:
        found["predicted_allocated_bytes"] = plan.reserved.allocated_bytes
        found["predicted_reserved_bytes"] = plan.reserved.reserved_bytes
    return found


def _failed(error: Exception) -> Result:
    traceback.print_exc()  # whole, into the log
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory"}
    if isinstance(error, InfeasibleBudgetError):
        return {"status": "infeasible", "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes}
    return {"status": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


CASES: dict[str, Callable[[Result], Rows]] = {
    "facts": _facts, "tiny": _tiny, "peers": _peers, "compiled": _peers, "largest": _largest, "profile": _profile,
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1])
