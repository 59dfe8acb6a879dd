"""Which attention kernel torch takes, asked of torch itself, held against what is said of it where no GPU is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.capture import cuda_attention
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()


def test_this_version_is_known() -> None:
    assert cuda_attention.VERSION in cuda_attention.RULES


@gpu.only_fake
@pytest.mark.parametrize(
    "name", tiered(["h100", "b200", "a100-80", "t4", "rtx-3090", "rtx-4090", "rtx-5090"], quick=["h100"])
)
def test_the_kernel_is_the_one_that_torch_takes(name: str) -> None:
    surroundings = {**os.environ, "FAKE_GPU": name, "TORCH_CUDNN_SDPA_DEPRIORITIZED": ""}
    code = "import torch; from benchmarks.attention import differences; print(differences(torch.device('cuda')))"
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, cwd=root, capture_output=True, text=True, check=True
    )
    count, found = ast.literal_eval(ran.stdout)
    assert count > 5000
    assert found == []
