"""What a comparison comes to: at the same peak, what plans pay of what others pay; its page and its pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, quantiles
from typing import Any

from benchmarks import common
from benchmarks.common import Result, mebibytes, percent
from benchmarks.peers import INDUCTOR
from planner.common.atomic import write_bytes

GOALS = {"partitioner": 0.5, "every second layer": 0.35, "save products": 0.35, "every layer": 0.6}
"""What of each alternative's overhead a plan may cost, as a geometric mean."""

COMPILED_GOALS = {f"{INDUCTOR}, budget": 0.4}
"""Likewise, where all ways are compiled, over what ``torch.compile`` alone takes."""

NOISE = 0.02
"""Overheads below this cannot be told from none on a machine that is shared."""

NOT_COMPARED = ("eager", INDUCTOR)
"""Ways that recompute nothing."""


def against(rows: Sequence[Result]) -> Result:
    """Return for each alternative that costs something what a plan at its peak or below pays of that.

    Of several plans that is the one whose predicted overhead is lowest: to take the one that was measured to be
    fastest would count what is only noise as ours.
    """
    compiled = is_compiled(rows)
    ours = [row for row in rows if _planned(row, compiled)]
    free = next(row for row in rows if not row["ours"] and row["way"] == (INDUCTOR if compiled else "eager"))
    if "time_ratio" not in free:
        return {"compared": [], "lowest_peak_bytes": {"ours": None, "theirs": None}}
    compared = []
    for row in rows:
        if not _counts(row) or row["way"] in NOT_COMPARED:
            continue
        theirs = row["time_ratio"] - 1
        at_most = [own for own in ours if own["peak_bytes"] <= row["peak_bytes"]]
        if theirs <= NOISE or not at_most or row["peak_bytes"] >= free["peak_bytes"]:
            continue
        own = min(at_most, key=lambda own: own["predicted_overhead"])
        paid = own["time_ratio"] - 1
        doubt = 2 * math.hypot(*(one.get("time_ratio_error", 0.0) for one in (own, row)))
        compared.append(
            {
                "way": row["way"], "theirs": theirs, "ours": paid, "quotient": max(paid, NOISE / 4) / theirs,
                "is_worse": paid > theirs + doubt,
            }
        )  # fmt: skip
    lowest = {
        "ours": min((row["peak_bytes"] for row in ours), default=None),
        "theirs": min((row["peak_bytes"] for row in rows if _counts(row)), default=None),
    }
    return {"compared": compared, "lowest_peak_bytes": lowest}


def error_of(ratios: Sequence[float]) -> float:
    """Return the standard error of a median, from the quartiles: single rounds on a shared machine are far off."""
    first, _, third = quantiles(ratios)
    return 1.2533 * (third - first) / 1.349 / math.sqrt(len(ratios))


def is_compiled(rows: Sequence[Result]) -> bool:
    """Whether all ways are compiled, so that what they are held against is, too."""
    return any(row["way"].startswith(f"{INDUCTOR}, ") for row in rows)


def _planned(row: Result, compiled: bool = False) -> bool:
    """Whether a row is a plan that runs as alternatives do, kernel by kernel or compiled; others are only shown."""
    return row["ours"] and "time_ratio" in row and row.get("compiled", False) is compiled


def _counts(row: Result) -> bool:
    return not row["ours"] and row["status"] == "run" and row["gradients"] != "wrong"


def summary(models: Sequence[Result]) -> list[Result]:
    """Return for each kind of alternative what plans pay of its overhead, over all models."""
    found = []
    compiled = any(is_compiled(entry["rows"]) for entry in models if "rows" in entry)
    for kind, goal in (COMPILED_GOALS if compiled else GOALS).items():
        points = [
            {**point, "model": entry["model"]}
            for entry in models
            for point in entry["compared"]
            if point["way"].startswith(kind)
        ]
        quotients = [point["quotient"] for point in points]
        mean = geometric_mean(quotients) if quotients else None
        worst = max(points, key=lambda point: point["quotient"], default=None)
        worse = sum(point["is_worse"] for point in points)
        met = mean is not None and mean <= goal and not worse
        found.append(
            {
                "kind": kind, "goal": goal, "points": len(points), "mean": mean, "worst": worst, "worse": worse,
                "met": met,
            }
        )  # fmt: skip
    return found


