"""A captured step without recompute launches no kernel, and no product or convolution, that eager does not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import planner
from benchmarks.cases import build
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

NAMES = [
    "minigpt", "minimind-26m", "gpt2", "llama-7b", "qwen3-0.6b", "bert-large", "whisper-small-encoder", "vit-b16",
    "resnet50", "convnext-tiny", "unet", "diffusion-unet", "regnet", "electra", "gpt-neox", "swin",
]  # fmt: skip

OTHERS = {"regnet": 6}
"""How many calls differ: convolutions of maps of one element, whose strides along these dimensions are others."""


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cuda", memory_format=torch.channels_last if tensor.dim() == 4 else torch.preserve_format)


def autocast_step(name: str) -> tuple[nn.Module, Callable[[], None]]:
    made = build(name)
    model = made.model.to(memory_format=torch.channels_last).to("cuda")  # type: ignore[call-overload]
    args, kwargs = tree_map_only(torch.Tensor, on_gpu, (made.example_args, made.example_kwargs))

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(*args, **kwargs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()

    return model, step


@gpu.only_fake
@pytest.mark.parametrize("name", tiered(NAMES, quick=["gpt2", "resnet50", "vit-b16", "unet"]))
def test_a_captured_step_calls_what_eager_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What transformers reads back to tell packed sequences is what memory happens to hold here.
    masks = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masks, "find_packed_sequence_indices", lambda _: None)
    model, step = autocast_step(name)
    step()
    in_eager = gpu.launched(step)
    planner.auto_wrap(model, budget=sys.maxsize, runtime="graph", search=planner.Search(time_limit_seconds=1))
    for _ in range(3):
        step()
    captured = gpu.launched(step)
    assert not planner.plan_of(model).recomputations
    assert len(in_eager) > 100
    more = Counter(captured) - Counter(in_eager)
    assert sum(more.values()) <= OTHERS.get(name, 0), more
    assert len(captured) <= len(in_eager)
    planner.unwrap(model)
    torch._C._cuda_clearCublasWorkspaces()  # other tests count what is there, and draw from the beginning
    torch.cuda.manual_seed(0)
