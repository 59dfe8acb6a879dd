"""Draw ``docs/overhead.svg``, the picture of the README, from measured results: ``python docs/picture.py``."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "compare.json"

MODEL, TITLE = "resnet50", "ResNet-50, one training step on a CPU, measured"

WAYS = (
    ("checkpoint every layer", ("every layer",), "#c0392b"),
    ("checkpoint every second layer", ("every second layer",), "#8e5ea2"),
    ("selective: keep products", ("save products",), "#9a6b1f"),
    ("checkpoint_sequential", ("checkpoint_sequential",), "#4c78a8"),
    ("PyTorch's partitioner", ("partitioner dp", "partitioner ilp"), "#6b7680"),
)
"""Ways of others: what they are called here, how the results name them, a colour."""

INK, GREEN, LIGHT = "#24292f", "#1f7a5c", "#e6e9ec"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 64, 24, 56, 84


def rows_of(model: str) -> list[dict[str, Any]]:
    """Return what was measured of a model."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    (entry,) = (entry for entry in results["models"] if entry["model"] == model)
    return [row for row in entry["rows"] if "time_ratio" in row]


def picture() -> str:
    """Return the file."""
    rows = rows_of(MODEL)
    eager_bytes = next(row["peak_bytes"] for row in rows if row["way"] == "eager")
    across = (0.5, 1.03)
    most = max(row["time_ratio"] - 1 for row in rows) * 1.1
    lowest = min(0.0, *(row["time_ratio"] - 1 for row in rows)) - 0.01

    def x(row: dict[str, Any]) -> float:
        share = row["peak_bytes"] / eager_bytes
        return LEFT + (WIDTH - LEFT - RIGHT) * (share - across[0]) / (across[1] - across[0])

    def y(overhead: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (overhead - lowest) / (most - lowest)

    drawn = [text(16, 26, TITLE, size=16, bold=True)]
    for percent in range(0, int(100 * most) + 1, 10):
        at = y(percent / 100)
        drawn += [line(LEFT, at, WIDTH - RIGHT, at), text(LEFT - 8, at + 4, f"+{percent}%", anchor="end")]
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        at = x({"peak_bytes": share * eager_bytes})
        drawn += [line(at, y(lowest), at, y(lowest) + 5), text(at, y(lowest) + 20, f"{share:.0%}", anchor="middle")]
    drawn += [
        text(16, 44, "step time on top of eager's, over the memory that the step allocates (eager's is 100%)"),
        line(LEFT, y(lowest), WIDTH - RIGHT, y(lowest), color=INK),
    ]
    planned = sorted((row for row in rows if row["ours"]), key=lambda row: row["peak_bytes"])
    path = " L".join(f"{x(row):.1f} {y(row['time_ratio'] - 1):.1f}" for row in planned)
    drawn.append(f'<path d="M{path}" fill="none" stroke="{GREEN}" stroke-width="2.5"/>')
    drawn += [dot(x(row), y(row["time_ratio"] - 1), GREEN, 4, f"plan: {told(row)}") for row in planned]
    for name, ways, color in WAYS:
        found = [row for row in rows if not row["ours"] and row["way"].startswith(ways)]
        drawn += [dot(x(row), y(row["time_ratio"] - 1), color, 6, f"{name}: {told(row)}") for row in found]
    for row in rows:
        if row["way"] == "eager":
            drawn.append(dot(x(row), y(0), INK, 6, f"eager: {told(row)}"))
    return svg([*drawn, *legend()])


def told(row: dict[str, Any]) -> str:
    """Say what a point is."""
    return f"{row['peak_bytes'] / 2**20:.1f} MiB, {row['time_ratio'] - 1:+.1%}"


def legend() -> list[str]:
    """Say what the colours mean."""
    entries = [("a plan", GREEN), ("eager", INK), *((name, color) for name, _, color in WAYS)]
    drawn, at, row = [], LEFT, HEIGHT - 40
    for name, color in entries:
        if at + 24 + 7 * len(name) > WIDTH - RIGHT:
            at, row = LEFT, row + 22
        drawn += [dot(at + 6, row - 4, color, 6, name), text(at + 18, row, name)]
        at += 40 + 6.7 * len(name)
    return drawn


def text(x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "start") -> str:
    """Write."""
    style = f'font-size="{size}" fill="{INK}" font-weight="{600 if bold else 400}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, color: str = LIGHT) -> str:
    """Draw a line."""
    return f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" stroke="{color}"/>'


def dot(x: float, y: float, color: str, radius: float, title: str) -> str:
    """Draw a point that says what it is."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}"><title>{escape(title)}</title></circle>'


def svg(drawn: list[str]) -> str:
    """Close a file, on white, so that it can be read on any page."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *drawn, "</svg>\n"])


if __name__ == "__main__":
    (HERE / "overhead.svg").write_text(picture(), encoding="utf-8")
