"""Is this better than what people use now? Real steps of every way, on the same models, in one run.

For each model every alternative is run and measured: peak, step time against eager in the same round, gradients
against eager's. Then plans are made for the peak of each alternative and at shares of the eager peak, and all
ways are timed in turn. Overheads are compared at the same or a lower measured peak; an alternative that costs less
than the noise, or gives wrong gradients, is shown and not compared. Exit code 1 if a goal is missed.

With ``--inductor`` all ways are compiled: ``torch.compile`` alone, which the others are held against, under each
``activation_memory_budget``, and plans that Inductor compiles, at their peaks and at shares of its. Some models
have sizes at which activations are most of the peak: beside gradients, which no plan makes smaller, little shows.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import planner
from benchmarks import common, comparison
from benchmarks.cases import ACTIVATION_SIZES, CASES, build
from benchmarks.common import Result, mebibytes, percent
from benchmarks.peers import INDUCTOR, NotForThisModelError, Peer, compiled_peers, peers
from benchmarks.steps import in_turn, peak_bytes, step_of, use
from cost_models.measured import Profile
from planner.capture.planned_call import remove_planned_call
from planner.capture.torch_internals import installed_call
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.plans.plan import NoPlanFitsError
from planner.report.progress import Shown, shown
from planner.zoo import ZooModel

MODELS = (
    "minigpt,gpt2,bert-large,vit-b16,resnet50,resnet152,llama-grouped,minimind-26m,mixtral-small,t5-base,"
    "convnext-tiny,unet,diffusion-unet"
)
NO_LIMIT = 1 << 50
"""A budget that nothing breaks."""

_ANOTHER_PROGRAM = 1e-2
"""How far off gradients of a compiled graph without recompute may be, relative to all together: it rounds
otherwise than eager does, and a token may be routed to another expert for it. Recompute is held to rounding alone,
beside eager or beside that graph."""

_TIMES_ROUNDING = 4.0
"""How far off gradients may be, as a multiple of how far eager's move when each parameter is rounded otherwise."""


