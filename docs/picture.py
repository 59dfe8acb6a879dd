"""Draw ``docs/overhead.svg``, the picture of the README, from measured results: ``python docs/picture.py``."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "gpu_peers.json"

TITLE = "One training step on an NVIDIA H200, measured"
MODELS = {"resnet50": "ResNet-50, 256 images", "vitl": "ViT-L/16, 128 images"}
"""How the results name a model, and what it is called here."""

INK, GREEN, LIGHT = "#24292f", "#1f7a5c", "#e6e9ec"
WAYS = {
    "every_layer": ("checkpoint every layer", "#c0392b"),
    "every_2nd": ("checkpoint every second layer", "#8e5ea2"),
    "sac_products": ("selective: keep products", "#9a6b1f"),
    "eager": ("eager", INK),
}
"""Ways of others by the names in the results: what they are called here, and a colour."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 370, 52, 12, 78, 62
ACROSS, UP = (0.15, 1.05), (-0.02, 0.7)


def rows_of(model: str) -> list[dict[str, Any]]:
    """Return what was measured of a model; eager adds nothing to itself."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return [{"over": 0.0, **row} for row in rows if row["case"] == model and "peak" in row]


def picture() -> str:
    """Return the file."""
    drawn = [
        text(16, 26, TITLE, size=16, bold=True),
        text(16, 44, "step time on top of eager's, over the peak of allocated memory (eager's is 100%)"),
    ]
    for number, (model, name) in enumerate(MODELS.items()):
        drawn += panel(rows_of(model), name, number * WIDTH / len(MODELS))
    return svg([*drawn, *legend()])


def panel(rows: list[dict[str, Any]], name: str, left: float) -> list[str]:
    """Draw one model."""
    eager_bytes = next(row["peak"] for row in rows if row["way"] == "eager")
    begin, end = left + LEFT, left + WIDTH / len(MODELS) - RIGHT

    def x(share: float) -> float:
        return begin + (end - begin) * (share - ACROSS[0]) / (ACROSS[1] - ACROSS[0])

    def y(overhead: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (overhead - UP[0]) / (UP[1] - UP[0])

    def at(row: dict[str, Any]) -> tuple[float, float]:
        return x(row["peak"] / eager_bytes), y(row["over"])

    drawn = [text(begin, TOP - 10, name, bold=True)]
    for percent in range(0, int(100 * UP[1]) + 1, 10):
        height = y(percent / 100)
        drawn += [line(begin, height, end, height), text(begin - 8, height + 4, f"+{percent}%", anchor="end")]
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        tick = x(share)
        drawn += [line(tick, y(UP[0]), tick, y(UP[0]) + 5), text(tick, y(UP[0]) + 20, f"{share:.0%}", anchor="middle")]
    drawn.append(line(begin, y(UP[0]), end, y(UP[0]), color=INK))
    planned = sorted((row for row in rows if row["way"] not in WAYS), key=lambda row: row["peak"])
    path = " L".join("{:.1f} {:.1f}".format(*at(row)) for row in planned)
    drawn.append(f'<path d="M{path}" fill="none" stroke="{GREEN}" stroke-width="2.5"/>')
    drawn += [dot(*at(row), GREEN, 4.5, f"plan: {told(row)}") for row in planned]
    others = [(row, *WAYS[row["way"]]) for row in rows if row["way"] in WAYS]
    return [*drawn, *(dot(*at(row), color, 6, f"{way}: {told(row)}") for row, way, color in others)]


def told(row: dict[str, Any]) -> str:
    """Say what a point is."""
    return f"{row['peak'] / 2**20:.1f} MiB, {row['over']:+.1%}"


def legend() -> list[str]:
    """Say what the colours mean."""
    drawn, at, row = [], 16.0, HEIGHT - 14
    for name, color in [("a plan", GREEN), *WAYS.values()]:
        drawn += [dot(at + 6, row - 4, color, 6, name), text(at + 18, row, name)]
        at += 30 + 6.3 * len(name)
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
