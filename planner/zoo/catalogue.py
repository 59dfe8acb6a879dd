"""Which models the zoo has: their sizes, how each is made of sizes, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

from planner.errors import UsageError
from planner.zoo import transformers as hf

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What can be chosen about a model; None for what it does not have."""

    batch_size: int
    layers: int
    seq_len: int | None = None
    image_size: int | None = None
    dtype: str = "float32"
    positions: int | None = None
    """Of what may be no longer than so many tokens."""


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: its sizes by default, and how it is made of sizes."""

    description: str
    sizes: Sizes
    make: Callable[..., hf.Made]
    """Is told the ``sizes``."""
    layer_name: str = "layers"
    """What ``sizes.layers`` counts."""
    length_name: str = "tokens"
    """What ``sizes.seq_len`` counts."""
    inputs: str = ""
    """Which of :data:`INPUTS` a step is called with; by default tokens or images."""

    def example(self, sizes: Sizes, classes: int) -> dict[str, Tensor]:
        """Draw what a step is called with."""
        import torch

        extents = {"batch": sizes.batch_size, "length": sizes.seq_len or 1, "side": sizes.image_size or 1}
        drawn = {}
        for name, (*shape, kind) in INPUTS[self.inputs or ("tokens" if sizes.seq_len else "images")].items():
            size = [extents[extent] if isinstance(extent, str) else extent for extent in shape]
            drawn[name] = torch.randint(classes, size) if kind == "index" else torch.randn(size)
        return drawn


_IMAGES = ("batch", 3, "side", "side", "normal")

INPUTS: dict[str, dict[str, tuple[str | int, ...]]] = {
    "tokens": {"input_ids": ("batch", "length", "index"), "labels": ("batch", "length", "index")},
    "images": {"pixel_values": _IMAGES, "labels": ("batch", "index")},
    "pixels": {"pixel_values": _IMAGES, "labels": ("batch", "side", "side", "index")},
    "text": {"input_ids": ("batch", "length", "index"), "labels": ("batch", "index")},
    "sound": {"input_features": ("batch", 80, "length", "normal"), "labels": ("batch", "index")},
}
"""Extents of each input, and whether it is drawn from a normal distribution or is an index of a class or token."""


def configured(place: str) -> Entry:
    """Return the model of a configuration of transformers on this machine: a folder, a file, or a name of the Hub."""
    config, kind = hf.configured(place)
    takes, text, side = signature(kind.forward).parameters, config.get_text_config(), getattr(config, "image_size", 224)
    inputs = "text" if kind.__name__.endswith("ForSequenceClassification") else ""
    positions = getattr(text, "max_position_embeddings", None)
    sizes = Sizes(8, getattr(text, "num_hidden_layers", 0), dtype=str(config.dtype or "float32").removeprefix("torch."))
    if "input_ids" in takes:
        sizes = replace(sizes, seq_len=min(512, positions or 512), positions=positions)
    elif kind.__name__.endswith("ForImageClassification"):
        sizes = replace(sizes, image_size=side if isinstance(side, int) else max(side))
    else:
        raise UsageError(f"{kind.__name__} is called with {list(takes)[1]}: write a factory that gives it examples")
    return Entry(f"{kind.__name__} (transformers)", sizes, partial(hf.of_configuration, place), inputs=inputs)


def _minigpt(sizes: Sizes) -> hf.Made:
    from planner.zoo.modules import MiniGPT

    return MiniGPT(layers=sizes.layers, positions=sizes.positions or 1024), 10_000


def _unet(sizes: Sizes) -> hf.Made:
    from planner.zoo.modules import UNet

    if not sizes.image_size or sizes.image_size % 2**sizes.layers:
        raise UsageError(f"a U-Net of {sizes.layers} levels halves images as often: {sizes.image_size} is no multiple")
    return UNet(sizes.layers), 21


_BLOCKS = "blocks per stage at most"

_gpt2 = partial(hf.language_model, "GPT2", "LMHeadModel")

_minimind = partial(
    hf.language_model, "Llama", vocab_size=6400, num_attention_heads=8, num_key_value_heads=2,
    tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip

# fmt: off
ZOO = {
    "minigpt": Entry("GPT-2 small with 10,000 tokens and dropout, 94M parameters", Sizes(2, 12, 1024, positions=1024),
                     _minigpt),
    "minimind-26m": Entry("MiniMind2-Small, a small Llama with grouped queries (transformers), 26M parameters",
                          Sizes(8, 8, 512, positions=32_768),
                          partial(_minimind, hidden_size=512, intermediate_size=1408)),
    "minimind-104m": Entry("MiniMind2, a small Llama with grouped queries (transformers), 104M parameters",
                           Sizes(8, 16, 512, positions=32_768),
                           partial(_minimind, hidden_size=768, intermediate_size=2048)),
    "gpt2": Entry("GPT-2 small (transformers), 124M parameters", Sizes(8, 12, 1024, positions=1024),
                  partial(_gpt2, hidden_size=768, num_attention_heads=12)),
    "gpt2-774m": Entry("GPT-2 large (transformers), 774M parameters", Sizes(4, 36, 1024, positions=1024),
                       partial(_gpt2, hidden_size=1280, num_attention_heads=20)),
    "llama-7b": Entry("LLaMA 7B (transformers), 6.7B parameters", Sizes(4, 32, 2048, positions=2048, dtype="bfloat16"),
                      partial(hf.language_model, "Llama")),
    "bert-large": Entry("BERT large, masked language model (transformers), 335M parameters",
                        Sizes(16, 24, 512, positions=512),
                        partial(hf.language_model, "Bert", "ForMaskedLM", hidden_size=1024,
                                num_attention_heads=16, intermediate_size=4096)),
    "vit-b16": Entry("ViT-B/16, image classification (transformers), 87M parameters", Sizes(32, 12, image_size=224),
                     hf.vit),
    "resnet50": Entry("ResNet-50 (transformers), 26M parameters", Sizes(32, 6, image_size=224),
                      partial(hf.resnet, 3, 4, 6, 3), _BLOCKS),
    "resnet152": Entry("ResNet-152 (transformers), 60M parameters", Sizes(32, 36, image_size=224),
                       partial(hf.resnet, 3, 8, 36, 3), _BLOCKS),
    "t5-base": Entry("T5 base, encoder and decoder (transformers), 223M parameters", Sizes(8, 12, 512), hf.t5,
                     "layers each way"),
    "unet": Entry("U-Net, a class for each pixel, 31M parameters", Sizes(8, 4, image_size=256),
                  _unet, "levels", inputs="pixels"),
    "convnext-tiny": Entry("ConvNeXt tiny with stochastic depth (transformers), 28.6M parameters",
                           Sizes(32, 9, image_size=224),
                           partial(hf.convnext, 3, 3, 9, 3, widths=(96, 192, 384, 768), drop_path=0.1), _BLOCKS),
    "convnext-base": Entry("ConvNeXt base with stochastic depth (transformers), 88.6M parameters",
                           Sizes(32, 27, image_size=224),
                           partial(hf.convnext, 3, 3, 27, 3, widths=(128, 256, 512, 1024), drop_path=0.5), _BLOCKS),
    "whisper-small-encoder": Entry("Encoder of Whisper small, language identification (transformers), 88M parameters",
                                   Sizes(8, 12, 3000, positions=3000), hf.whisper_encoder,
                                   length_name="mel frames", inputs="sound"),
    "mixtral-1b": Entry("Mixtral of a quarter of its width, two of eight experts (transformers), 1.15B parameters",
                        Sizes(4, 12, 1024, positions=4096, dtype="bfloat16"), hf.mixtral),
    "qwen3-0.6b": Entry("Qwen3 0.6B (transformers), 596M parameters", Sizes(4, 28, 1024, positions=40_960),
                        partial(hf.language_model, "Qwen3", hidden_size=1024, intermediate_size=3072,
                                num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
                                rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "gemma3-1b": Entry("Gemma 3 1B, sliding windows and full attention (transformers), 1.0B parameters",
                       Sizes(4, 26, 1024, positions=32_768),
                       partial(hf.language_model, "Gemma3", config="TextConfig", vocab_size=262_144,
                               hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1,
                               sliding_window=512)),
}
# fmt: on
