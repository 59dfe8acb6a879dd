"""Which models the zoo has, and how each is made of its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from planner.errors import UsageError
from planner.zoo import transformers as hf


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What can be chosen about a model; None for what it does not have."""

    batch_size: int
    layers: int
    seq_len: int | None = None
    image_size: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
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
    """What of :mod:`planner.zoo.inputs` gives what a step is called with, if not tokens or images of a class each."""


def _decoder(name: str, tokens: int, positions: int | None = None, *, sizes: Sizes, **options: int) -> hf.Made:
    from planner.zoo import modules

    if positions is not None:
        options["positions"] = max(positions, sizes.seq_len or 0)
    return getattr(modules, name)(layers=sizes.layers, **options), tokens


def _unet(sizes: Sizes) -> hf.Made:
    from planner.zoo.unets import UNet

    _halves("unet", sizes, sizes.layers)
    return UNet(levels=sizes.layers), 21


def _diffusion_unet(name: str, *, sizes: Sizes, **options: Any) -> hf.Made:
    from planner.zoo.unets import DiffusionUNet

    _halves(name, sizes, 3)
    return DiffusionUNet(blocks=sizes.layers, **options), 1000


def _halves(name: str, sizes: Sizes, times: int) -> None:
    if not sizes.image_size or sizes.image_size % 2**times:
        raise UsageError(
            f"{name} halves images {times} times: image size {sizes.image_size} is not a multiple of {2**times}"
        )


