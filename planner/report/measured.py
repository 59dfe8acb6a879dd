"""Print measurements: the rates of a device, and the operators that take most of the time."""

from __future__ import annotations

from rich.console import Console

import cost_models
from cost_models.devices import DeviceSpec
from cost_models.measured import Profile
from planner.common.units import format_percent, format_seconds
from planner.report.style import compact_count, print_report, table

_ROWS = 15


def render_device(spec: DeviceSpec, path: str, console: Console) -> None:
    """Print a calibrated device beside what the table says of it, and the file that it was written to."""
    try:
        assumed = _rates(cost_models.device(spec.name))
    except cost_models.UnknownNameError:
        assumed = {}
    shown = table(
        "What large operations reach",
        _rates(spec).items(),
        ("rate", lambda row: row[0], str),
        ("measured", lambda row: row[1], str),
        ("table", lambda row: assumed.get(row[0]), str),
    )
    line = f"CALIBRATED {spec.name} · plan for it with --device {path}"
    print_report(console, line, shown, style="bold green")


def _rates(spec: DeviceSpec) -> dict[str, str]:
    """Return what large operations reach, as the roofline takes it."""
    rates = {
        f"products in {dtype}": f"{compact_count(int(rate * spec.compute_efficiency))}FLOP/s"
        for dtype, rate in spec.flops_per_second.items()
    }
    rates["memory"] = f"{compact_count(int(spec.bandwidth_bytes_per_second * spec.bandwidth_efficiency))}B/s"
    if spec.kind == "cuda":
        rates["host link"] = f"{compact_count(int(spec.host_link_bytes_per_second))}B/s"
    rates["launches"] = f"{compact_count(int(1 / spec.launch_seconds))}/s"
    return rates


def render_profile(profile: Profile, path: str, console: Console) -> None:
    """Print the operators that take longest, each with all its calls."""
    try:
        rates = cost_models.get("roofline")(cost_models.device(profile.device))
    except cost_models.UnknownNameError:
        rates = None
    totals: dict[str, tuple[int, float, float]] = {}
    unmeasured = 0
    for operation in profile.operations:
        found = profile.measurements.get(operation.signature)
        if found is None:
            unmeasured += bool(operation.signature)
            continue
        count, seconds, estimated = totals.get(operation.target, (0, 0.0, 0.0))
        estimate = rates.costs([operation])[0].seconds if rates else 0.0
        totals[operation.target] = (count + 1, seconds + found.seconds, estimated + estimate)
    step_seconds = sum(seconds for _, seconds, _ in totals.values())
    left = f", {unmeasured} operations left to the roofline" if unmeasured else ""
    line = (
        f"MEASURED {len(profile.measurements)} different operations of {profile.model or 'the model'} on "
        f"{profile.device} · {format_seconds(step_seconds)} a step{left} · {path}"
    )
    shown = table(
        "Where the time goes",
        sorted(totals.items(), key=lambda item: -item[1][1])[:_ROWS],
        ("operation", lambda row: row[0], str),
        ("calls", lambda row: row[1][0], str),
        ("time", lambda row: row[1][1], format_seconds),
        ("share", lambda row: row[1][1] / step_seconds if step_seconds else None, format_percent),
        ("roofline", lambda row: row[1][2] / row[1][1] if rates and row[1][1] else None, "{:.2f}x".format),
    )
    print_report(console, line, shown, style="bold green")
