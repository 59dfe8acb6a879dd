"""Exporters to other frameworks, found by their files.

Every public module of this package defines one ``EXPORTER``; dropping a file in is all it takes to add
one. An exporter chooses, among what its framework can do, what costs least within the plan's
budget; the simulator says what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Protocol, runtime_checkable

from planner.analysis.study import Study
from planner.common.options import chunks_of
from planner.common.registry import defined, unknown
from planner.common.units import format_bytes
from planner.errors import UsageError
from planner.exporters._export import Export, Figures, Label, Placement
from planner.exporters._step import CannotExpressError, ExportStep
from planner.exporters._whole_modules import comment
from planner.findings.finding import collapsed
from planner.ir.graph import named_by
from planner.plans.module_choices import modules_of
from planner.plans.plan import Plan
from planner.plans.reuse import check_match, check_same_step


@runtime_checkable
class Exporter(Protocol):
    """Protocol of an exporter module's ``EXPORTER``."""

    name: str
    """The name that users type."""
    summary: str
    """One line on what the framework can recompute."""
    lost: tuple[str, ...]
    """What always differs in an export, one line each."""

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Whether just these modules can be named."""

    def place(self, step: ExportStep) -> Placement:
        """Choose what to recompute; raise CannotExpressError if nothing expressible keeps the budget."""

    def write(self, placement: Placement, plan: Plan) -> str:
        """Return configuration or code for a placement, without a header."""


@cache
def _exporters() -> dict[str, Exporter]:
    return defined(__name__, __path__, "EXPORTER", Exporter)  # type: ignore[type-abstract]


def targets() -> tuple[str, ...]:
    """Return the names of all frameworks, sorted."""
    return tuple(_exporters())


def get(name: str) -> Exporter:
    """Return an exporter by its name, or raise UsageError."""
    if exporter := _exporters().get(name):
        return exporter
    raise unknown("exporter to", name, _exporters())


def carries_exactly(plan: Plan, to: str) -> bool:
    """Whether a framework can run a plan as it is, so that nothing needs to be chosen or simulated.

    So it is with a plan that recomputes and offloads nothing, and with one of whole modules (``runtime="modules"``,
    with nothing kept in them) where the framework checkpoints modules of the same model by their names, as that
    runtime does.
    """
    exporter = get(to)
    if plan.offloading is not None and plan.offloading.values:
        return False
    if not plan.recomputations:
        return True
    return (
        plan.runtime == "modules"
        and not plan.kept
        and exporter.takes(modules_of(plan))
        # a BatchNorm that runs again would update its statistics twice
        and not any("batch_norm" in named_by(key)[1] for keys in plan.recomputations.values() for key in keys)
    )


def export(plan: Plan, *, to: str, study: Study | None = None) -> Export:
    """Express a plan for another framework.

    Parameters
    ----------
    plan : Plan
    to : str
        One of ``"accelerate"``, ``"fsdp"``, ``"huggingface"``.
    study : Study, optional
        The step that the plan is for, from :func:`planner.study` with ``runtime="modules"``: whatever is not carried
        over exactly is chosen again within the plan's budget, and simulated.

    Returns
    -------
    Export
        With ``text``, ``label`` and what it costs; without a text if the label is ``"unsupported"``.

    Raises
    ------
    UsageError
        If there is no such exporter, the plan is for a step in chunks, or the study is needed and missing, or is for
        another runtime than ``modules``.
    PlanMismatchError
        If the study is of another step.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> step = planner.study(model, torch.randn(256, 64), runtime="modules")
    >>> planner.export(step.plan(budget="100%"), to="fsdp", study=step).label
    <Label.EXACT: 'exact'>
    """
    exporter = get(to)
    if chunks_of(plan.fingerprint) > 1:
        raise UsageError(
            f"the plan is for a step in {chunks_of(plan.fingerprint)} chunks, which no other framework runs: plan "
            "without chunk, or run the plan with auto_wrap"
        )
    if study is not None:
        same_graph = plan.runtime == study.origin.runtime
        (check_match if same_graph else check_same_step)(plan, study.origin)
    planned = Figures(peak_bytes=plan.peak_bytes, overhead=plan.overhead)
    found = Export(
        target=exporter.name,
        model=plan.model,
        label=Label.EXACT,
        reason="the same modules are recomputed" if plan.recomputations else "the plan recomputes nothing",
        budget_bytes=plan.budget_bytes,
        plan=planned,
        predicted=planned,
    )
    if carries_exactly(plan, to):
        return _written(found, exporter, plan, Placement(modules=modules_of(plan) if plan.recomputations else ()))
    if study is None or study.regions is None:
        raise UsageError(
            f"an export to {to} chooses modules and simulates the step, so it needs that step: pass "
            "study=planner.study(model, inputs, runtime='modules'), or on the command line the model and its sizes"
        )
    step = ExportStep(plan, study)
    try:
        placement = exporter.place(step)
    except CannotExpressError as error:
        return replace(found, label=Label.UNSUPPORTED, reason=str(error), predicted=None)
    lost, figures = tuple(_losses(exporter, plan, study)), step.figures(placement)
    found = replace(found, label=Label.APPROXIMATE, reason=exporter.summary, lost=lost, predicted=figures)
    return _written(found, exporter, plan, placement)


def _written(found: Export, exporter: Exporter, plan: Plan, placement: Placement) -> Export:
    assert found.predicted is not None
    header = [
        f"Activation checkpointing of {plan.model or 'a model'} for {exporter.name}, from a plan for a budget of "
        f"{plan.budget_bytes:,} bytes.",
        f"{found.label}: {found.reason}.",
        f"Predicted: {found.predicted.exact}",
        f"The plan itself: {found.plan.exact}",
        *(f"Differs: {line}." for line in found.lost),
    ]
    text = "".join(map(comment, header)) + "\n" + exporter.write(placement, plan)
    return replace(found, text=text, modules=placement.modules)


def _losses(exporter: Exporter, plan: Plan, study: Study) -> Iterator[str]:
    yield from exporter.lost
    if plan.offloading is not None and plan.offloading.values:
        yield (
            f"the plan offloads {format_bytes(plan.offloading.host_bytes)} to the host's memory; the export offloads "
            "nothing and recomputes more"
        )
    if plan.kept:
        yield f"the plan keeps results of recomputed modules ({collapsed(list(plan.kept))}); the export keeps none"
    if plan.runtime != study.origin.runtime:
        yield f"the plan's figures are for the runtime {plan.runtime!r}, the export's for {study.origin.runtime!r}"
