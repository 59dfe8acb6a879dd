"""Which attention kernel torch takes, asked of torch itself, held against what is said of it where no GPU is."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.capture import cuda_attention
from planner.measure import devices
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
HERE = torch.device("cuda:0")


def differences() -> list[str]:
    """Return the calls for which torch takes another kernel than is said; thousands are tried."""
    spec, found = devices.here(HERE), []
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    sizes = [(n, n) for n in (8, 12, 18, 20, 64, 96, 128, 160, 192, 200, 224, 256, 264)] + [(192, 128), (96, 64)]
    lengths = ((64, 64), (1, 64), (64, 1), (48, 64))
    masks = (None, torch.bool, torch.float32)
    for dtype, (size, value_size), drop, causal, groups, mask, (own, other) in itertools.product(
        types, sizes, (0.0, 0.1, 0.125), (False, True), (4, 2, 1), masks, lengths
    ):
        if mask is not None and causal:
            continue

        def heads(count: int, length: int, width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(2, count, length, width, dtype=dtype, device=HERE, requires_grad=True)

        tensors = heads(4, own, size), heads(groups, other, size), heads(groups, other, value_size)
        masking = None
        if mask is not None:
            masking = torch.empty(2, 1, own, other, dtype=mask if mask == torch.bool else dtype, device=HERE)
        taken = torch._fused_sdp_choice(*tensors, masking, drop, causal, enable_gqa=groups != 4)
        options = {"dropout_p": drop, "is_causal": causal, "enable_gqa": groups != 4}
        said = cuda_attention.choose(spec, *tensors, masking, **options)
        if KERNELS[taken] != said:
            found.append(f"{dtype} {size}/{value_size} {options} {groups} {mask} {own}/{other}: {taken}, said {said}")
    return found


def test_this_version_is_known() -> None:
    assert cuda_attention.VERSION in cuda_attention.RULES


@gpu.only_fake
@pytest.mark.parametrize(
    "name", tiered(["h100", "b200", "a100-80", "t4", "rtx-3090", "rtx-4090", "rtx-5090"], quick=["h100"])
)
def test_the_kernel_is_the_one_that_torch_takes(name: str) -> None:
    surroundings = {**os.environ, "FAKE_GPU": name, "TORCH_CUDNN_SDPA_DEPRIORITIZED": ""}
    code = "from tests.cuda.test_attention import differences; print('\\n'.join(differences()))"
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, cwd=root, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == ""
