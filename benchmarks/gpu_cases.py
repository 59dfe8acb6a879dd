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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import planner
from benchmarks import loops
from benchmarks.attention import differences
from benchmarks.common import Result
from benchmarks.peers import compiled_peers, peers
from benchmarks.steps import use
from planner import api, zoo
from planner.capture import fake_mode
from planner.capture.inputs import run_step
from planner.capture.state_restore import RandomStates
from planner.common.options import AUTO, grouped
from planner.diagnose.verification import NOISE, StepResult, distance
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.measure import calibration, devices
from planner.plans.plan import NoPlanFitsError

READY = "ready"
_WARM_UPS, _STEPS = 2, 6
_MOST_BATCH = 96
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
            model = made()
            options = {"runtime": runtime, "offload": offload, "time_limit_seconds": 1}
            _wrap(model, (x,), {}, {"budget": "60%", **options})
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


def _model(case: Result) -> Rows:
    """Train one model in eager, with its full graph, and under plans of some budgets; keep its profile."""
    name, sizes = case["model"], case["sizes"]
    afar = _planned_afar(case)
    yield {}
    start = {"model": name, "sizes": sizes}
    loaded = _built(case)
    if afar is not None:
        fake = zoo.build(name, **sizes, device="cuda", fake_mode=fake_mode())
        with suppress(PlannerError):
            options = {"budget": "100%", "time_limit_seconds": 1, "compare": False, "runtime": "graph"}
            here = api.plan(fake.model, fake.example_kwargs, **grouped(cost_model="roofline", **options))
            same = here.fingerprint["graph"] == afar.fingerprint["graph"]
            yield {**start, "what": "captured on a CPU", "same_step": same, "peak_bytes": afar.peak_bytes}
    if case.get("eager", True):
        yield {**start, "what": "eager", **_measured(lambda: _step(loaded.model, loaded), loaded.model)}
    inputs, seconds = loaded.example_kwargs, case["profile_seconds"]
    profile = api.profile(loaded.model, inputs, time_limit_seconds=seconds, name=name)
    planner.save_profile(profile, Path(case["folder"]) / f"{name}.profile.json")
    for budget in case["budgets"]:
        row: Result = {**start, "what": f"planned for {budget}", "measured_operations": len(profile.measurements)}
        try:
            options = {"time_limit_seconds": case["solve_seconds"], "profile": profile, "compare": False}
            plan, is_kept = _or_the_least(partial(api.plan, loaded.model, inputs, **grouped(**options)), budget)
            row["what"] += "" if is_kept else ", which cannot be kept: for the least"
            row |= _predicted(plan)
            model = api.auto_wrap(loaded.model, budget=plan)
            try:
                row |= _measured(lambda model=model: _step(model, loaded), model)
            finally:
                planner.unwrap(model)
        except Exception as error:  # the next budget is to run all the same
            row |= _failed(error)
        yield row


def _planned_afar(case: Result) -> planner.Plan | None:
    """Plan for the card on this machine's CPU, as a laptop would."""
    if not case.get("device") or not case.get("eager", True):
        return None
    with suppress(PlannerError):
        fake = zoo.build(case["model"], **case["sizes"], fake_mode=fake_mode())
        options = {"budget": "100%", "time_limit_seconds": 1, "compare": False, "runtime": "graph"}
        return api.plan(fake.model, fake.example_kwargs, **grouped(device=case["device"], **options))
    return None


def _offload(case: Result) -> Rows:
    """Copy both ways at once, and train with activations in host memory: predicted against measured overhead."""
    yield {}
    elements = case["copy_bytes"] // 4
    host, there = (torch.empty(elements, pin_memory=True) for _ in range(2)), torch.empty(2, elements, device="cuda")
    out, back = host
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for ways in ("to the host", "to the device", "both"):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        if ways != "to the device":
            with torch.cuda.stream(streams[0]):
                out.copy_(there[0], non_blocking=True)
        if ways != "to the host":
            with torch.cuda.stream(streams[1]):
                there[1].copy_(back, non_blocking=True)
        torch.cuda.synchronize()
        yield {"what": f"copy {ways}", "bytes_per_second": 4 * elements / (time.perf_counter() - begun)}
    del out, back, there
    loaded = _built(case)
    yield {"what": "eager", "model": case["model"], **_measured(lambda: _step(loaded.model, loaded), loaded.model)}
    for budget, offload in product(case["budgets"], (False, True)):
        yield _planned(case, loaded, f"{'offload' if offload else 'recompute'}, {budget}", budget, offload=offload)


def _peers(case: Result) -> Rows:
    """Train under what people use, and under a plan for the measured peak of each, compiled where that is."""
    yield {}
    loaded = _built(case)
    for peer in (*peers([])[:4], *compiled_peers([0.5])[1:]):
        torch.compiler.reset()
        row: Result = {"model": case["model"], "what": peer.name}
        try:
            with peer.put_in(loaded) as call:
                use(loaded.model, call)
                row |= _measured(lambda: _step(loaded.model, loaded), loaded.model)
        except Exception as error:  # the next way is to run all the same
            row |= _failed(error)
        use(loaded.model, None)
        yield row
        if peer.name != "eager" and "seconds" in row:
            options = {"budget": row["measured_allocated_bytes"], "runtime": "inductor" if peer.compiles else "auto"}
            yield _planned(case, loaded, f"planned at the peak of {peer.name}", **options)


