"""What torch and Python do beside a capture and nobody asked for; private torch APIs, tried by tests/capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch._functorch._aot_autograd import graph_compile
from torch._logging import _internal as torch_logs

from planner.common.garbage import not_collected

_WRITE_GRAPHS = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}
"""Functions of AOTAutograd that write graphs out, each with what it gives where no log is enabled."""


@contextmanager
def nothing_beside() -> Iterator[None]:
    """Capture without what takes time and changes nothing: collections of garbage, and logs without a reader.

    Nearly all that a capture makes lives until it ends. Dynamo asks for a collection then.
    """
    with not_collected(), _without_unread_logs():
        yield


@contextmanager
def _without_unread_logs() -> Iterator[None]:
    """Let AOTAutograd write no graphs out where no log has a reader: it writes them before it asks."""
    with ExitStack() as stack:
        for name, nothing in _WRITE_GRAPHS.items():
            if (write := getattr(graph_compile, name, None)) is not None:
                stack.enter_context(patch.object(graph_compile, name, _if_read(write, nothing)))
        yield


def _if_read(write: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    return lambda *given: write(*given) if _are_read() else nothing


def _are_read() -> bool:
    """Whether somebody reads the graphs that torch logs: in a trace for ``tlparse``, or by ``TORCH_LOGS``.

    Torch finds out with the first line of a trace, which Dynamo writes, whether there is a file for it.
    """
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    return bool(torch_logs.trace_log.handlers) or any(log.isEnabledFor(logging.INFO) for log in logs)
