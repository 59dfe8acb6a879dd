"""What was measured of a device, beside what the table says."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

import cost_models
from cost_models.devices import DeviceSpec
from planner.report.style import cells, compact_count, table
from planner.report.verdict import print_verdict


def render(spec: DeviceSpec, path: str, console: Console) -> None:
    """Print a calibrated device, and the file that it was written to."""
    print_verdict(f"CALIBRATED {spec.name} · plan for it with --device {path}", console, style="bold green")
    console.print()
    shown = table("rate", "measured", "table", title="What large operations reach", text_columns=1)
    for name, measured, assumed, unit in _rows(spec):
        shown.add_row(*cells(name, measured + unit, assumed + unit if assumed else "-"))
    console.print(shown)


def _rows(spec: DeviceSpec) -> Iterator[tuple[str, str, str, str]]:
    """Return the name of each rate, as measured and as the table has it, and its unit."""
    try:
        table_has = [_rates(spec), _rates(cost_models.device(spec.name))]
    except cost_models.UnknownNameError:
        table_has = [_rates(spec), {}]
    measured, assumed = table_has
    for name, (rate, unit) in measured.items():
        yield name, _number(rate), _number(assumed[name][0]) if name in assumed else "", unit


def _rates(spec: DeviceSpec) -> dict[str, tuple[float, str]]:
    """Return what large operations reach, as the roofline takes it."""
    rates = {
        f"products in {dtype}": (rate * spec.compute_efficiency, "FLOP/s")
        for dtype, rate in spec.flops_per_second.items()
    }
    rates["memory"] = (spec.bandwidth_bytes_per_second * spec.bandwidth_efficiency, "B/s")
    if spec.kind == "cuda":
        rates["host link"] = (spec.host_link_bytes_per_second, "B/s")
    rates["launches"] = (1 / spec.launch_seconds, "/s")
    return rates


def _number(rate: float) -> str:
    return compact_count(int(rate))
