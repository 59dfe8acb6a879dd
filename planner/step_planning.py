"""Plan a captured step, in one piece or in slices: planning and running both come through here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from planner.chunk_region import Region, find_region
from planner.chunk_rewrite import in_slices
from planner.errors import UsageError
from planner.findings import Finding, Severity, collapsed
from planner.joint import JointGraph
from planner.plan_types import NoPlanFitsError, Plan
from planner.provenance import Places
from planner.session import LoweredStep, Options, PlannedStep, lower_as_run, lower_step, plan_lowered
from planner.slices import AUTO, COUNTS, SLICES, TOLERANCE, slices_of
from planner.units import format_percent


def plan_step(
    model: nn.Module, joint: JointGraph, options: Options, *, reuse: Plan | None = None, must_match: bool = False
) -> PlannedStep:
    """Plan a captured step.

    Parameters
    ----------
    model : torch.nn.Module
    joint : JointGraph
    options : Options
    reuse : Plan, optional
        A plan to take over if it belongs to this graph, or if its decisions fit it and keep the budget; its step
        is then in as many slices.
    must_match : bool
        Refuse instead of planning anew when ``reuse`` is of another model or of other shapes.

    Raises
    ------
    UsageError
        If slices are asked for, and there is nothing to be sliced.
    PlanMismatchError
        If ``must_match`` and the plan does not match, with what differs.
    InfeasibleBudgetError
        If no plan fits.
    """
    whole = lower_as_run(model, joint, options)
    if reuse is not None:
        slices = slices_of(reuse.fingerprint)
        region = find_region(whole.lowered) if slices > 1 else None
        step = whole if region is None else _sliced(model, whole, region, slices, options)
        return plan_lowered(model, step, options, reuse=reuse, must_match=must_match)
    if options.chunk == 1:
        return plan_lowered(model, whole, options)
    if options.chunk == AUTO:
        return _cheapest(model, whole, options)
    assert isinstance(options.chunk, int)
    region = find_region(whole.lowered)
    if region is None:
        raise UsageError(
            f"chunk={options.chunk}: nothing that is large at the peak can be computed in slices. Its rows must be "
            "independent of each other, and nobody may need it whole; leave chunk out"
        )
    return plan_lowered(model, _sliced(model, whole, region, options.chunk, options), options)


def _cheapest(model: nn.Module, whole: LoweredStep, options: Options) -> PlannedStep:
    """Plan in one piece, then in more and more slices as long as that makes a plan feasible, or cheaper."""
    best: PlannedStep | None = None
    refused: NoPlanFitsError | None = None
    why = ""
    for step in _candidates(model, whole, options):
        try:
            found = plan_lowered(model, replace(step, warnings=(*step.warnings, *_why(why, step))), options)
        except NoPlanFitsError as error:
            if refused is not None and error.minimum_feasible_peak_bytes >= refused.minimum_feasible_peak_bytes:
                break
            refused = error
            why = why or f"in one piece {str(error).partition(';')[0]}"
            continue
        if best is not None and _seconds(found) >= _seconds(best):
            break
        best = found
        if best.plan.recompute_seconds == 0:
            break
        why = why or f"in one piece recompute costs {format_percent(best.plan.overhead)} of the step"
    if best is None:
        assert refused is not None
        raise refused
    return best


def _candidates(model: nn.Module, whole: LoweredStep, options: Options) -> Iterator[LoweredStep]:
    yield whole
    region = find_region(whole.lowered)
    if region is not None:
        for slices in COUNTS:
            if slices <= region.rows:
                if options.progress is not None:
                    options.progress(f"planning in {slices} slices")
                yield _sliced(model, whole, region, slices, options)


def _seconds(step: PlannedStep) -> float:
    return step.plan.baseline_step_seconds + step.plan.recompute_seconds


def _sliced(model: nn.Module, whole: LoweredStep, region: Region, slices: int, options: Options) -> LoweredStep:
    """Lower a step with a region of it in slices."""
    joint = whole.lowered.joint
    step = lower_step(model, in_slices(joint, region, slices), options)
    return replace(
        step,
        facts={**step.facts, SLICES: slices},
        warnings=(*step.warnings, _note(joint, region, slices)),
        capture_seconds=whole.capture_seconds,
    )


def _note(joint: JointGraph, region: Region, slices: int) -> Finding:
    places = Places(joint.graph)
    modules = collapsed([places[node].module or "the model" for node in region.splits])
    size = -(-region.rows // slices)
    last = region.rows % size
    return Finding(
        rule="in-slices",
        severity=Severity.NOTE,
        evidence=f"{len(region.splits)} operations of {modules} are computed for {size:,} of {region.rows:,} rows at a "
        "time" + (f", and {last:,} at last" if last else ""),
        cause="products and sums are added up in another order: loss and gradients are those of the step in one piece "
        f"to within {TOLERANCE:g} of their length in float32, and as many roundings in other types",
        fix="nothing: recompute changes no bit of the sliced step, and 'verify' holds it against the one in one piece",
    )


def _why(why: str, step: LoweredStep) -> Iterator[Finding]:
    if why and SLICES in step.facts:
        yield Finding(
            rule="why-slices",
            severity=Severity.NOTE,
            evidence=why,
            cause="recompute makes no single operation smaller; slices do",
            fix="nothing: leave out chunk to plan in one piece",
        )
