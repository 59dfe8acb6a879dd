"""What the environment sets of CUDA's caching allocator: what is simulated, and what is not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The first that is there counts."""
_WITHOUT_EFFECT = {
    "backend": ("native",),
    "expandable_segments": ("True", "False"),
    "pinned_num_register_threads": None,
    "pinned_reserve_segment_size_mb": None,
    "pinned_use_background_threads": None,
    "pinned_use_cuda_host_register": None,
    "pinned_use_host_register": None,
}
"""What leaves predictions as they are, by its values; None where all do."""


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether segments grow.

    Examples
    --------
    >>> expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    True
    """
    return _settings(environment).get("expandable_segments") == "True"


def not_simulated(environment: Mapping[str, str] = os.environ) -> str:
    """Say what is set that is not simulated, another allocator or other rules; ``""`` if nothing is.

    Examples
    --------
    >>> not_simulated({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    'PYTORCH_CUDA_ALLOC_CONF sets backend:cudaMallocAsync'
    """
    others = [
        f"{key}:{value}"
        for key, value in _settings(environment).items()
        if key not in _WITHOUT_EFFECT or value not in (_WITHOUT_EFFECT[key] or (value,))
    ]
    return f"{_name(environment)} sets {', '.join(others)}" if others else ""


def _name(environment: Mapping[str, str]) -> str:
    return next((name for name in _NAMES if environment.get(name)), "")


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    text = environment.get(_name(environment), "").replace(" ", "")
    return dict(re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", text))
