"""What autograd's engine keeps to itself; ``tests/capture/test_engine_sums.py`` tries it on each supported version."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import _engine_run_backward

_DISPATCHERS = ("torch._dynamo.", "torch._compile", "torch.utils._python_dispatch")
"""Modules of torch whose frames stand between an operator's caller and ``__torch_dispatch__``."""


def is_called_by_engine(above: int) -> bool:
    """Whether a function was called by autograd's engine, and by no program of Python's.

    Parameters
    ----------
    above : int
        The function: 1 for the one that calls this, 2 for the one that calls that, and so on.
    """
    frame: FrameType | None = sys._getframe(above + 1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_DISPATCHERS):
        frame = frame.f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def next_number() -> int:
    """Return the number that the next operation that can be differentiated will have."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def number_at_work() -> int | None:
    """Return the number of the operation whose derivative the engine computes now, None if it computes none."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def takes_boxed_gradients(node: Any) -> bool:
    """Whether a function of Python's is given its gradients in a list that it may empty."""
    return bool(getattr(getattr(node, "_forward_cls", None), "boxed_grads_call", False))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of a stretch of memory, each element once."""
    return bool(is_non_overlapping_and_dense_or_false(tensor))


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor, and how often its storage, is referred to."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