@dataclass
class _References:
    """What gradients are held against: eager's, a compiled graph's without recompute, and how far off they may be."""

    eager: list[torch.Tensor] | None = None
    compiled: list[torch.Tensor] | None = None
    rounding: float = 0.0
    draws_others: bool = False
    """Whether what others compile draws random numbers that are not eager's."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("compare", __doc__, resumes=True)
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: {MODELS})")
    percentages: Result = {"metavar": "PERCENT", "type": common.ratios}
    ratios = "activation_memory_budget of PyTorch's partitioner (default: 100,80,60,40,20,1)"
    parser.add_argument("--ratios", default="100,80,60,40,20,1", help=ratios, **percentages)
    shares = "of the peak of eager, with --inductor of torch.compile alone, to plan for (default: 90,80,...,20)"
    parser.add_argument("--shares", default="90,80,70,60,50,40,30,20", help=shares, **percentages)
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="to time one model (default: 60)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=8.0, help="for each solve (default: 8)")
    parser.add_argument("--inductor", action="store_true", help="compare what is compiled, and nothing else")
    args = parser.parse_args(arguments)
    common.keep_memory()
    names = common.chosen(args.models or MODELS, list(CASES))
    common.check_destination(args.json)
    done = common.earlier("compare", args.json) if args.resume else {}
    kept = {entry["model"]: entry for entry in done.get("models", ())}
    result: Result = {**common.environment("compare", arguments), "models": list(kept.values())}
    with shown() as bar:
        for name in names:
            if name in kept:
                continue
            result["models"].append(_compare(name, args, bar))
            _write(args.json, result)
            gc.collect()
    _write(args.json, result)
    return 0 if all(row["met"] for row in result["summary"]) else 1


def _write(destination: str, result: Result) -> None:
    """Write what there is: the page, and where matplotlib is installed a picture of each model beside it."""
    result["models"] = [{**entry, **comparison.against(entry["rows"])} for entry in result["models"]]
    result["summary"] = comparison.summary(result["models"])
    pictures = None
    if destination != "-" and find_spec("matplotlib") is not None:
        folder = Path(destination).with_suffix("")
        for entry in result["models"]:
            comparison.draw(entry, folder / f"{entry['model']}.svg")
        pictures = folder.name
    common.write(destination, result, comparison.markdown(result, pictures))


@dataclass
class _Way:
    """One way that is put in, and what was measured of it."""

    name: str
    prepare: Callable[[], None]
    step: Callable[[], Any]
    row: Result = field(default_factory=dict)


def _compare(name: str, args: argparse.Namespace, bar: Shown) -> Result:
    """Measure all ways of one model."""
    common.progress(f"{name}:")
    bar(f"{name}: alternatives")
    loaded = build(name, **(ACTIVATION_SIZES.get(name, {}) if args.inductor else {}))
    model = loaded.model
    # What is compiled has a model of its own: at one that others change Dynamo looks again each time.
    apart = replace(loaded, model=copy.deepcopy(model))
    rows: list[Result] = []
    ways: list[_Way] = []
    references = _References(draws_others=args.inductor and _has_dropout(model))

    def keep(row: Result, way: _Way | None) -> None:
        rows.append(row)
        common.progress(f"  {_line(row)}")
        if way is not None:
            ways.append(way)

    alternatives = compiled_peers(args.ratios) if args.inductor else peers(args.ratios)
    for number, peer in enumerate(alternatives):
        bar.count(number, len(alternatives))
        keep(*_try(apart if peer.compiles else loaded, peer, references))
    references.draws_others = False  # plans draw what eager draws
    options: dict[str, Any] = {"runtime": "inductor"} if args.inductor else {"profile": _profile(loaded)}
    base = next((row for row in rows if row["way"] == INDUCTOR and row["status"] == "run"), rows[0])
    wanted = [("without recompute", NO_LIMIT)] if args.inductor else []
    wanted += [("at the peak of " + row["way"], row["peak_bytes"]) for row in rows[1:] if row["status"] == "run"]
    whose = "Inductor's" if base["way"] == INDUCTOR else "eager's"
    wanted += [(f"at {percent(share, 0)} of {whose}", int(share * base["peak_bytes"])) for share in args.shares]
    for title, budget_bytes in _distinct(wanted):
        bar(f"{name}: planned {title}")
        keep(*_plan(apart, title, budget_bytes, options, args, references))
    smallest = [row["smallest_bytes"] for row in rows if "smallest_bytes" in row]
    if args.inductor:  # a graph's peak says little of its code's
        resident_bytes = next((row["resident_bytes"] for row in rows if "resident_bytes" in row), 0)
        smallest = [row["code_bytes"] - resident_bytes for row in rows if "code_bytes" in row]
    if smallest:
        keep(*_plan(apart, "as small as it goes", min(smallest), options, args, references))
    bar(f"{name}: all ways in turn, {args.seconds:g} s or five rounds")
    rounds = in_turn([(way.prepare, way.step) for way in ways], args.seconds, bar.count)
    against = next((position for position, way in enumerate(ways) if way.row is base), 0)
    for position, way in enumerate(ways):
        ratios = [took[position] / took[against] for took in rounds]
        way.row["time_ratio"], way.row["time_ratio_error"] = median(ratios), comparison.error_of(ratios)
        way.row["rounds"] = len(rounds)
    _take_out(loaded)
    _take_out(apart)
    return {"model": name, "dropout": _has_dropout(model), "rows": rows}


def _profile(loaded: ZooModel) -> Profile:
    return planner.profile(
        loaded.model, planner.Inputs.of(loaded.example_args, loaded.example_kwargs), loss_fn=loaded.loss_fn
    )


def _distinct(wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Plan once for each budget: alternatives often do the same."""
    titles: dict[int, str] = {}
    for title, budget_bytes in wanted:
        titles.setdefault(budget_bytes, title)
    return [(title, budget_bytes) for budget_bytes, title in titles.items()]


def _try(loaded: ZooModel, peer: Peer, references: _References) -> tuple[Result, _Way | None]:
    """Run an alternative once and hold its gradients against eager's; the first that runs is eager."""
    row: Result = {"way": peer.name, "ours": False, "status": "run"}
    prepare = _switch(loaded, peer)
    try:
        row["peak_bytes"], row["gradients"] = _measure(loaded, prepare, references, peer.compiles)
    except NotForThisModelError as error:
        return {**row, "status": "not run", "reason": f"does not take it: {error}"}, None
    except Exception as error:
        error = getattr(error, "inner_exception", None) or error  # Dynamo wraps what a backend raises
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        return {**row, "status": "failed", "reason": reason}, None
    finally:
        _take_out(loaded)
    return row, _Way(peer.name, prepare, step_of(loaded), row)


_IN_FORCE: dict[int, ExitStack] = {}
"""By model, what is put into it now."""


def _take_out(loaded: ZooModel) -> None:
    remove_planned_call(loaded.model)  # with its mark, which what others compile would run into
    use(loaded.model, None)
    _IN_FORCE.pop(id(loaded.model), ExitStack()).close()


def _switch(loaded: ZooModel, peer: Peer) -> Callable[[], None]:
    """Return what puts an alternative in force; what it compiles is kept from one time to the next."""
    compiled: list[Any] = []

    def prepare() -> None:
        _take_out(loaded)
        stack = _IN_FORCE[id(loaded.model)] = ExitStack()
        call = stack.enter_context(peer.put_in(loaded))
        if call is not None and not compiled:
            compiled.append(call)
        use(loaded.model, compiled[0] if compiled else None)

    return prepare


