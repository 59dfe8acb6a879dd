"""The terminal: results on standard output, progress on standard error, and Ctrl-C, which ends a command at once."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.report.progress import Shown

_IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█░─│└├·…", "   #####.-|++-~")
"""What stands for what a report draws with; half a block and more are a whole one."""


def hand_out(report: dict[str, Any], path: str | None, draw: Callable[[Any], None]) -> None:
    """Write a report as JSON if asked for, and show it unless the JSON goes to standard output."""
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
    """Hide torch's logs and warnings: our errors say what matters."""
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
    """Show progress on standard error, unless tracebacks and logs are wanted there."""
    from planner.report.progress import shown

    return shown(as_bar=not debug, as_lines=not debug)


# Ctrl-C.

INTERRUPTED = 130
"""The exit code; shells use it for what Ctrl-C ended."""

_GRACE_SECONDS = 0.5
"""What Python has to end by itself."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process soon after Ctrl-C.

    Python raises KeyboardInterrupt between two of its own instructions. A solver in C may take many seconds until the
    next one, a library may swallow it, and the interpreter waits for threads before it ends. The signal also arrives
    on a socket, at once, where a thread waits for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch()
    try:
        yield
    except KeyboardInterrupt:
        watch.leave()
        raise
    except BaseException:
        watch.stop()
        raise
    watch.stop()


class _Watch:
    """A thread that ends the process if nothing else does."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._arrived, self._is_said = threading.Event(), False
        threading.Thread(target=self._wait, daemon=True).start()

    def stop(self) -> None:
        """Let the process go on."""
        signal.set_wakeup_fd(self._before)
        self._writer.close()  # which ends the thread

    def leave(self) -> None:
        """Let the process end by itself, if that is quick; that it was interrupted is said elsewhere."""
        self._is_said = True
        if not self._arrived.wait(_GRACE_SECONDS):  # no signal: somebody raised the exception
            self.stop()

    def _wait(self) -> None:
        with self._reader as reader:
            while (number := reader.recv(1)) and number[0] != signal.SIGINT:
                pass  # another signal
            if not number:
                return
            self._arrived.set()
            reader.settimeout(_GRACE_SECONDS)
            try:
                if not reader.recv(1):
                    return
            except TimeoutError:
                pass
            if not self._is_said:
                print("error: interrupted", file=sys.stderr)
            sys.stderr.flush()
            os._exit(INTERRUPTED)
