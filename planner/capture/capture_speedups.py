"""Speed up captures: no garbage collection, no unread logs, memoized symbolic sizes; private torch APIs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch._functorch._aot_autograd import graph_compile
from torch._logging import _internal as torch_logs
from torch.fx.experimental import sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode, method_to_operator

from planner.common.garbage import not_collected

_WRITE_GRAPHS = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}
"""Functions of AOTAutograd that write graphs out, each with what it gives where no log is enabled."""

_ARITHMETIC = {**dict.fromkeys(("add", "sub", "mul"), int), **dict.fromkeys(("eq", "ne", "ge", "gt", "le", "lt"), bool)}
"""Methods of torch's symbolic numbers that two whole numbers go into, and what comes out."""

_REPLACEMENTS = "_replacements_version_counter"
"""What torch counts when a symbol is replaced; 2.11 does not, and computes everything anew there."""


@contextmanager
def nothing_beside() -> Iterator[None]:
    """Disable what slows a capture and does not change its result.

    That is to collect garbage, though nearly all that a capture makes lives until it ends, when Dynamo asks for a
    collection; to write graphs for logs without a reader; and to compute with the same symbolic sizes again.
    """
    with not_collected(), _without_unread_logs(), _sizes_computed_once():
        yield


@contextmanager
def _without_unread_logs() -> Iterator[None]:
    """Skip AOTAutograd's graph dumps if no log wants them: it formats them before it checks."""
    with ExitStack() as stack:
        for name, nothing in _WRITE_GRAPHS.items():
            stack.enter_context(patch.object(graph_compile, name, _if_read(getattr(graph_compile, name), nothing)))
        yield


def _if_read(write: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    return lambda *given: write(*given) if _are_read() else nothing


def _are_read() -> bool:
    """Whether graph logs are on, for ``tlparse`` or by ``TORCH_LOGS``.

    Torch finds out with the first line of a trace, which Dynamo writes, whether there is a file for it.
    """
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    return bool(torch_logs.trace_log.handlers) or any(log.isEnabledFor(logging.INFO) for log in logs)


@contextmanager
def _sizes_computed_once() -> Iterator[None]:
    """Memoize arithmetic of symbolic sizes: layouts ask for the same products many times.

    What is remembered is an expression, for as long as no symbol is replaced; each result is an object of its own.
    """
    known: dict[Any, tuple[Any, bool]] = {}
    with ExitStack() as stack:
        for name, result_type in _ARITHMETIC.items():
            remembered = _remembered(name, getattr(SymNode, f"_{name}"), result_type, known)
            stack.enter_context(patch.object(SymNode, f"_{name}", remembered))
        yield


def _remembered(
    name: str, compute: Callable[[Any, Any], Any], result_type: type, known: dict[Any, tuple[Any, bool]]
) -> Callable[[Any, Any], Any]:
    on_numbers = method_to_operator(name)

    def remembered(one: Any, other: Any) -> Any:
        if not (_is_plain(one) and _is_plain(other)) or get_proxy_mode() is not None or _are_watched(one.shape_env):
            return compute(one, other)
        shapes = one.shape_env
        version = getattr(shapes, _REPLACEMENTS, None)
        if version is None:
            return compute(one, other)
        key = name, one._expr, other._expr, one._optimized_summation, other._optimized_summation, shapes, version
        if key not in known:
            made = compute(one, other)
            if getattr(shapes, _REPLACEMENTS) == version:
                known[key] = made._expr, made._optimized_summation
            return made
        expression, is_sum = known[key]
        hint = on_numbers(one._hint, other._hint)
        return SymNode(expression, shapes, result_type, hint, optimized_summation=is_sum)

    return remembered


def _is_plain(number: Any) -> bool:
    """Whether this is a whole number whose value at hand is known."""
    return number.pytype is int and type(number._hint) is int


def _are_watched(shapes: Any) -> bool:
    """Whether torch is to log or to validate what is computed with sizes."""
    return (
        shapes._translation_validation_enabled
        or torch_logs.GET_DTRACE_STRUCTURED
        or sym_node.sym_node_log.isEnabledFor(logging.DEBUG)
    )
