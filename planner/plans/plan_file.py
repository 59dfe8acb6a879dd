"""The JSON of a plan, schema 1: a report, and with decisions and fingerprint a plan file.

A plan file is data and nothing else. Reading one trusts nothing: each field's type and range is
checked, and whatever is wrong ends in one :class:`~planner.errors.PlanFileError` that names it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from planner.common.atomic import write_text
from planner.common.json_reader import Node, parse
from planner.errors import PlanFileError
from planner.findings.finding import Finding, Severity
from planner.ir.graph import LOSS_KEY, LOSS_KEY_BEFORE
from planner.plans.details_file import details_data, hold_to_plan, read_details
from planner.plans.offload import OffloadedModule, OffloadedValue, Offloading, Place
from planner.plans.plan import (
    SCHEMA,
    BaselineRow,
    LayerPlacement,
    PeakLocation,
    Plan,
    ReservedMemory,
    Verification,
)
from planner.plans.values import ValueRow, ValueTable

_LARGEST_FILE_BYTES = 256 * 2**20


def report(plan: Plan, *, operations: bool = False) -> dict[str, Any]:
    """Give a plan's report as plain data; every key of it stays in later schemas."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "model": plan.model,
        "torch": plan.torch,
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "activation_budget_bytes": plan.activation_budget_bytes,
        "static_bytes": dict(plan.static_bytes),
        "baseline": {"peak_bytes": plan.baseline_peak_bytes, "step_seconds": plan.baseline_step_seconds},
        "predicted": {
            "peak_bytes": plan.peak_bytes,
            "peak_at": asdict(plan.peak_at),
            "overhead": plan.overhead,
            "recompute_seconds": plan.recompute_seconds,
            "anatomy_bytes": dict(plan.anatomy),
        },
        "lower_bound": {"overhead": plan.lower_bound_overhead, "recompute_seconds": plan.lower_bound_seconds},
        "optimizer_step": {"temporary_bytes": plan.optimizer_step_bytes, "peak_bytes": plan.optimizer_peak_bytes},
        "minimum_feasible_peak_bytes": plan.minimum_feasible_peak_bytes,
        "runtime": plan.runtime,
        "solver": {"name": plan.solver, "seconds": plan.solve_seconds},
        "capture_seconds": plan.capture_seconds,
        "cost_model": plan.cost_model,
        "device": plan.device,
        "placement": [asdict(layer) for layer in plan.placement],
        "baselines": [asdict(row) for row in plan.baselines],
        "warnings": [asdict(warning) for warning in plan.warnings],
    }
    if plan.kept:
        data["kept"] = {module: {name: list(n) for name, n in kept.items()} for module, kept in plan.kept.items()}
    if plan.offloading is not None:
        data["offload"] = asdict(plan.offloading)
        if not plan.offloading.modules:
            del data["offload"]["modules"], data["offload"]["least_bytes"]
    if plan.reserved is not None:
        data["predicted"]["cuda_allocator"] = asdict(plan.reserved)
    if plan.details is not None:
        data["details"] = details_data(plan.details)
    if plan.verification is not None:
        measured = asdict(plan.verification)
        data["measured"] = {**measured, "differences": list(plan.verification.differences)}
    if operations:
        data["operations"] = [asdict(row) for row in plan.operations]
    return data


