"""Which attention kernel torch takes, asked of torch itself, held against what is said of it where no GPU is."""

from __future__ import annotations

import ast

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
    code = "import torch; from benchmarks.attention import differences; print(differences(torch.device('cuda')))"
    count, found = ast.literal_eval(gpu.run(code, FAKE_GPU=name, TORCH_CUDNN_SDPA_DEPRIORITIZED=""))
    assert count > 5000
    assert found == []