def markdown(result: Result, pictures: str | None = None) -> str:
    """Return the page; ``pictures`` is the folder, beside it, of a picture for each model."""
    legend = (
        "Peaks are MiB that a step allocates on top of what is resident, measured. Overhead is the median over rounds "
        "of step time over eager's in the same round, less one. Gradients are held against eager's from the same "
        "random state. *Planned* is our `graph` runtime with costs measured on this machine; its predicted peak is in "
        f"brackets. Compared are overheads above {percent(NOISE, 0)} of alternatives whose gradients are right, with "
        "the plan of the lowest predicted overhead at the same or a lower measured peak; its own counts as no less "
        f"than {percent(NOISE / 4)}. Behind each overhead stands its standard error; *worse* counts points where "
        "the plan pays more by over twice that of the difference."
    )
    if any(is_compiled(entry["rows"]) for entry in result["models"]):
        legend = _COMPILED_LEGEND
    brief = ["alternative", "points", "planned / theirs (geometric mean)", "goal", "worse", "worst", "where"]
    parts = [common.table(brief, [_summary_cells(row) for row in result.get("summary", ())])]
    lows = [[entry["model"], *(mebibytes(entry["lowest_peak_bytes"][who]) for who in ("ours", "theirs"))]
            for entry in result["models"]]  # fmt: skip
    parts += ["## Lowest peak that was run", common.table(["model", "planned", "alternatives"], lows)]
    for entry in result["models"]:
        parts += [f"## {entry['model']}{', with dropout' if entry['dropout'] else ''}", *_model_parts(entry["rows"])]
        if pictures is not None:
            parts.append(f"![Overhead over peak of {entry['model']}]({pictures}/{entry['model']}.svg)")
    return common.page("Against what people use", result, legend, *parts)


_COMPILED_LEGEND = (
    "All ways but eager are compiled. *Inductor* is `torch.compile` alone, and overhead is the median over rounds of "
    "step time over its in the same round, less one; *budget* is `activation_memory_budget`. *Planned* is the runtime "
    "`inductor`; its predicted peak is in brackets. Peaks are MiB that a step allocates on top of what is resident, "
    "measured. Gradients are held against eager's from the same random state; *other draws* says that dropout under "
    "`torch.compile` draws other numbers. Compared are overheads above "
    f"{percent(NOISE, 0)}, with the plan of the lowest predicted overhead at the same or a lower measured peak; its "
    f"own counts as no less than {percent(NOISE / 4)}. Behind each overhead stands its standard error; *worse* counts "
    "points where the plan pays more by over twice that of the difference."
)


def _summary_cells(row: Result) -> list[object]:
    if row["mean"] is None:
        return [row["kind"], 0, "-", row["goal"], "-", "-", "-"]
    worst = row["worst"]
    where = f"{worst['model']}, {worst['way']}: {percent(worst['ours'])} for {percent(worst['theirs'])}"
    mean, most = f"{row['mean']:.2f}", f"{worst['quotient']:.2f}"
    return [row["kind"], row["points"], mean, row["goal"], row["worse"], most, where]


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
    paid = percent(row["time_ratio"] - 1)
    if "time_ratio_error" in row:
        paid += f" ± {100 * row['time_ratio_error']:.1f}"
    return [row["way"], peak, paid, row["gradients"], seconds]


_MARKERS = (
    ("eager", "*"), ("every layer", "s"), ("every second layer", "D"), ("save products", "^"),
    ("checkpoint_sequential", "v"), ("Hugging Face", "P"), ("partitioner dp", "o"), ("partitioner ilp", "h"),
    ("Inductor", "X"), ("ckptplan", "<"),
)  # fmt: skip


def draw(entry: Result, path: Path) -> None:
    """Draw what every way of one model pays over its peak; needs matplotlib.

    Alternatives whose gradients are wrong are crossed out.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    run = [row for row in entry["rows"] if "time_ratio" in row]
    ours = sorted(filter(_planned, run), key=_megabytes)
    axes.plot([*map(_megabytes, ours)], [*map(_paid, ours)], "-o", markersize=4, color="C0", label="planned, measured")
    bound = [100 * row["bound"] for row in ours]
    axes.plot([*map(_megabytes, ours)], bound, ":", color="C0", linewidth=1, label="no plan can pay less (predicted)")
    for number, (kind, marker) in enumerate(_MARKERS):
        found = [row for row in run if not row["ours"] and row["way"].startswith(kind)]
        if found:
            shown: dict[str, Any] = {"marker": marker, "color": f"C{1 + number % 9}", "s": 50, "zorder": 3}
            axes.scatter([*map(_megabytes, found)], [*map(_paid, found)], label=kind, **shown)
    if compiled := [row for row in run if row.get("compiled")]:
        axes.scatter([*map(_megabytes, compiled)], [*map(_paid, compiled)], s=30, color="C0", label="planned, compiled")
    wrong = [row for row in run if row["gradients"] == "wrong"]
    if wrong:
        axes.scatter(
            [*map(_megabytes, wrong)], [*map(_paid, wrong)], marker="x", color="black", s=90, zorder=4,
            label="wrong gradients",
        )  # fmt: skip
    axes.set_xlabel("measured peak of a step on top of what is resident, MiB")
    axes.set_ylabel("step time on top of eager's, %")
    axes.set_title(f"{entry['model']}{', with dropout' if entry['dropout'] else ''}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": entry["model"], "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    path.parent.mkdir(exist_ok=True)
    write_bytes(str(path), content.getvalue())


def _megabytes(row: Result) -> float:
    return float(row["peak_bytes"]) / 2**20


def _paid(row: Result) -> float:
    return 100 * float(row["time_ratio"] - 1)
