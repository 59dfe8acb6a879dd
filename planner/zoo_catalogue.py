"""Which models the zoo has, and how each is made of its sizes.

Those of ``transformers`` are set up so that a step is one graph: no cache, no configuration that
is filled in during the first call, no warning on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from planner.errors import UsageError

if TYPE_CHECKING:
    import torch


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
    make: Callable[[Sizes], tuple[torch.nn.Module, int]]
    """Gives the model and its number of token ids or classes."""
    layer_name: str = "layers"
    """What ``sizes.layers`` counts."""
    inputs: Callable[[Sizes, int], dict[str, torch.Tensor]] | None = None
    """Gives what a step is called with, if not token ids or images with a class each."""


def _minigpt(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    from planner.zoo_modules import MiniGPT

    return MiniGPT(layers=sizes.layers, positions=max(1024, sizes.seq_len or 0)), 10_000


def _minimind(width: int, experts: int = 0) -> Callable[[Sizes], tuple[torch.nn.Module, int]]:
    def make(sizes: Sizes) -> tuple[torch.nn.Module, int]:
        from planner.zoo_modules import MiniMind

        positions = max(512, sizes.seq_len or 0)
        return MiniMind(layers=sizes.layers, width=width, positions=positions, experts=experts), 6400

    return make


def _gpt2(width: int, heads: int) -> Callable[[Sizes], tuple[torch.nn.Module, int]]:
    def make(sizes: Sizes) -> tuple[torch.nn.Module, int]:
        hf = _transformers()
        config = hf.GPT2Config(
            n_layer=sizes.layers,
            n_embd=width,
            n_head=heads,
            n_positions=max(1024, sizes.seq_len or 0),
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = hf.GPT2LMHeadModel(config)
        # Its class name matches no loss, so that every call would warn, which a graph cannot do.
        model.loss_type = "ForCausalLM"
        return model, config.vocab_size

    return make


def _llama(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    hf = _transformers()
    config = hf.LlamaConfig(
        num_hidden_layers=sizes.layers,
        max_position_embeddings=max(2048, sizes.seq_len or 0),
        use_cache=False,
        attn_implementation="sdpa",
    )
    return hf.LlamaForCausalLM(config), config.vocab_size


def _bert_large(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    hf = _transformers()
    config = hf.BertConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=max(512, sizes.seq_len or 0),
        attn_implementation="sdpa",
    )
    return hf.BertForMaskedLM(config), config.vocab_size


def _vit(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    hf = _transformers()
    if sizes.image_size is None or sizes.image_size % 16:
        raise UsageError(f"vit-b16 cuts images into patches of 16: image size {sizes.image_size} is not a multiple")
    config = hf.ViTConfig(
        num_hidden_layers=sizes.layers,
        image_size=sizes.image_size,
        num_labels=1000,
        # Otherwise the first call finds it out from the labels and writes it into the configuration.
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    with _without_values():
        return hf.ViTForImageClassification(config), 1000


def _resnet(*depths: int) -> Callable[[Sizes], tuple[torch.nn.Module, int]]:
    def make(sizes: Sizes) -> tuple[torch.nn.Module, int]:
        hf = _transformers()
        config = hf.ResNetConfig(
            depths=[min(depth, sizes.layers) for depth in depths],
            layer_type="bottleneck",
            num_labels=1000,
            problem_type="single_label_classification",
        )
        return hf.ResNetForImageClassification(config), 1000

    return make


def _t5(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    hf = _transformers()
    config = hf.T5Config(
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=sizes.layers,
        num_heads=12,
        decoder_start_token_id=0,
        initializer_factor=0.1,  # else an untrained one is surer of its guesses than its loss can bear
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config), config.vocab_size


def _unet(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    from planner.zoo_unets import UNet

    _halves("unet", sizes, sizes.layers)
    return UNet(levels=sizes.layers), 21


def _diffusion_unet(sizes: Sizes) -> tuple[torch.nn.Module, int]:
    from planner.zoo_unets import DiffusionUNet

    _halves("diffusion-unet", sizes, 3)
    return DiffusionUNet(blocks=sizes.layers), 1000


def _halves(name: str, sizes: Sizes, times: int) -> None:
    if not sizes.image_size or sizes.image_size % 2**times:
        raise UsageError(
            f"{name} halves images {times} times: image size {sizes.image_size} is not a multiple of {2**times}"
        )


def token_inputs(sizes: Sizes, tokens: int) -> dict[str, torch.Tensor]:
    """Give token ids and the ids to predict."""
    import torch

    shape = (sizes.batch_size, sizes.seq_len or 1)
    return {"input_ids": torch.randint(tokens, shape), "labels": torch.randint(tokens, shape)}


def image_inputs(sizes: Sizes, classes: int) -> dict[str, torch.Tensor]:
    """Give images and a class for each."""
    import torch

    return {"pixel_values": torch.randn(_image_shape(sizes)), "labels": torch.randint(classes, (sizes.batch_size,))}


def _pixel_inputs(sizes: Sizes, classes: int) -> dict[str, torch.Tensor]:
    """Give images and a class for each pixel."""
    import torch

    batch, _, *extent = _image_shape(sizes)
    return {"pixel_values": torch.randn(_image_shape(sizes)), "labels": torch.randint(classes, (batch, *extent))}


def _noise_inputs(sizes: Sizes, steps: int) -> dict[str, torch.Tensor]:
    """Give noisy images, how noisy they are, and the noise."""
    import torch

    shape = _image_shape(sizes)
    return {
        "pixel_values": torch.randn(shape),
        "timesteps": torch.randint(steps, shape[:1]),
        "labels": torch.randn(shape),
    }


def _image_shape(sizes: Sizes) -> tuple[int, ...]:
    extent = sizes.image_size or 1
    return sizes.batch_size, 3, extent, extent


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "this model needs transformers, which is not installed: pip install checkpoint-planner[zoo]"
        ) from error


@contextmanager
def _without_values() -> Iterator[None]:
    """Skip the initial values where tensors are fake: a truncated normal distribution looks at what it drew."""
    import torch

    from planner.torch_internals import FakeTensor

    if isinstance(torch.empty(0), FakeTensor):
        with import_module("transformers.initialization").no_init_weights():
            yield
    else:
        yield


ZOO = {
    "minigpt": Entry(
        description="GPT-2 small with 10,000 tokens and dropout, 94M parameters",
        sizes=Sizes(batch_size=2, layers=12, seq_len=1024),
        make=_minigpt,
    ),
    "minimind-26m": Entry(
        description="MiniMind2-Small, a small Llama with grouped queries, 26M parameters",
        sizes=Sizes(batch_size=8, layers=8, seq_len=512),
        make=_minimind(512),
    ),
    "minimind-104m": Entry(
        description="MiniMind2, a small Llama with grouped queries, 104M parameters",
        sizes=Sizes(batch_size=8, layers=16, seq_len=512),
        make=_minimind(768),
    ),
    "minimind-moe": Entry(
        description="MiniMind2-MoE, two of four experts and a shared one, all computed, 145M parameters",
        sizes=Sizes(batch_size=8, layers=8, seq_len=512),
        make=_minimind(640, experts=4),
    ),
    "gpt2": Entry(
        description="GPT-2 small (transformers), 124M parameters",
        sizes=Sizes(batch_size=8, layers=12, seq_len=1024),
        make=_gpt2(768, 12),
    ),
    "gpt2-774m": Entry(
        description="GPT-2 large (transformers), 774M parameters",
        sizes=Sizes(batch_size=4, layers=36, seq_len=1024),
        make=_gpt2(1280, 20),
    ),
    "llama-7b": Entry(
        description="LLaMA 7B (transformers), 6.7B parameters",
        sizes=Sizes(batch_size=4, layers=32, seq_len=2048, dtype="bfloat16"),
        make=_llama,
    ),
    "bert-large": Entry(
        description="BERT large, masked language model (transformers), 335M parameters",
        sizes=Sizes(batch_size=16, layers=24, seq_len=512),
        make=_bert_large,
    ),
    "vit-b16": Entry(
        description="ViT-B/16, image classification (transformers), 87M parameters",
        sizes=Sizes(batch_size=32, layers=12, image_size=224),
        make=_vit,
    ),
    "resnet50": Entry(
        description="ResNet-50 (transformers), 26M parameters",
        sizes=Sizes(batch_size=32, layers=6, image_size=224),
        make=_resnet(3, 4, 6, 3),
        layer_name="blocks per stage at most",
    ),
    "resnet152": Entry(
        description="ResNet-152 (transformers), 60M parameters",
        sizes=Sizes(batch_size=32, layers=36, image_size=224),
        make=_resnet(3, 8, 36, 3),
        layer_name="blocks per stage at most",
    ),
    "t5-base": Entry(
        description="T5 base, encoder and decoder (transformers), 223M parameters",
        sizes=Sizes(batch_size=8, layers=12, seq_len=512),
        make=_t5,
        layer_name="layers each way",
    ),
    "unet": Entry(
        description="U-Net, a class for each pixel, 31M parameters",
        sizes=Sizes(batch_size=8, layers=4, image_size=256),
        make=_unet,
        layer_name="levels",
        inputs=_pixel_inputs,
    ),
    "diffusion-unet": Entry(
        description="Denoising diffusion U-Net with attention and dropout, 36M parameters",
        sizes=Sizes(batch_size=32, layers=2, image_size=32),
        make=_diffusion_unet,
        layer_name="residual blocks a level",
        inputs=_noise_inputs,
    ),
}
