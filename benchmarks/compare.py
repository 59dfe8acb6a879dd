"""Is this better than what people use now? Real steps of every way, on the same models, in one run.

For each model every alternative is run and measured: peak, step time against eager in the same round, gradients
against eager's. Then plans are made for the peak of each alternative and at shares of the eager peak, and all
ways are timed in turn. Overheads are compared at the same or a lower measured peak; an alternative that costs less
than the noise, or gives wrong gradients, is shown and not compared. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import nn

import planner
from benchmarks import common
from benchmarks.cases import CASES, build
from benchmarks.common import Result, mebibytes, percent
from benchmarks.peers import NotForThisModelError, Peer, peers
from benchmarks.steps import in_turn, peak_bytes, step_of, use
from planner.errors import PlannerError
from planner.memory import keep_freed_memory
from planner.planning import NoPlanFitsError
from planner.torch_internals import installed_call
from planner.zoo import ZooModel

MODELS = (
    "minigpt,gpt2,bert-large,vit-b16,resnet50,resnet152,llama-grouped,minimind-26m,mixtral-small,t5-base,"
    "convnext-tiny,unet,diffusion-unet,lstm"
)
GOALS = {"partitioner": 0.5, "every second layer": 0.35, "save products": 0.35, "every layer": 0.6}
"""What of each alternative's overhead a plan may cost, as a geometric mean."""

NOISE = 0.02
"""Overheads below this cannot be told from none on a machine that is shared."""

_WRONG = 1e-2
"""A gradient that is further off than this, relative to all together, is another gradient."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("compare", __doc__)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: {MODELS})")
    parser.add_argument(
        "--ratios",
        metavar="PERCENT",
        type=common.ratios,
        default="100,80,60,40,20,1",
        help="activation_memory_budget of PyTorch's partitioner (default: 100,80,60,40,20,1)",
    )
    parser.add_argument(
        "--shares",
        metavar="PERCENT",
        type=common.ratios,
        default="90,80,70,60,50,40,30,20",
        help="of the eager peak, to plan for (default: 90,80,70,60,50,40,30,20)",
    )
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="to time one model (default: 60)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=8.0, help="for each solve (default: 8)")
    parser.add_argument("--inductor", action="store_true", help="Inductor too, with and without a plan")
    parser.add_argument("--resume", action="store_true", help="keep the models that FILE has of this torch version")
    args = parser.parse_args(arguments)
    if not keep_freed_memory():
        common.progress("this system's allocator cannot be told to keep memory: times include page faults")
    names = common.chosen(args.models or MODELS, list(CASES))
    common.check_destination(args.json)
    done = common.earlier("compare", args.json) if args.resume else {}
    kept = {entry["model"]: entry for entry in done.get("models", ())}
    result: Result = {**common.environment("compare", arguments), "models": list(kept.values())}
    for name in names:
        if name in kept:
            continue
        common.progress(f"{name}:")
        result["models"].append(_compare(name, args))
        result["summary"] = summary(result["models"])
        if args.json != "-":
            common.write(args.json, result, _markdown(result))
        gc.collect()
    result["summary"] = summary(result["models"])
    common.write(args.json, result, _markdown(result))
    return 0 if all(row["met"] for row in result["summary"]) else 1


@dataclass
class _Way:
    """One way that is put in, and what was measured of it."""

    name: str
    prepare: Callable[[], None]
    row: Result = field(default_factory=dict)


def _compare(name: str, args: argparse.Namespace) -> Result:
    """Measure all ways of one model."""
    loaded = build(name)
    model, step = loaded.model, step_of(loaded)
    device = next(model.parameters()).device
    rows: list[Result] = []
    ways: list[_Way] = []
    reference: list[torch.Tensor] = []

    def keep(row: Result, way: _Way | None) -> None:
        rows.append(row)
        common.progress(f"  {_line(row)}")
        if way is not None:
            ways.append(way)

    for peer in peers(args.ratios, inductor=args.inductor):
        keep(*_try(loaded, peer, reference, device))
    profile = planner.profile(model, loaded.example_args, example_kwargs=loaded.example_kwargs, loss_fn=loaded.loss_fn)
    wanted = [("at the peak of " + row["way"], row["peak_bytes"]) for row in rows[1:] if row["status"] == "run"]
    wanted += [(f"at {percent(share, 0)} of eager's", int(share * rows[0]["peak_bytes"])) for share in args.shares]
    for title, budget_bytes in _distinct(wanted):
        keep(*_plan(loaded, title, budget_bytes, profile, args, reference, device))
    smallest = [row["smallest_bytes"] for row in rows if "smallest_bytes" in row]
    if smallest:
        keep(*_plan(loaded, "as small as it goes", min(smallest), profile, args, reference, device))
    rounds = in_turn([(way.prepare, step) for way in ways], args.seconds, device)
    for position, way in enumerate(ways):
        way.row["time_ratio"] = median(took[position] / took[0] for took in rounds)
        way.row["rounds"] = len(rounds)
    _take_out(loaded)
    return {"model": name, "dropout": _has_dropout(model), "rows": rows, **against(rows)}


def _distinct(wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Plan once for each budget: alternatives often do the same."""
    titles: dict[int, str] = {}
    for title, budget_bytes in wanted:
        titles.setdefault(budget_bytes, title)
    return [(title, budget_bytes) for budget_bytes, title in titles.items()]


