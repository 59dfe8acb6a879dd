"""What runtimes are compared on: every model of the zoo and others beside it, at sizes that take seconds at most.

Those beside it are what capture is known to change: grouped queries, masks that hide nothing,
and experts; and what nobody made it for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diffusion import diffusion_unet
from benchmarks.pairs import evoformer, graph_transformer
from planner import zoo
from planner.capture.torch_internals import FakeTensorMode
from planner.zoo import ZooModel

ZOO_SIZES: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 8, "layers": 6, "image_size": 128},
    "unet": {"batch_size": 2, "layers": 4, "image_size": 96},
    "convnext-tiny": {"batch_size": 2, "layers": 9, "image_size": 96},
    "minimind-26m": {"batch_size": 2, "layers": 6, "seq_len": 384},
    "whisper-small-encoder": {"batch_size": 1, "layers": 3, "seq_len": 600},
    "vit-b16": {"batch_size": 4, "layers": 4, "image_size": 224},
    "resnet152": {"batch_size": 4, "layers": 36, "image_size": 128},
    "convnext-base": {"batch_size": 1, "layers": 9, "image_size": 96},
    "minimind-104m": {"batch_size": 1, "layers": 4, "seq_len": 256},
    "bert-large": {"batch_size": 3, "layers": 3, "seq_len": 384},
    "minigpt": {"batch_size": 2, "layers": 4, "seq_len": 384},
    "gpt2": {"batch_size": 2, "layers": 4, "seq_len": 384},
    "t5-base": {"batch_size": 2, "layers": 3, "seq_len": 320},
    "gpt2-774m": {"batch_size": 1, "layers": 2, "seq_len": 128},
    "qwen3-0.6b": {"batch_size": 1, "layers": 2, "seq_len": 128},
    "mixtral-1b": {"batch_size": 1, "layers": 1, "seq_len": 128},
    "llama-7b": {"batch_size": 1, "layers": 1, "seq_len": 64, "dtype": "bfloat16"},
    "gemma3-1b": {"batch_size": 1, "layers": 1, "seq_len": 64},
}
"""Those that ``benchmarks.prediction`` runs have its sizes."""

TOKENS, BATCH, LENGTH, CLASSES = 2000, 2, 256, 10
ACTIVATION_SIZES: dict[str, dict[str, Any]] = {
    "minigpt": {"batch_size": 8, "layers": 2, "seq_len": 256},
    "llama-grouped": {"count": 8},
    "bart": {"count": 8, "dropout": 0.0},
    "mixtral-small": {"count": 16},
    "qwen2-moe": {"count": 8},
    "unet": {"batch_size": 8},
    "convnext-tiny": {"batch_size": 12},
    "diffusion-unet": {"batch_size": 12},
    "vit-b16": {"batch_size": 12},
    "t5-base": {"batch_size": 4, "layers": 2, "seq_len": 320},
}
"""Sizes of :data:`CASES` at which gradients, which no plan can make smaller, are a small part of the peak."""


def build(name: str, **sizes: Any) -> ZooModel:
    """Build one of :data:`CASES` with random weights and inputs; ``sizes`` are in place of those that it has."""
    torch.manual_seed(0)
    return CASES[name](**sizes)


def of_name(name: str, device: str = "cpu", fake_mode: FakeTensorMode | None = None, **sizes: int) -> ZooModel:
    """Build in bfloat16 a model of the zoo, one of a file in ``configurations``, or the diffusion transformer."""
    if name == "dit-xl2":
        with torch.device(device):
            place = "benchmarks.diffusion:diffusion_transformer"
            return zoo.load_user_model(place, sizes=sizes, fake_mode=fake_mode)
    file = Path(__file__).parent / "configurations" / f"{name}.json"
    name = f"hf:{file}" if file.exists() else name
    return zoo.build(name, device=device, fake_mode=fake_mode, dtype="bfloat16", **sizes)


def _llama(*, with_mask: bool, count: int = BATCH) -> ZooModel:
    made = of_text("LlamaConfig", "LlamaForCausalLM", count=count, intermediate_size=704, **_GROUPED)
    mask = {"attention_mask": torch.ones(count, LENGTH, dtype=torch.long)} if with_mask else {}
    return replace(made, example_kwargs={**made.example_kwargs, **mask})


def _mixtral(*, count: int = BATCH) -> ZooModel:
    made = of_text(
        "MixtralConfig", "MixtralForCausalLM", count=count, intermediate_size=448, num_local_experts=4,
        num_experts_per_tok=2, experts_implementation="grouped_mm", **_GROUPED,
    )  # fmt: skip
    return replace(made, model=made.model.to(torch.bfloat16))  # all that grouped products are made for


def _tokens(count: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    return {name: torch.randint(TOKENS, (count, length)) for name in ("input_ids", "labels")}


_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": TOKENS}
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "use_cache": False}


def of_text(config: str, model: str, *, count: int = BATCH, length: int = LENGTH, **options: Any) -> ZooModel:
    """Build a model of ``transformers`` that reads tokens, with its configuration's own sizes but for ``options``."""
    return _model(config, model, _tokens(count, length), **options)


def of_images(config: str, model: str, *, size: int = 96, count: int = 4, **options: Any) -> ZooModel:
    """Build one that reads images."""
    example = {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(CLASSES, (count,))}
    return _model(config, model, example, num_labels=CLASSES, **options)


def _hifigan() -> ZooModel:
    import transformers

    rates: dict[str, Any] = {"upsample_rates": [4, 4, 2, 2], "upsample_kernel_sizes": [8, 8, 4, 4]}
    config = transformers.SpeechT5HifiGanConfig(model_in_dim=40, upsample_initial_channel=128, **rates)
    model = transformers.SpeechT5HifiGan(config).train()
    spectrogram = torch.randn(2, 60, 40)
    return ZooModel(name="hifigan", model=model, example_args=(spectrogram,), loss_fn=lambda wave: wave.pow(2).mean())


