"""Models of other libraries, in their loops: eager's bits, and the peak of the library's own checkpointing.

Libraries that are not installed are left out: ``pip install trl datasets diffusers timm`` beside torchvision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.memory import measure_peak
from tests.integrations.test_training_loops import SEARCH, STEPS, same, trained
from tests.models import language_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


Made = tuple[nn.Module, Callable[[Any], None], Callable[[Any], torch.Tensor]]
"""A model, how it checkpoints itself, and its loss."""


def unet() -> Made:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = diffusers.UNet2DModel(sample_size=32, block_out_channels=(32, 64), attention_head_dim=8, **blocks)
    noise = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return (model, lambda own: own.enable_gradient_checkpointing(), lambda own: own(noise, 7).sample.square().mean())


def vision_transformer() -> Made:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=6, drop_path_rate=0.1)
    images = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    return model, lambda own: own.set_grad_checkpointing(), lambda own: own(images).square().mean()


@pytest.mark.parametrize("made", [unet, vision_transformer])
def test_models_under_accelerate(made: Callable[[], Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    plain, checkpoint, loss = made()
    models = {"plain": plain, "checkpointed": copy.deepcopy(plain), "planned": copy.deepcopy(plain)}
    checkpoint(models["checkpointed"])
    peaks: dict[str, int] = {}
    for name, model in models.items():
        accelerator = accelerate.Accelerator(cpu=True)
        if name == "planned":
            planner.auto_wrap(model, budget=planner.Budget(activations=peaks["checkpointed"]), search=SEARCH)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))

        def step(model: nn.Module = model, accelerator: Any = accelerator) -> None:
            accelerator.backward(loss(model))

        for number in range(STEPS):
            torch.manual_seed(number)
            if number == STEPS - 1:
                peaks[name], _ = measure_peak(step, torch.device("cpu"))
            else:
                step()
            optimizer.step()
            optimizer.zero_grad()
    assert same(models["plain"], models["planned"])
    assert planner.plan_of(models["planned"]).recomputations
    assert peaks["planned"] <= peaks["checkpointed"] < peaks["plain"]


def test_trl_whose_loss_cannot_be_captured(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"{number}": number for number in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    lengths = [60, 64, 56, 62, 60, 64]  # those of the last two steps, which are measured, are known by then
    rows = [[number % 60 + 2 for number in range(length)] for length in lengths for _ in range(4)]

    def made(callbacks: list[Any], **settings: Any) -> Any:
        sizes = {"hidden_size": 128, "intermediate_size": 1024, "max_position_embeddings": 64}
        return trl.SFTTrainer(
            language_model(num_hidden_layers=4, **sizes),
            trl.SFTConfig(bf16=False, max_length=None, train_sampling_strategy="sequential", **settings),
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    plain, needed_bytes = trained(made, tmp_path, None, gradient_checkpointing=False)
    _, checkpointed_bytes = trained(made, tmp_path, None, gradient_checkpointing=True)
    planned, peak_bytes = trained(made, tmp_path, checkpointed_bytes, gradient_checkpointing=False)
    assert same(plain, planned)
    assert planner.plan_of(planned).runtime in ("parts", "modules")
    assert peak_bytes <= checkpointed_bytes < needed_bytes
