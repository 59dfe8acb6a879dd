"""The simulated allocator against torch's own, call by call, with segments that grow and without."""

from __future__ import annotations

import random

import pytest
import torch

from planner.plans.allocator import Allocator, ExpandableAllocator
from tests.cuda import gpu
from tests.plans.test_allocator import random_size
from tests.tiers import tiered

gpu.required()


def differences(kind: type[Allocator], sequences: int) -> list[str]:
    """Allocate and free at random in both; say where they are not the same."""
    found = []
    for seed in range(sequences):
        rng, simulated = random.Random(seed), kind()
        held: dict[int, tuple[torch.Tensor, int]] = {}
        torch.cuda.empty_cache()
        for number in range(120):
            if held and rng.random() < 0.45:
                gone = rng.choice(list(held))
                simulated.free(held.pop(gone)[1])
            else:
                size = random_size(rng)
                held[number] = torch.empty(size, dtype=torch.uint8, device="cuda"), simulated.allocate(size)
            now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            if now != (simulated.block_bytes, simulated.reserved_bytes):
                found.append(f"sequence {seed}, call {number}: {now}")
                break
        held.clear()
    return found


@pytest.mark.parametrize("kind", [Allocator, ExpandableAllocator])
@pytest.mark.parametrize("sequences", tiered([20, 300], quick=[20]))
def test_it_counts_what_torch_counts(kind: type[Allocator], sequences: int) -> None:
    setting = f"expandable_segments:{kind is ExpandableAllocator}"
    lines = [
        "from planner.plans.allocator import Allocator, ExpandableAllocator",
        "from tests.cuda.test_allocator import differences",
        f"assert not (found := differences({kind.__name__}, {sequences})), found",
    ]
    gpu.run("\n".join(lines), PYTORCH_CUDA_ALLOC_CONF=setting)
