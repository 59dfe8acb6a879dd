"""The memory of the step over time, drawn with blocks: the plan in full ones, the step without recompute behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from planner.common.units import format_seconds, in_unit_of
from planner.plans.plan import Plan, StepDetails, Timeline

_ROWS = 9
_PARTS = " ▁▂▃▄▅▆▇█"
_BEHIND, _BUDGET = "░", "─"


class Chart:
    """A chart as wide as the console lets it be."""

    def __init__(self, plan: Plan, details: StepDetails, rows: int) -> None:
        self._rows = rows
        self._before, self._after = details.before, details.after
        self._end_seconds = max(details.before.step_seconds, details.after.step_seconds)
        self._top_bytes = max(details.before.peak_bytes, details.after.peak_bytes, 1)
        is_within = plan.budget_bytes < self._top_bytes
        self._budget_row = int(rows * plan.budget_bytes / self._top_bytes) if is_within else None
        self._labels = {rows - 1: in_unit_of(self._top_bytes, self._top_bytes, digits=1)}
        if self._budget_row is not None:
            self._labels.setdefault(self._budget_row, in_unit_of(plan.budget_bytes, self._top_bytes, digits=1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        margin = max(map(len, self._labels.values()))
        columns = options.max_width - margin - 2
        yield Text("Memory over the step", style="bold") + self._legend()
        if columns < 20:
            yield Text("(too narrow to draw)")
            return
        before, after = (_heights(line, columns, self._end_seconds or 1.0) for line in (self._before, self._after))
        scale = self._rows / self._top_bytes
        for row in reversed(range(self._rows)):
            line = Text(f"{self._labels.get(row, ''):>{margin}} │")
            for ahead, behind in zip(after, before, strict=True):
                line.append(*_cell(row, scale * ahead, scale * behind, row == self._budget_row))
            yield line
        yield Text(f"{'0':>{margin}} └{'─' * columns}")
        yield Text(" " * (margin + 2) + self._axis(columns))

    def _legend(self) -> Text:
        budget = "  ─ budget" if self._budget_row is not None else ""
        return Text(f": █ this plan  ░ without recompute{budget}", style="not bold")

    def _axis(self, columns: int) -> str:
        turn = int(columns * self._after.backward_seconds / (self._end_seconds or 1.0))
        end = format_seconds(self._end_seconds)
        axis = "forward".ljust(turn)[:turn] if turn > 8 else " " * turn
        rest = columns - turn
        middle = "backward" if rest > len(end) + 11 else ""
        return axis + f"{'│' + middle:<{max(rest - len(end), 0)}}{end}"


def render(plan: Plan, rows: int = _ROWS) -> Chart | None:
    """Show what the device holds over the step, with the plan and without."""
    return Chart(plan, plan.details, rows) if plan.details and plan.details.after.points else None


def _heights(line: Timeline, columns: int, end_seconds: float) -> Sequence[int]:
    """Return the highest moment within each column; nothing after the end of the step."""
    heights = [0] * columns
    ends = [*(point.seconds for point in line.points[1:]), line.step_seconds]
    for point, end in zip(line.points, ends, strict=True):
        first, last = (min(int(columns * at / end_seconds), columns - 1) for at in (point.seconds, end))
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
