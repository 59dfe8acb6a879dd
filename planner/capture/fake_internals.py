"""Fake tensors: their modes, constants and logs; private torch APIs, tried by tests/capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._sympy.printers import PythonPrinter

from planner.capture.torch_internals import in_memory


def python_code(expression: Any) -> str:
    """Return an expression in symbols of sizes as Python has it."""
    return PythonPrinter().doprint(expression)


def without_data(
    mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Return a fake tensor on memory of its own; torch's own way takes twenty times as long."""
    return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)


def with_its_number(tensor: FakeTensor, function: Any, args: Any, kwargs: Any) -> FakeTensor:
    """Return a fake tensor of one number with the number that a call without tensors gives, so that it can be read."""
    mode = tensor.fake_mode
    with unset_fake_temporarily():
        real = function(*args, **kwargs)
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


@contextmanager
def fake_calls_by(run: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Run every call on fake tensors by ``run(operator, args, kwargs, original)``."""
    dispatch = FakeTensorMode.dispatch

    def by_run(mode: FakeTensorMode, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {}, lambda: dispatch(mode, function, types, args, kwargs or {}))

    with patch.object(FakeTensorMode, "dispatch", by_run):
        yield


@contextmanager
def without_logs_of_errors() -> Iterator[None]:
    """Silence torch's loggers of errors while tracing: what they write is raised too."""
    of_fakes, of_dynamo = logging.getLogger(fake_tensor.__name__), logging.getLogger("torch._dynamo.exc")
    with patch.object(of_fakes, "disabled", True), patch.object(of_dynamo, "disabled", True):
        yield


def fake_mode() -> FakeTensorMode:
    """Return a fake tensor mode, in which models and inputs are built without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """Return the fake mode that some of the tensors are of, or a new one."""
    local = map(in_memory, tensors)
    return next((tensor.fake_mode for tensor in local if isinstance(tensor, FakeTensor)), None) or fake_mode()


def is_without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's part of one, is fake."""
    return isinstance(in_memory(tensor), FakeTensor)


def shapes_of_capture() -> Any:
    """Return the record of sizes of the capture that is under way."""
    context = torch._guards.TracingContext.get()
    assert context.fake_mode is not None
    return context.fake_mode.shape_env