def _measure(loaded: ZooModel, prepare: Callable[[], None], references: _References, compiles: bool) -> tuple[int, str]:
    """Return the peak of a step and what its gradients are beside eager's.

    The first way that is measured is eager; the first that ``compiles`` is a compiled graph without recompute.
    """
    step = step_of(loaded)
    buffers = {name: buffer.clone() for name, buffer in loaded.model.named_buffers()}
    measured = peak_bytes(prepare, step)

    def gradients() -> list[torch.Tensor]:
        prepare()
        torch.manual_seed(0)
        step()
        found = [p.grad.detach().clone() for p in loaded.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for name, buffer in loaded.model.named_buffers():
                buffer.copy_(buffers[name])
        return found

    found = gradients()
    if references.eager is None:
        with _rounded_otherwise(loaded.model):
            moved = _apart(gradients(), found)
        references.eager, references.rounding = found, _tolerance(found, moved)
    return measured, _verdict(found, references, compiles)


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Move every parameter by its last bit, up or down."""
    generator = torch.Generator().manual_seed(0)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)
    yield
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)


def _tolerance(gradients: Sequence[torch.Tensor], moved: float) -> float:
    """Return how far off gradients may be that are as good, where rounding alone moved them so far."""
    least = max(torch.finfo(gradient.dtype).eps for gradient in gradients) ** 0.5
    return max(least, min(_TIMES_ROUNDING * moved, _ANOTHER_PROGRAM))


def _verdict(gradients: list[torch.Tensor], references: _References, compiles: bool) -> str:
    assert references.eager is not None
    if len(gradients) != len(references.eager):
        return "wrong"
    error = _apart(gradients, references.eager)
    if compiles and references.compiled is None and error <= _ANOTHER_PROGRAM:
        references.compiled = gradients
    known = [reference for reference in (references.eager, references.compiled) if reference is not None]
    if min(_apart(gradients, reference) for reference in known) > references.rounding:
        return "other draws" if references.draws_others and compiles else "wrong"
    return f"within {error:.0e}" if error else "equal"


def _apart(gradients: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over that of the reference, all gradients together."""
    difference = torch.stack([(a - b).double().norm() for a, b in zip(gradients, reference, strict=True)]).norm()
    return float(difference / torch.stack([b.double().norm() for b in reference]).norm())


def _plan(
    loaded: ZooModel,
    title: str,
    budget_bytes: int,
    options: Mapping[str, Any],
    args: argparse.Namespace,
    references: _References,
) -> tuple[Result, _Way | None]:
    """Plan for a peak, and run the plan."""
    compiled = options.get("runtime") == "inductor"
    row: Result = {
        "way": f"planned {title}", "ours": True, "compiled": compiled, "status": "run", "budget_bytes": budget_bytes,
    }  # fmt: skip
    begun = time.perf_counter()
    try:
        planner.auto_wrap(
            loaded.model,
            planner.Inputs.of(loaded.example_args, loaded.example_kwargs),
            loss_fn=loaded.loss_fn,
            **grouped(
                activation_budget=budget_bytes,
                time_limit_seconds=args.time_limit,
                wait=True,  # else a better plan takes the place of the one that the row names
                **{"runtime": "graph", **options},
            ),
        )
    except NoPlanFitsError as error:
        row["smallest_bytes"] = error.minimum_feasible_peak_bytes - sum(error.report["static_bytes"].values())
        reason = f"no plan was found below {mebibytes(row['smallest_bytes'])} MiB"
        return {**row, "status": "infeasible", "reason": reason}, None
    except InfeasibleBudgetError as error:
        row["code_bytes"] = error.minimum_feasible_peak_bytes
        return {**row, "status": "failed", "reason": str(error)}, None
    except PlannerError as error:
        return {**row, "status": "failed", "reason": str(error)}, None
    row["planning_seconds"] = time.perf_counter() - begun
    call = installed_call(loaded.model)

    def prepare() -> None:
        _take_out(loaded)
        use(loaded.model, call)

    row["peak_bytes"], row["gradients"] = _measure(loaded, prepare, references, compiled)
    plan = planner.plan_of(loaded.model)  # the one for what was observed of the loop
    resident_bytes = plan.total_static_bytes
    row["resident_bytes"], row["predicted_peak_bytes"] = resident_bytes, plan.peak_bytes - resident_bytes
    row["smallest_bytes"] = plan.minimum_feasible_peak_bytes - resident_bytes
    row["predicted_overhead"], row["bound"] = plan.overhead, plan.lower_bound_overhead
    _take_out(loaded)
    return row, _Way(row["way"], prepare, step_of(loaded), row)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def _line(row: Result) -> str:
    if "reason" in row:
        return f"{row['way']}: {row['status']}, {row['reason']}"
    return f"{row['way']}: {mebibytes(row['peak_bytes'])} MiB, gradients {row['gradients']}"


if __name__ == "__main__":
    sys.exit(common.run(main))
