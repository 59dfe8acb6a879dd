"""Tensors without data: what torch keeps to itself of its fake tensors; private torch APIs, tried by tests/capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily


def guards_on_sizes(mode: FakeTensorMode) -> list[Any]:
    """Return what must hold of sizes for what was traced in a mode to be what runs there, in symbols."""
    shapes = mode.shape_env
    return [] if shapes is None else [shapes.replace(guard.expr) for guard in shapes.guards]


def without_data(
    mode: FakeTensorMode,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Return a fake tensor, on some elements of ``memory`` or on its own; torch's own way takes twenty times as long.

    ``memory`` is flat, and on the device ``meta``.
    """
    if memory is None:
        return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)
    return FakeTensor(mode, torch.as_strided(memory, shape, strides, offset), device)


def with_its_number(tensor: FakeTensor, function: Any, args: Any, kwargs: Any) -> FakeTensor:
    """Return a fake tensor of one number with the number that a call without tensors gives, so that it can be read."""
    mode = tensor.fake_mode
    with unset_fake_temporarily():
        real = function(*args, **kwargs)
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


@contextmanager
def fake_calls_by(run: Callable[[FakeTensorMode, Any, Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Let every call on fake tensors be run by ``run``: it gets mode, operator, arguments, keywords, and the way on."""
    dispatch = FakeTensorMode.dispatch

    def by_run(mode: FakeTensorMode, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(mode, function, args, kwargs or {}, lambda: dispatch(mode, function, types, args, kwargs or {}))

    with patch.object(FakeTensorMode, "dispatch", by_run):
        yield


_SAID_TWICE = {
    fake_tensor.__name__: "failed while attempting to run meta",
    "torch._dynamo.exc": "Backend compiler exception",
}
"""What loggers of torch's write of what they also raise, by how it begins."""


@contextmanager
def without_logs_of_errors() -> Iterator[None]:
    """Leave out of the log what tracing raises: whoever asked for it gets it raised."""
    filters = {logging.getLogger(name): partial(_is_other, begins) for name, begins in _SAID_TWICE.items()}
    for logger, is_other in filters.items():
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger, is_other in filters.items():
            logger.removeFilter(is_other)


def _is_other(begins: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(begins)
