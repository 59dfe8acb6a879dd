"""Which split over many devices is fastest: the best in a table, and why others lost."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from planner.common.units import format_bytes, format_seconds
from planner.extras.splits.types import EFFICIENCY, Answer, Estimate, Lost
from planner.report.style import counted, print_report, signed_percent, sizes, table

_SHOWN_LOST = 12


def render(answer: Answer, console: Console) -> None:
    """Print the answer."""
    best = answer.best[0]
    line = (
        f"BEST of {answer.considered} splits over {counted(answer.question.gpus, 'GPU')}: {best.split} · "
        f"{best.tokens_per_second_per_gpu:,.0f} {_unit(answer)}/s for each, {best.tokens_per_second:,.0f} in all · "
        f"peak {format_bytes(best.peak_bytes)} of {format_bytes(answer.question.memory_bytes)}"
    )
    lost = _lost(answer) if answer.lost else None
    parts = (_best(answer), _where_time_goes(answer), lost, Text(_explained(answer)))
    print_report(console, line, *parts, style="bold green")


def _unit(answer: Answer) -> str:
    """Say what is counted: where samples are no sequences, they are."""
    return "samples" if answer.best[0].tokens == answer.question.global_batch else "tokens"


def _best(answer: Answer) -> RenderableType:
    size = sizes(one.peak_bytes for one in answer.best)
    fastest = answer.best[0]
    return table(
        f"The best {len(answer.best)}" if len(answer.best) > 1 else "The best",
        answer.best,
        ("split", lambda one: one.split, str),
        ("recompute", _kept, str),
        (f"{_unit(answer)}/s/GPU", lambda one: one.tokens_per_second_per_gpu, "{:,.0f}".format),
        ("slower", lambda one: one.step_seconds / fastest.step_seconds - 1, signed_percent),
        ("peak", lambda one: one.peak_bytes, size),
        text_columns=2,
        bold=lambda one: one is fastest,
    )


def _kept(one: Estimate) -> str:
    """Say what the stage keeps that keeps least."""
    stage = max(one.stages, key=lambda stage: stage.count if stage.first != "keep all" else 0)
    if stage.count == 0:
        return "none" if stage.others == "keep all" else stage.others
    rest = stage.layers - stage.count
    return f"{stage.count} {stage.first}" + (f", {rest} {stage.others}" if rest else "")


def _where_time_goes(answer: Answer) -> RenderableType:
    best = answer.best[0]
    rows = [(name, seconds) for name, seconds in best.seconds.items() if seconds > 0]
    return table(
        f"The best one's {format_seconds(best.step_seconds)}",
        rows,
        ("part", lambda row: row[0], str),
        ("time", lambda row: row[1], format_seconds),
        ("share", lambda row: row[1] / best.step_seconds, "{:.1%}".format),
    )


def _lost(answer: Answer) -> RenderableType:
    shown = answer.lost[:_SHOWN_LOST]
    more = len(answer.lost) - len(shown)
    rest = f" (the nearest {len(shown)} of {len(answer.lost)}: --json has all)" if more else ""
    return table(
        f"Why other combinations lost{rest}",
        shown,
        ("split", _shape, str),
        ("why", lambda one: one.reason, str),
        ("slower", _slower, str),
        text_columns=2,
    )


def _shape(one: Lost) -> str:
    return ", ".join(f"{name} {n}" for name, n in one.shape.named.items() if n > 1 or name == "data")


def _slower(one: Lost) -> str:
    if one.slower is None:
        return f"{format_bytes(one.missing_bytes or 0)} short"
    return signed_percent(one.slower)


def _explained(answer: Answer) -> str:
    links = answer.question.links
    said = (
        f"Predicted by the roofline of {answer.question.device.name}, never run. Links: "
        f"{links.node_bytes_per_second / 1e9:g} GB/s in a node of {links.node_devices}, "
        f"{links.network_bytes_per_second / 1e9:g} GB/s of each device to other nodes ({links.source}), of which "
        f"collectives reach {EFFICIENCY:.0%}. All splits were estimated, in {format_seconds(answer.seconds)}."
    )
    return " ".join([said, *(f"Assumed: {one}." for one in answer.assumed)])