def to_json(plan: Plan) -> str:
    """Give the text of a plan file."""
    data = report(plan)
    data["fingerprint"] = dict(plan.fingerprint)
    data["decisions"] = {key: list(before) for key, before in plan.recomputations.items()}
    if plan.values is not None:
        data["values"] = _value_columns(plan.values)
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all."""
    write_text(path, to_json(plan))


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises
    ------
    PlanFileError
        If it cannot be read, is damaged, of another schema, or not a plan.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanFileError(f"cannot read plan file {path}: {reason}") from error
    try:
        return from_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is not a plan file: it is not UTF-8 text") from error
    except PlanFileError as error:
        raise PlanFileError(f"{path}: {error}") from error


def from_json(text: str) -> Plan:
    """Read the text of a plan file.

    Raises
    ------
    PlanFileError
        If it is damaged, of another schema, or not a plan.
    """
    if len(text) > _LARGEST_FILE_BYTES:
        raise PlanFileError(f"the plan is over {_LARGEST_FILE_BYTES} bytes, which no real one is")
    root = Node(parse(text), "the plan")
    schema = root["schema"].integer()
    if schema != SCHEMA:
        raise PlanFileError(f"the plan is of schema {schema}, and schema {SCHEMA} is what can be read here")
    if root["status"].text() == "infeasible":
        raise PlanFileError("this is the report of a budget that no plan fits; it holds no plan")
    plan = Plan(
        model=root["model"].text(),
        fingerprint={key: node.text_or_integer() for key, node in root["fingerprint"].fields()},
        status=root["status"].one_of("optimal", "feasible"),
        budget_bytes=root["budget_bytes"].integer(),
        static_bytes={key: node.integer() for key, node in root["static_bytes"].fields()},
        baseline_peak_bytes=root["baseline"]["peak_bytes"].integer(),
        baseline_step_seconds=root["baseline"]["step_seconds"].number(),
        peak_bytes=root["predicted"]["peak_bytes"].integer(),
        peak_at=_peak_location(root["predicted"]["peak_at"]),
        recompute_seconds=root["predicted"]["recompute_seconds"].number(),
        lower_bound_seconds=root["lower_bound"]["recompute_seconds"].number(),
        minimum_feasible_peak_bytes=root["minimum_feasible_peak_bytes"].integer(),
        solver=root["solver"]["name"].text(),
        solve_seconds=root["solver"]["seconds"].number(),
        capture_seconds=root["capture_seconds"].number(),
        cost_model=root["cost_model"].text(),
        device=root["device"].text(),
        torch=root["torch"].text(),
        anatomy={key: node.integer() for key, node in root["predicted"]["anatomy_bytes"].fields()},
        placement=tuple(_layer(node) for node in root["placement"].items()),
        baselines=tuple(_baseline(node) for node in root["baselines"].items()),
        recomputations={key: tuple(again.text() for again in node.items()) for key, node in root["decisions"].fields()},
        warnings=tuple(_warning(node) for node in root["warnings"].items()),
        verification=_verification(root["measured"]) if root.has("measured") else None,
        optimizer_step_bytes=root["optimizer_step"]["temporary_bytes"].integer(),
        optimizer_peak_bytes=root["optimizer_step"]["peak_bytes"].integer(),
        runtime=root["runtime"].text(),
        offloading=_offloading(root["offload"]) if root.has("offload") else None,
        kept={module: _kept(node) for module, node in root["kept"].fields()} if root.has("kept") else {},
        reserved=_reserved(root["predicted"]["cuda_allocator"]) if root["predicted"].has("cuda_allocator") else None,
        details=read_details(root["details"]) if root.has("details") else None,
        values=_values(root["values"]) if root.has("values") else None,
    )
    _hold_together(plan)
    return plan


def _value_columns(table: ValueTable) -> dict[str, Any]:
    """Write the table by columns: there are hundreds of rows, and names of columns would be most of the file."""
    rows = [asdict(row) for row in table.rows]
    return {
        "steps": table.steps,
        "baseline_peak_step": table.baseline_peak_step,
        "peak_step": table.peak_step,
        "rows": {field.name: [row[field.name] for row in rows] for field in fields(ValueRow)},
    }


def _hold_together(plan: Plan) -> None:
    """Refuse a plan whose own numbers contradict each other, as an edited or mixed-up file's do."""
    alive_bytes = sum(plan.anatomy.values())
    if alive_bytes != plan.peak_bytes:
        raise PlanFileError(f"predicted.anatomy_bytes adds up to {alive_bytes}, not to the peak of {plan.peak_bytes}")
    if not (math.isfinite(plan.overhead) and plan.lower_bound_seconds <= plan.added_seconds):
        raise PlanFileError("predicted.recompute_seconds, lower_bound and baseline.step_seconds contradict each other")
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"predicted.peak_bytes is {plan.peak_bytes}, above the budget of {plan.budget_bytes}")
    if plan.optimizer_peak_bytes > plan.budget_bytes:
        raise PlanFileError(f"optimizer_step.peak_bytes is above the budget of {plan.budget_bytes}")
    if plan.total_static_bytes > plan.peak_bytes:
        raise PlanFileError(f"static_bytes adds up to {plan.total_static_bytes}, above the peak of {plan.peak_bytes}")
    hold_to_plan(plan)


def _peak_location(node: Node) -> PeakLocation:
    return PeakLocation(
        operation=node["operation"].text(),
        module=node["module"].text(),
        source=node["source"].text(),
        phase=node["phase"].text(),
    )


def _reserved(node: Node) -> ReservedMemory:
    return ReservedMemory(
        allocated_bytes=node["allocated_bytes"].integer(), reserved_bytes=node["reserved_bytes"].integer()
    )


def _offloading(node: Node) -> Offloading:
    return Offloading(
        values=tuple(_offloaded(value) for value in node["values"].items()),
        host_bytes=node["host_bytes"].integer(),
        host_budget_bytes=node["host_budget_bytes"].integer(),
        bytes_per_second=node["bytes_per_second"].number(),
        transfer_seconds=node["transfer_seconds"].number(),
        stall_seconds=node["stall_seconds"].number(),
        lossy=node["lossy"].boolean() if node.has("lossy") else False,
        modules=tuple(_offloaded_module(module) for module in node["modules"].items()) if node.has("modules") else (),
        least_bytes=node["least_bytes"].integer() if node.has("modules") else 0,
    )


def _offloaded_module(node: Node) -> OffloadedModule:
    return OffloadedModule(
        module=node["module"].text(),
        tensors=tuple(number.integer() for number in node["tensors"].items()),
        leaves_with=node["leaves_with"].text(),
        returns_with=node["returns_with"].text(),
    )


