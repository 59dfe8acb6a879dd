"""Draw ``docs/pictures``: a small training step as the simulator sees it, and the runtimes; run this file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import lifetimes, simulate
from planner.solvers import solve

MIB = 2**20
BUDGET_BYTES = 26 * MIB

BLUE, ORANGE, GREEN, GREY, RED, INK = "#4c78a8", "#e08a2e", "#4f9a57", "#9aa3ad", "#c0392b", "#24292f"
LEFT, COLUMN, ROW, CURVE = 96, 44, 17, 130

MODULES = ("embedding", "block 1", "block 2", "block 3", "head", "loss")
RUNTIMES = (
    ("graph", "any operation of the model", "r rrr rrr rrr r r", ((0, 11),)),
    ("regional", "operations inside each repeated block", "e rrr rrr rrr e e", ((1, 3), (4, 6), (7, 9))),
    ("parts", "operations inside the captured modules", "e rrr xrr rrr e e", ((1, 3), (5, 6), (7, 9))),
    ("modules", "whole modules; nothing is captured", "e R R R e e", ()),
)
"""What each captures and may recompute. A letter is an operation of a module: recomputable (of ``R``, the module as a
whole), eager, or not to be captured. Then the operations, from first to last, that are in one graph."""


def layers() -> Problem:
    """Return a step of four linear layers with three activations between them; a linear layer takes four times as long.

    Names are as in the pictures: ``x1`` is what the first layer makes, ``y1`` what the activation makes of it, ``dx1``
    a gradient, and ``dW1`` that of a parameter, which stays until the step ends.
    """
    values: list[Value] = []
    operations: list[Operation] = []
    costs: list[OperationCost] = []
    place: dict[str, int] = {}

    def add(name: str, reads: str, makes: str, phase: Phase, seconds: float) -> None:
        for made in makes.split():
            is_parameter = made.startswith("dW")
            place[made] = len(values)
            kind = "gradient" if is_parameter else "activation"
            size_bytes = MIB if is_parameter else 4 * MIB
            values.append(Value(name=made, size_bytes=size_bytes, retained=is_parameter, kind=kind))
        inputs, outputs = (tuple(place[one] for one in text.split()) for text in (reads, makes))
        operations.append(Operation(name=name, key=name, target="", inputs=inputs, outputs=outputs, phase=phase))
        costs.append(OperationCost(seconds=seconds))

    add("linear 1", "", "x1", Phase.FORWARD, 4)
    for i in (1, 2, 3):
        add(f"act {i}", f"x{i}", f"y{i}", Phase.FORWARD, 1)
        add(f"linear {i + 1}", f"y{i}", f"x{i + 1}", Phase.FORWARD, 4)
    add("loss", "x4", "dx4", Phase.LOSS, 1)
    for i in (3, 2, 1):
        add(f"linear {i + 1}'", f"dx{i + 1} y{i}", f"dy{i} dW{i + 1}", Phase.BACKWARD, 8)
        add(f"act {i}'", f"dy{i} x{i}", f"dx{i}", Phase.BACKWARD, 1)
    add("linear 1'", "dx1", "dW1", Phase.BACKWARD, 4)
    graph = TrainingGraph(operations=tuple(operations), values=tuple(values))
    return Problem(graph=graph, costs=tuple(costs), budget_bytes=BUDGET_BYTES)


def pictures() -> dict[str, str]:
    """Return every picture by its file name."""
    problem = layers()
    keep_all = Schedule.keep_all(problem.graph)
    plan = solve(problem, "ilp").schedule
    return {
        "keep.svg": step(problem, keep_all, "Every value is kept until its last read"),
        "recompute.svg": step(problem, plan, "Two values are dropped and recomputed: the peak keeps the budget"),
        "cut.svg": cut(problem, plan),
        "way.svg": way(),
        "runtimes.svg": runtimes(),
    }


def step(problem: Problem, schedule: Schedule, title: str) -> str:
    """Draw who lives when, and below what that adds up to."""
    graph, order = problem.graph, schedule.order
    drawing = Drawing(len(order), len(graph.values), title)
    drawn: list[str] = drawing.columns(names_of(graph, order), again_of(order))
    seen: set[int] = set()
    for copy in lifetimes(graph, schedule):
        value = graph.values[copy.value]
        color = ORANGE if copy.value in seen else GREEN if value.retained else BLUE if value.name[0] != "d" else GREY
        seen.add(copy.value)
        drawn.append(drawing.bar(copy.value, copy.born, copy.died, color))
    drawn += [drawing.row_name(row, value.name) for row, value in enumerate(graph.values)]
    evaluation = simulate(graph, problem.costs, schedule)
    top_bytes = problem.baseline.peak_bytes
    drawn += drawing.curve(evaluation.timeline_bytes, top_bytes, problem.budget_bytes)
    legend = [(BLUE, "saved or passed on"), (GREY, "gradients of values"), (GREEN, "gradients of parameters")]
    if len(seen) < len(lifetimes(graph, schedule)):
        legend.append((ORANGE, "recomputed"))
    return drawing.svg([*drawn, *drawing.legend(legend)])


def cut(problem: Problem, plan: Schedule) -> str:
    """Draw what the integer programme sees at the moment at which the step without recompute is highest."""
    graph, keep_all = problem.graph, Schedule.keep_all(problem.graph)
    moment = problem.baseline.peak_position
    again = {u for position in again_of(plan.order) for u in graph.operations[plan.order[position]].outputs}
    drawing = Drawing(
        len(keep_all.order), len(graph.values), "One moment, and what is needed after it", curve=0, right=110
    )
    drawn = drawing.columns(names_of(graph, keep_all.order), [])
    drawn.append(drawing.moment(moment))
    for copy in lifetimes(graph, keep_all):
        if copy.born <= moment <= copy.died:
            color = ORANGE if copy.value in again else BLUE
            name = "recomputed, r = 1" if copy.value in again else "held, s = 1"
            drawn.append(drawing.bar(copy.value, copy.born, copy.died, color, dashed=copy.value in again))
            drawn.append(drawing.note(copy.value, copy.died, name, color))
        else:
            drawn.append(drawing.bar(copy.value, copy.born, copy.died, "#e6e9ec"))
    drawn += [drawing.row_name(row, value.name) for row, value in enumerate(graph.values)]
    return drawing.svg(drawn)


def way() -> str:
    """Draw the way from a model to a model that keeps a budget."""
    boxes = (
        ("your model", "and example inputs"),
        ("capture", "forward and backward as one graph"),
        ("problem", "bytes, seconds, budget"),
        ("solvers", "propose schedules, prove a bound"),
        ("simulator", "the only judge of a peak"),
        ("rewrite", "graphs in the plan's order"),
        ("your model", "the same object, planned"),
    )
    width, height, gap = 256, 52, 26
    drawn = []
    for i, (name, text) in enumerate(boxes):
        y = 12 + i * (height + gap)
        fill = "#eef3f8" if name == "your model" else "white"
        drawn.append(f'<rect x="12" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{BLUE}"/>')
        drawn.append(text_at(24, y + 22, name, bold=True) + text_at(24, y + 40, text, size=12))
        if i:
            drawn.append(f'<path d="M140 {y - gap} V{y - 5} m-4 -6 l4 7 l4 -7" stroke="{INK}" fill="none"/>')
    third, fourth = 12 + 3 * (height + gap), 12 + 4 * (height + gap)
    drawn.append(f'<path d="M268 {fourth + 26} h36 V{third + 26} h-32 m7 -4 l-8 4 l8 4" stroke="{INK}" fill="none"/>')
    drawn.append(
        text_at(312, third + 58, "peak, seconds,", size=12) + text_at(312, third + 74, "where it breaks", size=12)
    )
    return picture(410, 12 + len(boxes) * (height + gap), drawn)


def runtimes() -> str:
    """Draw what each runtime captures of a model, and what it may recompute."""
    column, row_height, side, gap = 64, 62, 12, 8
    drawn = [text_at(12, 24, "What each runtime may recompute", bold=True, size=15)]
    for i, module in enumerate(MODULES):
        drawn.append(text_at(12 + (i + 0.5) * column, 48, module, size=12, more='text-anchor="middle"'))
    for row, (name, words, modules, graphs) in enumerate(RUNTIMES):
        y = 62 + row * row_height
        drawn.append(text_at(12, y + 12, name, bold=True) + text_at(88, y + 12, words, size=12))
        marks: list[tuple[float, float, str]] = []
        for i, kinds in enumerate(modules.split()):
            width = 3 * side + 2 * gap if kinds == "R" else side
            x = 12 + (i + 0.5) * column - (len(kinds) * (width + gap) - gap) / 2
            marks += [(x + k * (width + gap), width, kind) for k, kind in enumerate(kinds)]
        for first, last in graphs:
            x, end = marks[first][0] - 4, marks[last][0] + marks[last][1] + 4
            drawn.append(graph_at(x, y + 20, end - x, side + 8))
        drawn += [mark(x, y + 24, width, side, kind) for x, width, kind in marks]
    y = 62 + len(RUNTIMES) * row_height
    drawn += [graph_at(12, y, 22, 16), text_at(42, y + 12, "one captured graph", size=12)]
    for x, line, kind, words in ((216, 0, "r", "may be recomputed"), (17, 24, "e", "eager, keeps what it saves"),
                                 (216, 24, "x", "eager, cannot be captured")):  # fmt: skip
        drawn += [mark(x, y + line + 1, side, side, kind), text_at(x + 22, y + line + 12, words, size=12)]
    return picture(410, y + 50, drawn)


def graph_at(x: float, y: float, width: float, height: float) -> str:
    """Frame what is captured as one graph."""
    style = f'rx="5" fill="#eef3f8" stroke="{BLUE}" stroke-width="1.5"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {style}/>'


def mark(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw an operation, or a module that is recomputed as a whole; a cross if it cannot be captured."""
    color = ORANGE if kind in "rR" else GREY
    cross = f'<path d="M{x + 3:g} {y + 3:g} l6 6 m0 -6 l-6 6" stroke="white" stroke-width="2"/>' if kind == "x" else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{color}"/>{cross}'


