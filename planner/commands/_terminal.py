"""What a command shows: results on standard output, how it stands on standard error."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.report.progress import Shown

_IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█░─│└├·…", "   #####.-|++-~")
"""What stands for what a report draws with; half a block and more are a whole one."""


def hand_out(report: dict[str, Any], path: str | None, draw: Callable[[Any], None]) -> None:
    """Write a report as JSON where that is asked for, and show it, unless standard output is for the JSON alone."""
    write_json(report, path)
    if path != "-":
        show(draw)


def show(draw: Callable[[Any], None]) -> None:
    """Print what is drawn on a console of the terminal's width, in whatever encoding standard output has."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        draw(console)
    sys.stdout.write(encodable(capture.get(), sys.stdout.encoding or "utf-8"))


def encodable(text: str, encoding: str) -> str:
    """Return a text in characters that an encoding has; where blocks and lines are missing, ASCII draws them."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def write_json(report: dict[str, Any], path: str | None) -> None:
    """Write a report to a file, or for ``"-"`` to standard output; nothing without a path."""
    if path is None:
        return
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        from planner.common.atomic import write_text

        write_text(path, text)


@contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Keep what torch logs and warns on the way out of sight: errors of ours say what matters."""
    if debug:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def reporting(debug: bool) -> AbstractContextManager[Shown]:
    """Show on standard error how the work stands, unless tracebacks and logs are to be read there."""
    from planner.report.progress import shown

    return shown(as_bar=not debug, as_lines=not debug)