def _offloaded(node: Node) -> OffloadedValue:
    return OffloadedValue(
        operation=node["operation"].text(),
        output=node["output"].integer(),
        size_bytes=node["size_bytes"].integer(),
        leaves=_place(node["leaves"]),
        returns=tuple(_place(place) for place in node["returns"].items()),
        lossy=node["lossy"].boolean() if node.has("lossy") else False,
    )


def _kept(node: Node) -> dict[str, tuple[int, ...]]:
    return {operator: tuple(n.integer() for n in occurrences.items()) for operator, occurrences in node.fields()}


def _place(node: Node) -> Place:
    before = node["before"].text()
    return Place(before=LOSS_KEY if before == LOSS_KEY_BEFORE else before, runs=node["runs"].integer())


def _layer(node: Node) -> LayerPlacement:
    return LayerPlacement(
        module=node["module"].text(),
        block=node["block"].boolean(),
        saved_bytes=node["saved_bytes"].integer(),
        freed_bytes=node["freed_bytes"].integer(negative=True),
        recomputed=node["recomputed"].integer(),
        added_seconds=node["added_seconds"].number(),
        forward_seconds=node["forward_seconds"].number(),
        offloaded_bytes=node["offloaded_bytes"].integer() if node.has("offloaded_bytes") else 0,
        targets={key: count.integer() for key, count in node["targets"].fields()},
    )


def _number_or_none(node: Node) -> float | None:
    return None if node.is_null() else node.number()


def _baseline(node: Node) -> BaselineRow:
    return BaselineRow(
        name=node["name"].text(),
        peak_bytes=None if node["peak_bytes"].is_null() else node["peak_bytes"].integer(),
        overhead=_number_or_none(node["overhead"]),
        seconds=node["seconds"].number(),
        fits=node["fits"].boolean(),
        reason=node["reason"].text(),
    )


def _values(node: Node) -> ValueTable:
    rows = node["rows"]
    names = [field.name for field in fields(ValueRow)]
    if not rows.has("offloaded"):  # older plans have none
        names.remove("offloaded")
    columns = {name: list(rows[name].items()) for name in names}
    if len(set(map(len, columns.values()))) > 1:
        raise PlanFileError("values.rows: its columns are not of one length")
    return ValueTable(
        steps=node["steps"].integer(),
        baseline_peak_step=node["baseline_peak_step"].integer(),
        peak_step=node["peak_step"].integer(),
        rows=tuple(
            _value(number, dict(zip(columns, row, strict=True)))
            for number, row in enumerate(zip(*columns.values(), strict=True))
        ),
    )


def _value(number: int, row: dict[str, Node]) -> ValueRow:
    made_from = tuple(source.integer() for source in row["made_from"].items())
    if any(source >= number for source in made_from):
        raise PlanFileError(f"{row['made_from'].where} names a row that is not above it")
    return ValueRow(
        operation=row["operation"].text(),
        output=row["output"].integer(),
        size_bytes=row["size_bytes"].integer(),
        kept=row["kept"].boolean(),
        needed=row["needed"].boolean(),
        retained=row["retained"].boolean(),
        repeatable=row["repeatable"].boolean(),
        runs=row["runs"].integer(),
        seconds=row["seconds"].number(),
        again_runs=row["again_runs"].integer(),
        again_seconds=_number_or_none(row["again_seconds"]),
        made_from=made_from,
        idle_from=row["idle_from"].integer(),
        idle_to=row["idle_to"].integer(),
        excess_bytes=row["excess_bytes"].integer(),
        busiest_bytes=row["busiest_bytes"].integer(),
        spans_baseline_peak=row["spans_baseline_peak"].boolean(),
        spans_peak=row["spans_peak"].boolean(),
        offloaded="offloaded" in row and row["offloaded"].boolean(),
    )


def _warning(node: Node) -> Finding:
    return Finding(
        rule=node["rule"].text(),
        severity=Severity(node["severity"].one_of(*Severity)),
        evidence=node["evidence"].text(),
        cause=node["cause"].text(),
        fix=node["fix"].text(),
    )


def _verification(node: Node) -> Verification:
    return Verification(
        peak_bytes=node["peak_bytes"].integer(),
        baseline_peak_bytes=node["baseline_peak_bytes"].integer(),
        overhead=node["overhead"].number(negative=True),
        loss_equal=node["loss_equal"].boolean(),
        gradients_bitwise_equal=node["gradients_bitwise_equal"].boolean(),
        buffers_equal=node["buffers_equal"].boolean(),
        differences=tuple(line.text() for line in node["differences"].items()),
        steps=node["steps"].integer(),
        tolerance=node["tolerance"].number(),
        from_one_piece=node["from_one_piece"].number() if node.has("from_one_piece") else 0.0,
        rounding_error=_number_or_none(node["rounding_error"]) if node.has("rounding_error") else None,
    )
