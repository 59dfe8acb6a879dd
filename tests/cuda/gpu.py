"""What tests on CUDA stand on: a GPU, or a CUDA build of torch under fakecuda."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from planner.capture import masks

FAKE = "FAKECUDA" in os.environ
"""Whether kernels do nothing here, so that numbers and times mean nothing."""


def required() -> None:
    """Skip the test module that is being imported where there is no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip(
            "needs a GPU, or a CUDA build of torch under tests/cuda/fakecuda: make cuda", allow_module_level=True
        )


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
only_fake = pytest.mark.skipif(not FAKE, reason="counts what the stand-ins see")


class _OnHost(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
        return function(*args, **kwargs)


@contextmanager
def masks_on_host() -> Iterator[None]:
    """Let the CPU compute the masks that a capture looks at: where kernels do nothing, they hold anything."""
    evaluate = masks._evaluate

    def on_host(program: fx.GraphModule, arguments: Sequence[Any]) -> torch.Tensor | None:
        with _OnHost():
            return evaluate(program, tree_map_only(torch.Tensor, torch.Tensor.cpu, list(arguments)))

    with patch.object(masks, "_evaluate", on_host if FAKE else evaluate):
        yield


@dataclass(frozen=True)
class Calls:
    """How often the runtime was called since the process began."""

    segments: int
    launches: int
    copies: int
    copies_to_host: int
    synchronisations: int
    pinned: int


def calls() -> Calls:
    """Ask fakecuda what it counted."""
    numbers = (ctypes.c_long * 6)()
    ctypes.CDLL(None).fakecuda_counts(numbers)
    return Calls(*numbers)