def _model(config: str, model: str, example: dict[str, torch.Tensor], **options: Any) -> ZooModel:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return ZooModel(name=model, model=made.train(), example_kwargs=example)


ARCHITECTURES: dict[str, Callable[[], ZooModel]] = {
    "mamba2": partial(
        of_text, "Mamba2Config", "Mamba2ForCausalLM", vocab_size=TOKENS, hidden_size=256, num_hidden_layers=2,
        num_heads=8, head_dim=64, state_size=32, n_groups=1, chunk_size=64, use_cache=False,
    ),
    "bamba": partial(
        of_text, "BambaConfig", "BambaForCausalLM", intermediate_size=512, attn_layer_indices=[1, 3],
        mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_chunk_size=64, **_GROUPED,
    ),
    "bloom": partial(
        of_text, "BloomConfig", "BloomForCausalLM", vocab_size=TOKENS, hidden_size=256, n_layer=4, n_head=8,
        use_cache=False,
    ),
    "mpt": partial(
        of_text, "MptConfig", "MptForCausalLM", vocab_size=TOKENS, d_model=256, n_layers=4, n_heads=8,
        use_cache=False,
    ),
    "falcon-alibi": partial(of_text, "FalconConfig", "FalconForCausalLM", alibi=True, use_cache=False, **_TEXT),
    "gpt-neox": partial(
        of_text, "GPTNeoXConfig", "GPTNeoXForCausalLM", intermediate_size=1024, use_cache=False, **_TEXT
    ),
    "phi": partial(of_text, "PhiConfig", "PhiForCausalLM", intermediate_size=1024, use_cache=False, **_TEXT),
    "gemma2": partial(
        of_text, "Gemma2Config", "Gemma2ForCausalLM", intermediate_size=512, head_dim=32, sliding_window=64, **_GROUPED
    ),
    "olmoe": partial(
        of_text, "OlmoeConfig", "OlmoeForCausalLM", intermediate_size=256, num_experts=4, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=1, use_cache=False, **_TEXT,
    ),
    "qwen2-moe": partial(
        of_text, "Qwen2MoeConfig", "Qwen2MoeForCausalLM", intermediate_size=512, moe_intermediate_size=256,
        shared_expert_intermediate_size=256, num_experts=4, num_experts_per_tok=2, **_GROUPED,
    ),
    "bart": partial(
        of_text, "BartConfig", "BartForConditionalGeneration", vocab_size=TOKENS, d_model=256, encoder_layers=2,
        decoder_layers=2, encoder_ffn_dim=1024, decoder_ffn_dim=1024, encoder_attention_heads=8,
        decoder_attention_heads=8, use_cache=False,
    ),
    "deberta-v2": partial(
        of_text, "DebertaV2Config", "DebertaV2ForMaskedLM", intermediate_size=1024, relative_attention=True,
        pos_att_type=["p2c", "c2p"], **_TEXT,
    ),
    "roformer": partial(of_text, "RoFormerConfig", "RoFormerForMaskedLM", intermediate_size=1024, **_TEXT),
    "electra": partial(
        of_text, "ElectraConfig", "ElectraForMaskedLM", embedding_size=128, intermediate_size=1024, **_TEXT
    ),
    "fnet": partial(
        of_text, "FNetConfig", "FNetForMaskedLM", vocab_size=TOKENS, hidden_size=256, num_hidden_layers=4,
        intermediate_size=1024, type_vocab_size=2,
    ),
    "swin": partial(
        of_images, "SwinConfig", "SwinForImageClassification", size=128, image_size=128, embed_dim=48,
        depths=[2, 2, 2], num_heads=[3, 6, 12], window_size=4,
    ),
    "regnet": partial(
        of_images, "RegNetConfig", "RegNetForImageClassification", embedding_size=32,
        hidden_sizes=[64, 128, 256, 256], depths=[1, 2, 2, 1], groups_width=32,
    ),
    "mobilenet-v2": partial(of_images, "MobileNetV2Config", "MobileNetV2ForImageClassification", count=8),
    "poolformer": partial(of_images, "PoolFormerConfig", "PoolFormerForImageClassification", depths=[2, 2, 2, 2]),
    "segformer": partial(of_images, "SegformerConfig", "SegformerForImageClassification", depths=[1, 1, 2, 1]),
    "beit": partial(
        of_images, "BeitConfig", "BeitForImageClassification", image_size=96, patch_size=8, intermediate_size=1024,
        use_relative_position_bias=True, **_SIZES,
    ),
    "hifigan": _hifigan,
    "evoformer": evoformer,
    "graph-transformer": graph_transformer,
    "dinov2": partial(
        of_images, "Dinov2Config", "Dinov2ForImageClassification", size=98, image_size=98, patch_size=14, **_SIZES
    ),
}  # fmt: skip
"""Architectures of ``transformers`` that neither zoo nor capture was made for, small, with random weights: state-space
models and hybrids, positions as a bias of attention, experts, encoders and decoders, token mixing by Fourier transforms
and by pooling, windowed attention, grouped, depthwise and transposed convolutions, pairs."""


CASES: dict[str, Callable[[], ZooModel]] = {
    "llama-grouped": partial(_llama, with_mask=False),
    "llama-grouped-mask": partial(_llama, with_mask=True),
    "mixtral-small": _mixtral,
    **{name: partial(zoo.build, name, **sizes) for name, sizes in ZOO_SIZES.items()},
    "diffusion-unet": partial(diffusion_unet, batch_size=2, layers=1),
    **ARCHITECTURES,
}
"""By what they are called in tables; those that take least come first."""
