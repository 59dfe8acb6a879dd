"""What established systems do with a step, beside the best plans."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from planner.analysis.strategy_comparison import NEAR, Established, StrategyRow
from planner.common.units import format_bytes, format_seconds
from planner.report.style import at_least_percent, counted, print_report, signed_percent, sizes, table


def render(established: Established, console: Console) -> None:
    """Print the comparison."""
    strategies = [_strategies(established)] if established.rows else []
    print_report(console, answer(established), Group(*strategies, *map(Text, _lines(established))))


def answer(established: Established) -> str:
    """Return the answer as one line."""
    rows = [row for row in established.rows if row.excess is not None]
    if not rows:
        return "no established way applies to this model"
    near = [row for row in rows if _excess(row) <= NEAR]
    points = f"{NEAR * 100:.0f} points"
    ways = f"{counted(len(rows), 'established way')}"
    closest, farthest = min(rows, key=_excess), max(rows, key=_excess)
    if not near:
        return f"of {ways} none is within {points} of the best plan at its peak; the closest is {_pays(closest)}"
    verb = "is" if len(near) == 1 else "are"
    how_many = f"of {ways} {len(near)} {verb} within {points} of the best plan at the same peak"
    return how_many if len(near) == len(rows) else f"{how_many}; the farthest is {_pays(farthest)}"


def _excess(row: StrategyRow) -> float:
    return row.excess or 0.0


def _pays(row: StrategyRow) -> str:
    best = "-" if row.best_overhead is None else signed_percent(row.best_overhead)
    return f"{row.name}, {signed_percent(row.overhead)} where {best} would do"


def _strategies(established: Established) -> Table:
    rows = established.rows
    size = sizes(row.peak_bytes for row in rows)
    return table(
        "Each with the best plan at its own peak",
        rows,
        ("strategy", lambda row: row.name, str),
        ("peak", lambda row: row.peak_bytes, size),
        ("host", lambda row: row.host_bytes or None, size if any(row.host_bytes for row in rows) else None),
        ("pays", lambda row: row.overhead, signed_percent),
        ("best", lambda row: row.best_overhead, signed_percent),
        ("bound", lambda row: row.lower_bound_overhead, at_least_percent),
        ("gap", lambda row: row.gap, signed_percent),
    )


def _lines(established: Established) -> list[str]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, said in (*established.absent.items(), *((row.name, row.note) for row in established.rows if row.note)):
        names_of[said].append(name)
    lines = [f"{', '.join(names)}: {said}" for said, names in names_of.items()]
    if any(row.best_overhead is None for row in established.rows):
        lines.append("Strategies that divide values over devices have no plan beside them: plans are for one device.")
    if any(row.host_bytes for row in established.rows):
        lines.append("Strategies that offload are compared with the best plan that may use as much host memory.")
    lines.append(
        f"Without recompute the peak is {format_bytes(established.baseline_peak_bytes)}; overhead is of that step, "
        f"{format_seconds(established.baseline_step_seconds)} by the {established.cost_model} cost model of "
        f"{established.device or 'the device'}. The gap is the distance to the proven lower bound."
    )
    return lines