class Drawing:
    """Columns are runs of operations, rows are values, and below may be a curve of bytes."""

    def __init__(self, columns: int, rows: int, title: str, *, curve: int = CURVE, right: int = 16) -> None:
        self.title = title
        self.width = LEFT + columns * COLUMN + right
        self.top = 92
        self.rows_end = self.top + rows * ROW
        self.curve_end = self.rows_end + (curve + 26 if curve else 0)

    def columns(self, names: list[str], again: list[int]) -> list[str]:
        """Draw the names of the runs, slanted, those of reruns in another colour."""
        drawn = []
        for column, name in enumerate(names):
            x, color = LEFT + (column + 0.5) * COLUMN, ORANGE if column in again else INK
            turned = f'transform="rotate(-40 {x:g} {self.top - 8})"'
            drawn.append(text_at(x, self.top - 8, name, size=12, color=color, more=turned))
            line = LEFT + column * COLUMN
            drawn.append(f'<path d="M{line} {self.top} V{self.rows_end}" stroke="#eef0f2"/>')
        return drawn

    def bar(self, row: int, born: int, died: int, color: str, *, dashed: bool = False) -> str:
        """Draw the life of a copy, from the run that makes it to the last that reads it."""
        x, y = LEFT + born * COLUMN + 2, self.top + row * ROW + 2
        width, height = (died - born + 1) * COLUMN - 4, ROW - 4
        style = f'fill="white" stroke="{color}" stroke-dasharray="4 3"' if dashed else f'fill="{color}"'
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" {style}/>'

    def row_name(self, row: int, name: str) -> str:
        """Name a value."""
        return text_at(LEFT - 8, self.top + row * ROW + 13, name, size=12, more='text-anchor="end"')

    def note(self, row: int, died: int, text: str, color: str) -> str:
        """Write behind a bar."""
        return text_at(LEFT + (died + 1) * COLUMN + 4, self.top + row * ROW + 13, text, size=11, color=color)

    def moment(self, column: int) -> str:
        """Mark a run."""
        return (
            f'<rect x="{LEFT + column * COLUMN}" y="{self.top}" width="{COLUMN}" height="{self.rows_end - self.top}" '
            f'fill="#fdecea"/>'
        )

    def curve(self, timeline_bytes: tuple[int, ...], top_bytes: int, budget_bytes: int) -> list[str]:
        """Draw the bytes of each run as a column, the budget as a line."""
        base, scale = self.rows_end + CURVE + 18, (CURVE - 10) / top_bytes
        drawn, peak_bytes = [], max(timeline_bytes)
        for column, size_bytes in enumerate(timeline_bytes):
            height, color = size_bytes * scale, "#e9b4ae" if size_bytes > budget_bytes else "#c9d9ea"
            drawn.append(
                f'<rect x="{LEFT + column * COLUMN}" y="{base - height:.1f}" width="{COLUMN}" height="{height:.1f}" '
                f'fill="{color}"/>'
            )
        line = base - budget_bytes * scale
        drawn.append(f'<path d="M{LEFT} {line:.1f} H{self.width - 16}" stroke="{RED}" stroke-dasharray="6 4"/>')
        drawn.append(text_at(LEFT - 8, line + 4, "budget", size=12, color=RED, more='text-anchor="end"'))
        drawn.append(
            text_at(LEFT - 8, line + 20, f"{budget_bytes // MIB} MiB", size=12, color=RED, more='text-anchor="end"')
        )
        at = timeline_bytes.index(peak_bytes)
        x, y = LEFT + (at + 0.5) * COLUMN, base - peak_bytes * scale
        drawn.append(
            text_at(x, y + 16, f"peak {peak_bytes // MIB} MiB", size=12, bold=True, more='text-anchor="middle"')
        )
        return drawn

    def legend(self, entries: list[tuple[str, str]]) -> list[str]:
        """Say what the colours mean."""
        drawn, x = [], LEFT
        for color, text in entries:
            drawn.append(f'<rect x="{x}" y="{self.curve_end + 4}" width="12" height="12" rx="3" fill="{color}"/>')
            drawn.append(text_at(x + 18, self.curve_end + 14, text, size=12))
            x += 40 + 7 * len(text)
        return drawn

    def svg(self, drawn: list[str]) -> str:
        """Return the file."""
        return picture(self.width, self.curve_end + 28, [text_at(12, 24, self.title, bold=True, size=15), *drawn])


def names_of(graph: TrainingGraph, order: tuple[int, ...]) -> list[str]:
    """Return the name of each run."""
    return [graph.operations[index].name for index in order]


def again_of(order: tuple[int, ...]) -> list[int]:
    """Return the positions of the runs that are not an operation's first."""
    return [position for position, index in enumerate(order) if index in order[:position]]


def text_at(
    x: float, y: float, text: str, *, size: int = 14, bold: bool = False, color: str = INK, more: str = ""
) -> str:
    """Write."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{weight} {more}>{escape(text)}</text>'


def picture(width: float, height: float, drawn: list[str]) -> str:
    """Close a file, on white, so that it can be read on any page."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" font-family="sans-serif">',
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write all files."""
    folder = Path(__file__).with_name("pictures")
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
