"""What tests on CUDA stand on: a GPU, or a CUDA build of torch under fakecuda."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

FAKE = "FAKECUDA" in os.environ
"""Whether kernels do nothing here, so that numbers and times mean nothing."""


def required() -> None:
    """Skip the test module that is being imported where there is no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or a CUDA build under tests/cuda/fakecuda: make cuda", allow_module_level=True)


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
only_fake = pytest.mark.skipif(not FAKE, reason="counts what the stand-ins see")


def run(code: str, **surroundings: str) -> str:
    """Run Python in a process of its own, with more variables around it, and return what it prints."""
    env, root = {**os.environ, **surroundings}, Path(__file__).parents[2]
    # Without it torch 2.14 aborts at most exits after a backward on a stand-in ("terminate called").
    ended = f"{code}\nimport os\nprint(end='', flush=True)\nos._exit(0)"
    command = [sys.executable, "-c", ended]
    done = subprocess.run(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


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


_WORK = re.compile(
    r"_Z|kernel|copy|set |cublas\w*(gemm|Gemm|Matmul |LayoutCreate)|cudnn(BackendExecute|Batch\w+Ex |SetTensorNd)"
)
_NUMBERED = {"cudnnBackendExecute": 1, "cudnnBatch": 1, "cublasLtMatmul ": 0}
"""By the beginning of a library's call, how many of its first arguments are no addresses."""


def launched(step: Callable[[], Any]) -> list[str]:
    """Return the kernels, copies and library calls of a step in order, each with its sizes."""
    runtime, found = ctypes.CDLL(None), []
    with tempfile.TemporaryFile("w+") as file:
        runtime.fakecuda_write_calls(file.fileno())
        step()
        runtime.fakecuda_write_calls(-1)
        file.seek(0)
        for call in filter(_WORK.match, file):
            count = next((count for name, count in _NUMBERED.items() if call.startswith(name)), 5)
            found.append(" ".join(call.split()[: 1 + count]))
    return found