def _planned(case: Result, loaded: zoo.ZooModel, what: str, budget: str | int, **options: Any) -> Result:
    """Train under a plan, and say what it predicted."""
    row: Result = {"what": what, "model": case["model"]}
    try:
        options |= {"budget": budget, "time_limit_seconds": case["solve_seconds"]}
        _wrap(loaded.model, (), loaded.example_kwargs, options)
        row |= _predicted(planner.plan_of(loaded.model))
        row |= _measured(lambda: _step(loaded.model, loaded), loaded.model)
    except InfeasibleBudgetError as error:
        row |= {"status": "infeasible", "minimum_feasible_peak_bytes": error.minimum_feasible_peak_bytes}
    except Exception as error:
        row |= _failed(error)
    with suppress(PlannerError):
        planner.unwrap(loaded.model)
    return row


def _largest(case: Result) -> Rows:
    """Say which batch is the largest that fits a part of the card; run it, and see the next one break it."""
    name, cap_bytes = case["model"], case["cap_bytes"]
    sizes = {key: size for key, size in case["sizes"].items() if key != "batch_size"}

    def planned(batch: int, budget: int) -> planner.Plan:
        fake = zoo.build(name, **sizes, batch_size=batch, fake_mode=fake_mode())
        options = {"device": case["device"], "budget": budget, "time_limit_seconds": 1, "compare": False}
        return api.plan(fake.model, fake.example_kwargs, **grouped(**options))

    low, high, best, smallest_bytes = 0, _MOST_BATCH, None, cap_bytes
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan = planned(middle, cap_bytes)
            fits = plan.reserved is None or plan.reserved.reserved_bytes <= cap_bytes
        except NoPlanFitsError as error:
            fits, smallest_bytes = False, error.minimum_feasible_peak_bytes
        low, high, best = (middle, high, plan) if fits else (low, middle, best)
    yield {}
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / torch.cuda.mem_get_info()[1]))
    row: Result = {"model": name, "cap_bytes": cap_bytes, "batch": low}
    for batch, found_plan, what in ((low, best, "fits"), (high, None, "one more")):
        if not batch:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            plan = found_plan or planned(batch, max(cap_bytes, smallest_bytes))
            loaded = _built({**case, "sizes": {**sizes, "batch_size": batch}})
            model = api.auto_wrap(loaded.model, budget=plan)
            found = _predicted(plan) | _measured(lambda model=model, loaded=loaded: _step(model, loaded), model)
            yield {**row, "what": what, "batch": batch, "came_to": "runs", **found}
            del model, loaded
        except torch.OutOfMemoryError:
            yield {**row, "what": what, "batch": batch, "came_to": "out of memory"}
        except Exception as error:
            yield {**row, "what": what, "batch": batch, **_failed(error)}


def _snapshot(case: Result) -> Rows:
    """Write down every allocation of one planned step, for pytorch.org/memory_viz."""
    yield {}
    loaded = _built(case)
    _wrap(loaded.model, (), loaded.example_kwargs, {"budget": case["budgets"][0], "time_limit_seconds": 1})
    _step(loaded.model, loaded)
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")  # those of C++ take minutes
    _step(loaded.model, loaded)
    path = Path(case["folder"]) / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    yield {"what": "snapshot", "model": case["model"], "snapshot_bytes": path.stat().st_size}


def _built(case: Result) -> zoo.ZooModel:
    """Build a model on the GPU; in a rehearsal on the CPU first, for stand-ins compile no kernels that fill it."""
    built = zoo.build(case["model"], **case["sizes"], device="cpu" if case["rehearsal"] else "cuda")
    kwargs = tree_map_only(torch.Tensor, torch.Tensor.cuda, built.example_kwargs)
    return replace(built, model=built.model.cuda(), example_kwargs=kwargs)


def _wrap(model: nn.Module, args: tuple[Any, ...], kwargs: Result, options: Result) -> None:
    """Plan a model for a budget, or for the least that is known to be feasible."""
    budget = options.pop("budget")
    _or_the_least(
        partial(api.auto_wrap, model, planner.Inputs.of(args or None, kwargs or None), **grouped(**options)), budget
    )


def _or_the_least(planned: Callable[..., Any], budget: str | int) -> tuple[Any, bool]:
    """Plan for a share of the activations or for bytes of the device, or for the least that is known to be feasible."""
    asked: planner.Budget | int = budget if isinstance(budget, int) else planner.Budget(activations=budget)
    for _ in range(_ATTEMPTS):
        try:
            return planned(budget=asked), asked == budget or not isinstance(asked, int)
        except InfeasibleBudgetError as refusal:
            asked = refusal.minimum_feasible_peak_bytes
    return planned(budget=asked), False


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


def _measured(step: Callable[[], None], model: nn.Module) -> Result:
    """Train some steps: their median time, and the peaks of what the allocator counts once it has settled."""
    seconds = []
    for number in range(_WARM_UPS + _STEPS):
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
    }  # fmt: skip
    if plan.reserved is not None:
        found["predicted_allocated_bytes"] = plan.reserved.allocated_bytes
        found["predicted_reserved_bytes"] = plan.reserved.reserved_bytes
    return found


def _failed(error: Exception) -> Result:
    traceback.print_exc()  # whole, into the log
    return {"status": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


CASES: dict[str, Callable[[Result], Rows]] = {
    "facts": _facts, "tiny": _tiny, "model": _model, "offload": _offload, "peers": _peers, "largest": _largest,
    "snapshot": _snapshot,
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1])
