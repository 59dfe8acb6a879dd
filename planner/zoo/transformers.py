"""The zoo's models from ``transformers``, built from configurations.

They are set up so that a step is one graph: no cache, no configuration that is filled in during
the first call, no warning on the way, experts that see what they were chosen for without a look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import patch

from planner.errors import UsageError
from planner.zoo.inputs import Sizes

if TYPE_CHECKING:
    import torch

Made = tuple["torch.nn.Module", int]
"""A model, and its number of token ids or classes."""


def gpt2(width: int, heads: int) -> Callable[[Sizes], Made]:
    """Return a maker of GPT-2 models of one width."""

    def make(sizes: Sizes) -> Made:
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


def llama(sizes: Sizes) -> Made:
    """Make a LLaMA."""
    hf = _transformers()
    config = hf.LlamaConfig(
        num_hidden_layers=sizes.layers,
        max_position_embeddings=max(2048, sizes.seq_len or 0),
        use_cache=False,
        attn_implementation="sdpa",
    )
    return hf.LlamaForCausalLM(config), config.vocab_size


def bert_large(sizes: Sizes) -> Made:
    """Make a BERT with a head for masked words."""
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


def vit(sizes: Sizes) -> Made:
    """Make a ViT-B/16 that classifies images."""
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


def resnet(*depths: int) -> Callable[[Sizes], Made]:
    """Return a maker of ResNets with so many blocks in each stage."""

    def make(sizes: Sizes) -> Made:
        hf = _transformers()
        config = hf.ResNetConfig(
            depths=[min(depth, sizes.layers) for depth in depths],
            layer_type="bottleneck",
            num_labels=1000,
            problem_type="single_label_classification",
        )
        return hf.ResNetForImageClassification(config), 1000

    return make


def t5(sizes: Sizes) -> Made:
    """Make a T5 of the base widths."""
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


def convnext(*depths: int, widths: tuple[int, ...], drop_path: float) -> Callable[[Sizes], Made]:
    """Return a maker of ConvNeXts with so many blocks in each stage; each block is skipped at random."""

    def make(sizes: Sizes) -> Made:
        hf = _transformers()
        if not sizes.image_size or sizes.image_size < 32:
            raise UsageError(f"ConvNeXt makes images 32 times smaller: image size {sizes.image_size} is too small")
        config = hf.ConvNextConfig(
            depths=[min(depth, sizes.layers) for depth in depths],
            hidden_sizes=widths,
            num_labels=1000,
            problem_type="single_label_classification",
        )
        # The constructor asks a tensor for the rates, which a fake one cannot tell: they are set below.
        rates = _Numbers([0.0] * sum(config.depths))
        with _without_values(), patch("torch.linspace", lambda *_, **__: rates):
            model = hf.ConvNextForImageClassification(config)
        layers = [layer for stage in model.convnext.encoder.stages for layer in stage.layers]
        skip = import_module("transformers.models.convnext.modeling_convnext").ConvNextDropPath
        for index, layer in enumerate(layers):
            layer.drop_path = skip(drop_path * index / max(1, len(layers) - 1))
        return model, 1000

    return make


class _Numbers(list[float]):
    """Passes for a tensor that is split and read."""

    def split(self, counts: Sequence[int]) -> list[_Numbers]:
        ends = list(accumulate(counts))
        return [_Numbers(self[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    def tolist(self) -> list[float]:
        return list(self)


def whisper_encoder(sizes: Sizes) -> Made:
    """Make the encoder of Whisper small with a head that tells 99 languages apart."""
    hf = _transformers()
    if sizes.seq_len is None or sizes.seq_len % 2:
        raise UsageError(f"whisper-small-encoder halves its input: {sizes.seq_len} mel frames are not even")
    config = hf.WhisperConfig(
        d_model=768,
        encoder_layers=sizes.layers,
        encoder_attention_heads=12,
        encoder_ffn_dim=3072,
        max_source_positions=sizes.seq_len // 2,
        num_labels=99,
        attn_implementation="sdpa",
    )
    return hf.WhisperForAudioClassification(config), 99


def mixtral(sizes: Sizes) -> Made:
    """Make a Mixtral a quarter as wide as the published one."""
    hf = _transformers()
    config = hf.MixtralConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=max(4096, sizes.seq_len or 0),
        output_router_logits=True,  # the loss that keeps experts equally busy is part of training one
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    model = hf.MixtralForCausalLM(config)
    # The first call would hang hooks for the router's logits under a lock, which a graph cannot do.
    import_module("transformers.utils.output_capturing").maybe_install_capturing_hooks(model.model)
    return model, config.vocab_size


def qwen3(sizes: Sizes) -> Made:
    """Make a Qwen3 of the widths of the published one with 0.6B parameters."""
    hf = _transformers()
    config = hf.Qwen3Config(
        num_hidden_layers=sizes.layers,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=max(40_960, sizes.seq_len or 0),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
        attn_implementation="sdpa",
    )
    return hf.Qwen3ForCausalLM(config), config.vocab_size


def gemma3(sizes: Sizes) -> Made:
    """Make a Gemma 3 of the widths of the published one with 1B parameters; every sixth layer sees all tokens."""
    hf = _transformers()
    config = hf.Gemma3TextConfig(
        vocab_size=262_144,
        num_hidden_layers=sizes.layers,
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
        max_position_embeddings=max(32_768, sizes.seq_len or 0),
        use_cache=False,
        attn_implementation="sdpa",
    )
    return hf.Gemma3ForCausalLM(config), config.vocab_size


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

    from planner.capture.torch_internals import FakeTensor

    if isinstance(torch.empty(0), FakeTensor):
        with import_module("transformers.initialization").no_init_weights():
            yield
    else:
        yield
