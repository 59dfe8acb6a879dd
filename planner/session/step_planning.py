"""Plan a captured step whole or in chunks; planning and running both come through here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from planner.analysis.study import Study
from planner.capture.joint import JointGraph
from planner.capture.provenance import places_of
from planner.common.options import AUTO, CHUNKS, COUNTS, TOLERANCE, chunks_of
from planner.common.units import format_percent
from planner.errors import UsageError
from planner.findings.finding import Finding, Severity, collapsed
from planner.plans.plan import NoPlanFitsError, Plan
from planner.session.step import (
    LoweredStep,
    Options,
    PlannedStep,
    lower_as_run,
    lower_step,
    plan_lowered,
    study_lowered,
)
from planner.transforms.chunk_region import ChunkRegion, find_region
from planner.transforms.chunk_rewrite import in_chunks


def plan_step(
    model: nn.Module,
    joint: JointGraph,
    options: Options,
    *,
    reuse: Plan | None = None,
    must_match: bool = False,
    known: PlannedStep | None = None,
) -> PlannedStep:
    """Plan a captured step, or reuse a plan, in as many chunks as that has; see :func:`plan_study`.

    The study of a ``known`` step with an equal graph is reused; its options may differ in the budget alone.
    """
    step = whole = lower_as_run(model, joint, options)
    if reuse is not None:
        chunks = chunks_of(reuse.fingerprint)
        region = find_region(whole.lowered) if chunks > 1 else None
        if region is not None:
            if options.budget.is_share:
                options = _in_bytes(options, study_lowered(model, whole, options))
            step = chunked(model, whole, chunks, options, region)
        return plan_lowered(model, step, options, reuse=reuse, must_match=must_match)
    study = known.study if known is not None and known.lowered.graph == whole.lowered.graph else None
    if options.runtime.chunk == 1:
        return plan_lowered(model, whole, options, study=study)
    study = study or study_lowered(model, whole, options)
    options = _in_bytes(options, study)
    if options.runtime.chunk == AUTO:
        return _cheapest(model, whole, study, options)
    assert isinstance(options.runtime.chunk, int)
    return plan_lowered(model, chunked(model, whole, options.runtime.chunk, options), options)


def chunked(
    model: nn.Module, whole: LoweredStep, chunks: int, options: Options, region: ChunkRegion | None = None
) -> LoweredStep:
    """Lower a step with a region of it in chunks: the given one, or one that is found; UsageError if there is none."""
    region = region or find_region(whole.lowered)
    if region is None:
        raise UsageError(
            f"chunk={chunks}: nothing that is large at the peak can be computed in chunks. Its rows must be "
            "independent of each other, and each reader must read rows alone; leave chunk out"
        )
    joint = whole.lowered.joint
    step = lower_step(model, in_chunks(joint, region, chunks), options)
    return replace(
        step,
        facts={**step.facts, CHUNKS: chunks},
        warnings=(*step.warnings, _note(joint, region, chunks)),
        capture_seconds=whole.capture_seconds,
    )


def _cheapest(model: nn.Module, whole: LoweredStep, study: Study, options: Options) -> PlannedStep:
    """Plan in one piece, then in more and more chunks as long as plans become feasible or cheaper.

    Raises NoPlanFitsError if none fits.
    """
    best: PlannedStep | None = None
    refused: NoPlanFitsError | None = None
    why = ""
    for step, costed in _candidates(model, whole, study, options):
        try:
            found = plan_lowered(model, step, options, study=_told(costed, why) if why else costed)
        except NoPlanFitsError as error:
            if refused is not None and error.minimum_feasible_peak_bytes >= refused.minimum_feasible_peak_bytes:
                break
            refused = error
            why = why or f"in one piece {str(error).partition(';')[0]}"
            continue
        if best is not None and found.plan.step_seconds >= best.plan.step_seconds:
            break
        best = found
        if best.plan.added_seconds == 0:
            break
        why = why or f"in one piece the plan adds {format_percent(best.plan.overhead)} to the step"
    if best is None:
        assert refused is not None
        raise refused
    return best


def _candidates(
    model: nn.Module, whole: LoweredStep, study: Study, options: Options
) -> Iterator[tuple[LoweredStep, Study]]:
    """Yield a step in one piece, then in more and more chunks, lowered and costed."""
    yield whole, study
    region = find_region(whole.lowered)
    for chunks in COUNTS:
        if region is not None and chunks <= region.rows:
            options.search.tell(f"planning in {chunks} chunks")
            step = chunked(model, whole, chunks, options, region)
            yield step, study_lowered(model, step, options)


def _told(study: Study, why: str) -> Study:
    """Return a study whose plans say why they are in chunks."""
    note = Finding(
        rule="why-slices",
        severity=Severity.NOTE,
        evidence=why,
        cause="recompute makes no single operation smaller; chunks do",
        fix="nothing: leave out chunk to plan in one piece",
    )
    return replace(study, origin=replace(study.origin, warnings=(*study.origin.warnings, note)))


def _in_bytes(options: Options, study: Study) -> Options:
    """Return options with the budget in bytes: a percentage is always of the step in one piece."""
    budget_bytes = study.posed(options.budget).budget_bytes + study.graph.total_static_bytes
    return replace(options, budget=options.budget.within(budget_bytes))


def _note(joint: JointGraph, region: ChunkRegion, chunks: int) -> Finding:
    places = places_of(joint.graph)
    modules = collapsed([places[node].module or "the model" for node in region.splits])
    size = -(-region.rows // chunks)
    last = region.rows % size
    return Finding(
        rule="in-slices",
        severity=Severity.NOTE,
        evidence=f"{len(region.splits)} operations of {modules} are computed for {size:,} of {region.rows:,} rows at a "
        "time" + (f", and {last:,} at last" if last else ""),
        cause="products and sums are added up in another order: loss and gradients are those of the step in one piece "
        f"to within {TOLERANCE:g} of their length in float32, and as many roundings in other types",
        fix="nothing: recompute changes no bit of the chunked step; 'verify' compares it with the step in one piece",
    )