def _try(
    loaded: ZooModel, peer: Peer, reference: list[torch.Tensor], device: torch.device
) -> tuple[Result, _Way | None]:
    """Run an alternative once and hold its gradients against eager's; the first that runs is eager."""
    row: Result = {"way": peer.name, "ours": False, "status": "run"}
    prepare = _switch(loaded, peer)
    try:
        row["peak_bytes"], row["gradients"] = _measure(loaded, prepare, reference, device)
    except NotForThisModelError as error:
        return {**row, "status": "not run", "reason": f"{peer.name} does not run it: {error}"}, None
    except Exception as error:
        error = getattr(error, "inner_exception", None) or error  # Dynamo wraps what a backend raises
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        return {**row, "status": "failed", "reason": reason}, None
    finally:
        _take_out(loaded)
    return row, _Way(peer.name, prepare, row)


_IN_FORCE: dict[int, ExitStack] = {}
"""By model, what is put into it now."""


def _take_out(loaded: ZooModel) -> None:
    use(loaded.model, None)
    _IN_FORCE.pop(id(loaded.model), ExitStack()).close()


def _switch(loaded: ZooModel, peer: Peer) -> Callable[[], None]:
    """Give what puts an alternative in force; what it compiles is kept from one time to the next."""
    compiled: list[Any] = []

    def prepare() -> None:
        _take_out(loaded)
        stack = _IN_FORCE[id(loaded.model)] = ExitStack()
        call = stack.enter_context(peer.put_in(loaded))
        if call is not None and not compiled:
            compiled.append(call)
        use(loaded.model, compiled[0] if compiled else None)

    return prepare


def _measure(
    loaded: ZooModel, prepare: Callable[[], None], reference: list[torch.Tensor], device: torch.device
) -> tuple[int, str]:
    """Give the peak of a step and what its gradients are beside those of the first way."""
    step = step_of(loaded)
    buffers = {name: buffer.clone() for name, buffer in loaded.model.named_buffers()}
    measured = peak_bytes(prepare, step, device)
    prepare()
    torch.manual_seed(0)
    step()
    gradients = [p.grad.detach().clone() for p in loaded.model.parameters() if p.grad is not None]
    with torch.no_grad():
        for name, buffer in loaded.model.named_buffers():
            buffer.copy_(buffers[name])
    if not reference:
        reference.extend(gradients)
    return measured, _beside(gradients, reference)


