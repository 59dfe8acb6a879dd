"""The memory of the step over time, drawn with blocks: the plan in full ones, the step without recompute behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from planner.common.units import format_seconds
from planner.plans.plan import Plan, StepDetails, Timeline
from planner.report.style import in_unit_of

_ROWS = 9
_PARTS = " ▁▂▃▄▅▆▇█"
_BEHIND, _BUDGET = "░", "─"


class Chart:
    """A chart as wide as the console lets it be."""

    def __init__(self, plan: Plan, details: StepDetails) -> None:
        self._plan = plan
        self._before, self._after = details.before, details.after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        top_bytes = max(self._before.peak_bytes, self._after.peak_bytes, 1)
        labels = self._labels(top_bytes)
        margin = max(map(len, labels))
        columns = options.max_width - margin - 2
        yield Text("Memory over the step", style="bold")
        if columns < 20:
            yield Text("(too narrow to draw)")
            return
        end_seconds = max(self._before.step_seconds, self._after.step_seconds)
        before, after = (_heights(line, columns, end_seconds) for line in (self._before, self._after))
        budget_row = self._row_of(self._plan.budget_bytes, top_bytes)
        for row in reversed(range(_ROWS)):
            line = Text(f"{labels[row]:>{margin}} │")
            for ahead, behind in zip(after, before, strict=True):
                line.append(*_cell(row, _ROWS * ahead / top_bytes, _ROWS * behind / top_bytes, row == budget_row))
            yield line
        yield Text(f"{'0':>{margin}} └{'─' * columns}")
        yield Text(" " * (margin + 2) + self._axis(columns, end_seconds))
        legend = Text("█ this plan  ░ without recompute")
        if budget_row is not None:
            legend.append("  ─ budget")
        yield Text(" " * (margin + 2)) + legend

    @staticmethod
    def _row_of(size_bytes: int, top_bytes: int) -> int | None:
        """Return the row in which a size lies, None for one above the chart."""
        return int(_ROWS * size_bytes / top_bytes) if size_bytes < top_bytes else None

    def _labels(self, top_bytes: int) -> list[str]:
        labels = [""] * _ROWS
        labels[-1] = in_unit_of(top_bytes, top_bytes, digits=1)
        budget_row = self._row_of(self._plan.budget_bytes, top_bytes)
        if budget_row is not None and budget_row < _ROWS - 1:
            labels[budget_row] = in_unit_of(self._plan.budget_bytes, top_bytes, digits=1)
        return labels

    def _axis(self, columns: int, end_seconds: float) -> str:
        turn = int(columns * self._after.backward_seconds / end_seconds) if end_seconds else 0
        end = format_seconds(end_seconds)
        axis = "forward".ljust(turn)[:turn] if turn > 8 else " " * turn
        rest = columns - turn
        middle = "backward" if rest > len(end) + 11 else ""
        return axis + f"{'│' + middle:<{max(rest - len(end), 0)}}{end}"


def render(plan: Plan) -> Chart | None:
    """Show what the device holds over the step, with the plan and without."""
    return Chart(plan, plan.details) if plan.details and plan.details.after.points else None


def _heights(line: Timeline, columns: int, end_seconds: float) -> Sequence[int]:
    """Return the highest moment within each column; nothing after the end of the step."""
    heights = [0] * columns
    ends = [*(point.seconds for point in line.points[1:]), line.step_seconds]
    for point, end in zip(line.points, ends, strict=True):
        first, last = (min(int(columns * at / end_seconds), columns - 1) if end_seconds else 0
                       for at in (point.seconds, end))  # fmt: skip
        for column in range(first, last + 1):
            heights[column] = max(heights[column], point.size_bytes)
    return heights


def _cell(row: int, ahead: float, behind: float, is_budget: bool) -> tuple[str, str]:
    """Return the character of a cell and its style; heights count in rows."""
    eighths = min(max(round(8 * (ahead - row)), 0), 8)
    if eighths == 8 or (eighths and behind <= row + 1):
        return _PARTS[eighths], "green"
    if is_budget and not eighths:
        return _BUDGET, "red"
    if eighths:
        return _PARTS[eighths], "green"
    return (_BEHIND, "dim") if behind - row >= 0.5 else (" ", "")
