"""Settings of CUDA's allocator: what is simulated is, and what is not is named."""

from __future__ import annotations

import pytest

from planner.measure.allocator_settings import expandable_segments, not_simulated


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_are_seen(name: str) -> None:
    assert not expandable_segments({}) and not expandable_segments({name: "expandable_segments:False"})
    assert expandable_segments({name: "pinned_use_background_threads:True, expandable_segments:True"})
    assert not not_simulated({name: "backend:native,expandable_segments:True"})


@pytest.mark.parametrize(
    "setting", ["backend:cudaMallocAsync", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2,>:4]"]
)
def test_what_is_not_simulated_is_named(setting: str) -> None:
    found = not_simulated({"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{setting}"})
    assert found == f"PYTORCH_CUDA_ALLOC_CONF sets {setting}"