def _beside(gradients: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> str:
    if len(gradients) != len(reference):
        return "wrong"
    if all(torch.equal(a, b) for a, b in zip(gradients, reference, strict=True)):
        return "equal"
    length = float(torch.stack([g.double().norm() for g in reference]).norm())
    apart = float(torch.stack([(a - b).double().norm() for a, b in zip(gradients, reference, strict=True)]).norm())
    return f"within {apart / length:.0e}" if apart <= _WRONG * length else "wrong"


def _plan(
    loaded: ZooModel,
    title: str,
    budget_bytes: int,
    profile: Any,
    args: argparse.Namespace,
    reference: list[torch.Tensor],
    device: torch.device,
) -> tuple[Result, _Way | None]:
    """Plan for a peak, and run the plan."""
    row: Result = {"way": f"planned {title}", "ours": True, "status": "run", "budget_bytes": budget_bytes}
    begun = time.perf_counter()
    try:
        planner.auto_wrap(
            loaded.model,
            loaded.example_args,
            example_kwargs=loaded.example_kwargs,
            loss_fn=loaded.loss_fn,
            activation_budget=budget_bytes,
            runtime="graph",
            profile=profile,
            time_limit_seconds=args.time_limit,
        )
    except NoPlanFitsError as error:
        row["smallest_bytes"] = error.minimum_feasible_peak_bytes - sum(error.report["static_bytes"].values())
        reason = f"no plan was found below {mebibytes(row['smallest_bytes'])} MiB"
        return {**row, "status": "infeasible", "reason": reason}, None
    except PlannerError as error:
        return {**row, "status": "failed", "reason": str(error)}, None
    row["planning_seconds"] = time.perf_counter() - begun
    plan, call = planner.plan_of(loaded.model), installed_call(loaded.model)
    resident_bytes = plan.total_static_bytes
    row["predicted_peak_bytes"] = plan.peak_bytes - resident_bytes
    row["smallest_bytes"] = plan.minimum_feasible_peak_bytes - resident_bytes
    row["predicted_overhead"], row["bound"] = plan.overhead, plan.lower_bound_overhead

    def prepare() -> None:
        _take_out(loaded)
        use(loaded.model, call)

    row["peak_bytes"], row["gradients"] = _measure(loaded, prepare, reference, device)
    _take_out(loaded)
    return row, _Way(row["way"], prepare, row)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def against(rows: Sequence[Result]) -> Result:
    """Give for each alternative that costs something what our cheapest plan at its peak or below pays of that."""
    ours = [row for row in rows if row["ours"] and "time_ratio" in row]
    free = next(row for row in rows if not row["ours"])["peak_bytes"]
    compared = []
    for row in rows:
        if row["ours"] or row["status"] != "run" or row["gradients"] == "wrong" or row["way"] in ("eager", "Inductor"):
            continue
        theirs = row["time_ratio"] - 1
        at_most = [own for own in ours if own["peak_bytes"] <= row["peak_bytes"]]
        if theirs <= NOISE or not at_most or row["peak_bytes"] >= free:
            continue
        best = min(at_most, key=lambda own: own["time_ratio"])
        paid = best["time_ratio"] - 1
        compared.append({"way": row["way"], "theirs": theirs, "ours": paid, "quotient": max(paid, NOISE / 4) / theirs})
    lowest = {
        "ours": min((row["peak_bytes"] for row in ours), default=None),
        "theirs": min((r["peak_bytes"] for r in rows if _counts(r)), default=None),
    }
    return {"compared": compared, "lowest_peak_bytes": lowest}


def _counts(row: Result) -> bool:
    return not row["ours"] and row["status"] == "run" and row["gradients"] != "wrong"


def summary(models: Sequence[Result]) -> list[Result]:
    """Give for each kind of alternative what plans pay of its overhead, over all models."""
    found = []
    for kind, goal in GOALS.items():
        points = [
            {**point, "model": entry["model"]}
            for entry in models
            for point in entry["compared"]
            if point["way"].startswith(kind)
        ]
        quotients = [point["quotient"] for point in points]
        mean = geometric_mean(quotients) if quotients else None
        worst = max(points, key=lambda point: point["quotient"], default=None)
        met = mean is not None and worst is not None and mean <= goal and worst["quotient"] <= 1
        found.append({"kind": kind, "goal": goal, "points": len(points), "mean": mean, "worst": worst, "met": met})
    return found


def _line(row: Result) -> str:
    if "reason" in row:
        return f"{row['way']}: {row['status']}, {row['reason']}"
    return f"{row['way']}: {mebibytes(row['peak_bytes'])} MiB, gradients {row['gradients']}"


def _markdown(result: Result) -> str:
    legend = (
        "Peaks are MiB that a step allocates on top of what is resident, measured. Overhead is the median over rounds "
        "of step time over eager's in the same round, less one. Gradients are held against eager's from the same "
        "random state. *Planned* is our `graph` runtime with costs measured on this machine; its predicted peak is in "
        f"brackets. Compared are overheads above {percent(NOISE, 0)} of alternatives whose gradients are right, with "
        f"the cheapest plan at the same or a lower measured peak; a plan's own counts as no less than "
        f"{percent(NOISE / 4)}."
    )
    brief = ["alternative", "points", "planned / theirs (geometric mean)", "goal", "worst", "where"]
    parts = [common.table(brief, [_summary_cells(row) for row in result.get("summary", ())])]
    lows = [[entry["model"], *(mebibytes(entry["lowest_peak_bytes"][who]) for who in ("ours", "theirs"))]
            for entry in result["models"]]  # fmt: skip
    parts += ["## Lowest peak that was run", common.table(["model", "planned", "alternatives"], lows)]
    for entry in result["models"]:
        parts += [f"## {entry['model']}{', with dropout' if entry['dropout'] else ''}", *_model_parts(entry["rows"])]
    return common.page("Against what people use", result, legend, *parts)


def _summary_cells(row: Result) -> list[object]:
    if row["mean"] is None:
        return [row["kind"], 0, "-", row["goal"], "-", "-"]
    worst = row["worst"]
    where = f"{worst['model']}, {worst['way']}: {percent(worst['ours'])} for {percent(worst['theirs'])}"
    return [row["kind"], row["points"], f"{row['mean']:.2f}", row["goal"], f"{worst['quotient']:.2f}", where]


def _model_parts(rows: Sequence[Result]) -> Iterator[str]:
    run = sorted((row for row in rows if "time_ratio" in row), key=lambda row: -row["peak_bytes"])
    yield common.table(["way", "peak", "overhead", "gradients", "planned in"], [_cells(row) for row in run])
    if reasons := [f"- {row['way']}: {row['reason']}" for row in rows if "reason" in row]:
        yield "\n".join(reasons)


def _cells(row: Result) -> list[object]:
    peak = mebibytes(row["peak_bytes"])
    if row["ours"]:
        peak += f" ({mebibytes(row['predicted_peak_bytes'])})"
    seconds = f"{row['planning_seconds']:.1f} s" if row["ours"] else "-"
    return [row["way"], peak, percent(row["time_ratio"] - 1), row["gradients"], seconds]


if __name__ == "__main__":
    sys.exit(common.run(main))