ZOO = {
    "minigpt": Entry(
        description="GPT-2 small with 10,000 tokens and dropout, 94M parameters",
        sizes=Sizes(batch_size=2, layers=12, seq_len=1024),
        make=partial(_decoder, "MiniGPT", 10_000, 1024),
    ),
    "minimind-26m": Entry(
        description="MiniMind2-Small, a small Llama with grouped queries, 26M parameters",
        sizes=Sizes(batch_size=8, layers=8, seq_len=512),
        make=partial(_decoder, "MiniMind", 6400, 512, width=512),
    ),
    "minimind-104m": Entry(
        description="MiniMind2, a small Llama with grouped queries, 104M parameters",
        sizes=Sizes(batch_size=8, layers=16, seq_len=512),
        make=partial(_decoder, "MiniMind", 6400, 512, width=768),
    ),
    "minimind-moe": Entry(
        description="MiniMind2-MoE, two of four experts and a shared one, all computed, 145M parameters",
        sizes=Sizes(batch_size=8, layers=8, seq_len=512),
        make=partial(_decoder, "MiniMind", 6400, 512, width=640, experts=4),
    ),
    "gpt2": Entry(
        description="GPT-2 small (transformers), 124M parameters",
        sizes=Sizes(batch_size=8, layers=12, seq_len=1024),
        make=partial(hf.gpt2, hidden_size=768, num_attention_heads=12),
    ),
    "gpt2-774m": Entry(
        description="GPT-2 large (transformers), 774M parameters",
        sizes=Sizes(batch_size=4, layers=36, seq_len=1024),
        make=partial(hf.gpt2, hidden_size=1280, num_attention_heads=20),
    ),
    "llama-7b": Entry(
        description="LLaMA 7B (transformers), 6.7B parameters",
        sizes=Sizes(batch_size=4, layers=32, seq_len=2048, dtype="bfloat16"),
        make=partial(hf.language_model, "Llama", positions=2048),
    ),
    "bert-large": Entry(
        description="BERT large, masked language model (transformers), 335M parameters",
        sizes=Sizes(batch_size=16, layers=24, seq_len=512),
        make=partial(
            hf.language_model,
            "Bert",
            "ForMaskedLM",
            positions=512,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
    ),
    "vit-b16": Entry(
        description="ViT-B/16, image classification (transformers), 87M parameters",
        sizes=Sizes(batch_size=32, layers=12, image_size=224),
        make=hf.vit,
    ),
    "resnet50": Entry(
        description="ResNet-50 (transformers), 26M parameters",
        sizes=Sizes(batch_size=32, layers=6, image_size=224),
        make=partial(hf.resnet, 3, 4, 6, 3),
        layer_name="blocks per stage at most",
    ),
    "resnet152": Entry(
        description="ResNet-152 (transformers), 60M parameters",
        sizes=Sizes(batch_size=32, layers=36, image_size=224),
        make=partial(hf.resnet, 3, 8, 36, 3),
        layer_name="blocks per stage at most",
    ),
    "t5-base": Entry(
        description="T5 base, encoder and decoder (transformers), 223M parameters",
        sizes=Sizes(batch_size=8, layers=12, seq_len=512),
        make=hf.t5,
        layer_name="layers each way",
    ),
    "unet": Entry(
        description="U-Net, a class for each pixel, 31M parameters",
        sizes=Sizes(batch_size=8, layers=4, image_size=256),
        make=_unet,
        layer_name="levels",
        inputs="pixel_inputs",
    ),
    "diffusion-unet": Entry(
        description="Denoising diffusion U-Net with attention and dropout, 36M parameters",
        sizes=Sizes(batch_size=32, layers=2, image_size=32),
        make=partial(_diffusion_unet, "diffusion-unet"),
        layer_name="residual blocks a level",
        inputs="noise_inputs",
    ),
    "latent-diffusion-unet": Entry(
        description="Latent diffusion U-Net of Stable Diffusion 1, with cross attention to a text, 860M parameters",
        sizes=Sizes(batch_size=4, layers=2, image_size=64),
        make=partial(
            _diffusion_unet,
            "latent-diffusion-unet",
            width=320,
            multiples=(1, 2, 4, 4),
            attention_levels=(0, 1, 2),
            channels=4,
            dropout=0.0,
            context_width=768,
        ),
        layer_name="residual blocks a level",
        inputs="text_and_noise_inputs",
    ),
    "convnext-tiny": Entry(
        description="ConvNeXt tiny with stochastic depth (transformers), 28.6M parameters",
        sizes=Sizes(batch_size=32, layers=9, image_size=224),
        make=partial(hf.convnext, 3, 3, 9, 3, widths=(96, 192, 384, 768), drop_path=0.1),
        layer_name="blocks per stage at most",
    ),
    "convnext-base": Entry(
        description="ConvNeXt base with stochastic depth (transformers), 88.6M parameters",
        sizes=Sizes(batch_size=32, layers=27, image_size=224),
        make=partial(hf.convnext, 3, 3, 27, 3, widths=(128, 256, 512, 1024), drop_path=0.5),
        layer_name="blocks per stage at most",
    ),
    "whisper-small-encoder": Entry(
        description="Encoder of Whisper small, language identification (transformers), 88M parameters",
        sizes=Sizes(batch_size=8, layers=12, seq_len=3000),
        make=hf.whisper_encoder,
        length_name="mel frames",
        inputs="sound_inputs",
    ),
    "lstm": Entry(
        description="LSTM language model with dropout between layers, 44M parameters",
        sizes=Sizes(batch_size=32, layers=4, seq_len=64),
        make=partial(_decoder, "LSTMLanguageModel", 10_000),
    ),
    "mixtral-1b": Entry(
        description="Mixtral of a quarter of its width, two of eight experts (transformers), 1.15B parameters",
        sizes=Sizes(batch_size=4, layers=12, seq_len=1024, dtype="bfloat16"),
        make=hf.mixtral,
    ),
    "qwen3-0.6b": Entry(
        description="Qwen3 0.6B (transformers), 596M parameters",
        sizes=Sizes(batch_size=4, layers=28, seq_len=1024),
        make=partial(
            hf.language_model,
            "Qwen3",
            positions=40_960,
            hidden_size=1024,
            intermediate_size=3072,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    ),
    "gemma3-1b": Entry(
        description="Gemma 3 1B, sliding windows and full attention (transformers), 1.0B parameters",
        sizes=Sizes(batch_size=4, layers=26, seq_len=1024),
        make=partial(
            hf.language_model,
            "Gemma3",
            config="TextConfig",
            positions=32_768,
            vocab_size=262_144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            sliding_window=512,
        ),
    ),
}
