"""Does torch take the attention kernels that are said of it? Thousands of calls are asked, none is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from planner.capture.cuda_attention import choose
from planner.measure import devices

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Torch's numbers of them."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SAME = (8, 12, 18, 20, 64, 96, 128, 160, 192, 200, 224, 256, 264)
_SIZES = (*((size, size) for size in _SAME), (192, 128), (96, 64))
_LENGTHS = ((64, 64), (1, 64), (64, 1), (48, 64))
_MASKS = (None, torch.bool, torch.float32)


def differences(device: torch.device) -> tuple[int, list[str]]:
    """Return how many calls were asked, and those for which torch takes another kernel than is said of the device."""
    spec, found, count = devices.here(device), [], 0
    for text, tensors, mask, options in _calls(device):
        taken = torch._fused_sdp_choice(*tensors, mask, *list(options.values())[:2], enable_gqa=options["enable_gqa"])
        said = choose(spec, *tensors, mask, **options)
        count += 1
        if KERNELS.get(taken) != said:
            found.append(f"{text}: {KERNELS.get(taken, taken)}, said {said}")
    return count, found


def _calls(device: torch.device) -> Iterator[tuple[str, tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, Any]]]:
    for dtype, (size, value_size), dropout, causal, heads, kind, (own, other) in itertools.product(
        _TYPES, _SIZES, (0.0, 0.1, 0.125), (False, True), (4, 2, 1), _MASKS, _LENGTHS
    ):
        if kind is not None and causal:
            continue
        shapes = (4, own, size), (heads, other, size), (heads, other, value_size)
        tensors = tuple(torch.empty(2, *s, dtype=dtype, device=device, requires_grad=True) for s in shapes)
        of_mask = torch.bool if kind == torch.bool else dtype
        mask = None if kind is None else torch.empty(2, 1, own, other, dtype=of_mask, device=device)
        options = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": heads != 4}
        yield f"{dtype} {shapes} {options} mask {kind}", tensors, mask, options
