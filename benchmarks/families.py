"""Every model type that ``transformers`` has, at a size that trains in a moment, with random weights and inputs.

Nothing is listed by hand that the library says: model types and classes are those of its own mappings, a configuration
is its default with the sizes of :data:`_SIZES` made small, and a call has the arguments that ``forward`` names. What
needs more is an entry of :data:`_OWN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from benchmarks.family_inputs import CLASSES, LENGTH, PIXELS, SPECIAL, TOKENS, arguments

MOST_PARAMETERS = 30_000_000
"""What is larger is not made small by what is known here, and not run."""

TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CTC",
    "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION",
    "OBJECT_DETECTION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "TIME_SERIES_PREDICTION",
    "MASKED_IMAGE_MODELING", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "PRETRAINING",
    "BACKBONE",
)  # fmt: skip
"""A model type is tried with the first of these that it has, else as its base model."""

_SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"_head_dims?$|^head_dim$|^d_kv$|^d_head$|^head_size$|^attention_head_size$", lambda value: 16),
    (r"key_value_heads?$|kv_heads?$|_kv_groups$|^num_query_groups$", lambda value: min(value, 2)),
    (r"heads?$", lambda value: min(value, 4)),
    (r"^(num_)?(hidden_)?layers$|_layers$|^n_layers?$|^num_layer$|^depth$|_depth$", lambda value: min(value, 2)),
    (r"intermediate_size$|ffn_dim$|ffn_hidden_size$|^d_ff$|^n_inner$|dim_feedforward$|^mlp_dim$|ffn_size$|mlp_hidden",
     lambda value: min(value, 128)),
    (r"lora_rank$|^rank$|_rank$", lambda value: min(value, 16)),
    (r"hidden_size$|^d_model$|^n_embd$|hidden_dim$|embed_dim$|embedding_size$|^dim$|^emb_dim$|projection_dim$|"
     r"^d_embed$|embedding_dim$|^width$|_width$|_d_model$|^hidden_channels$|^feature_size$|_proj_dim$|proj_size$|"
     r"^output_dim$|^encoder_hidden|^decoder_dim$|^lru_width$|^dim_att$|_dim$", lambda value: min(value, 64)),
    (r"vocab_size$|^vocabulary_size$|_vocab_size", lambda value: min(value, TOKENS)),
    (r"^(image|img|input|crop|pretrain_img|pretrained_img)_?size$", lambda value: PIXELS),
    (r"patch_size$", lambda value: min(value, 8)),
    (r"max_(position|source|target|seq|sequence).*|^n_positions$|^n_ctx$|^max_.*len(gth)?$|^seq_length$",
     lambda value: min(value, 4 * LENGTH)),
    (r"^(moe_)?(num|n)_.*experts$|^num_experts$|^moe_num_experts$", lambda value: min(value, 4)),
    (r"experts_per_to.*$|top_?k$|^moe_k$", lambda value: min(value, 2)),
    (r"^(n|num)_groups?$|^topk_group$|expert_group", lambda value: 1),
    (r"state_size$|d_state$", lambda value: min(value, 16)),
    (r"sliding_window$|attention_window|^window$|chunk_size$|_chunk_length$", lambda value: min(value, 16)),
    (r"^num_labels$", lambda value: CLASSES),
    (r"num_queries$|num_query_tokens$|^num_latents$", lambda value: min(value, 16)),
    (r"codebook_size$|num_embeddings$", lambda value: min(value, 64)),
)  # fmt: skip
"""What the names of sizes look like, and what becomes of their values; the first that fits counts."""

_FORECASTS = {
    "input_size": 1,
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
}

_OWN: dict[str, dict[str, Any]] = {
    "autoformer": _FORECASTS,
    "informer": _FORECASTS,
    "time_series_transformer": _FORECASTS,
    "mamba2": {"num_heads": 8},
    "swin": {"window_size": 4, "image_size": 128},
    "donut-swin": {"window_size": 4, "image_size": 128},
}
"""Fields that a model type needs beside those of :data:`_SIZES`; those of a part of it are in a dictionary."""


@cache
def _mappings() -> dict[str, dict[str, Any]]:
    """Return for each task the class names by model type; the base models come last."""
    from transformers.models.auto import modeling_auto

    tasks = {task: dict(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")) for task in TASKS}
    return {**tasks, "BASE": dict(modeling_auto.MODEL_MAPPING_NAMES)}


def names() -> list[str]:
    """Return all model types, the first of each task before the second of any: a part of the list is of every kind."""
    by_task: dict[str, list[str]] = {}
    for kind in dict.fromkeys(kind for classes in _mappings().values() for kind in classes):
        by_task.setdefault(task_of(kind), []).append(kind)
    order = ((number, rank, kind) for rank, kinds in enumerate(by_task.values()) for number, kind in enumerate(kinds))
    return [kind for _, _, kind in sorted(order)]


def task_of(kind: str) -> str:
    """Return the task that a model type is tried with."""
    return next(task for task, classes in _mappings().items() if kind in classes)


def build(kind: str) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """Build a model of a type, and what gives new inputs of it; raises whatever the library does not like."""
    import transformers

    task = task_of(kind)
    found = _mappings()[task][kind]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config = configured(model_class.config_class, _OWN.get(kind, {}))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters are left, above {MOST_PARAMETERS:,}")
    model: nn.Module = model_class(config).train()
    return model, partial(arguments, task, model)


# Configurations.


def configured(config_class: Any, own: dict[str, Any]) -> Any:
    """Return a configuration with small sizes; ``own`` says what is to be different."""
    default = config_class()
    changed: dict[str, Any] = dict(_small(default))
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(default, name, None)
        if hasattr(part, "to_dict"):
            changed[name] = configured(type(part), own.get(name, {}))
    return config_class(**{**changed, **{name: value for name, value in own.items() if name not in changed
                                         or not hasattr(changed[name], "to_dict")}})  # fmt: skip


def _small(default: Any) -> Iterator[tuple[str, Any]]:
    """Return the fields of a configuration that are sizes, and ids of special tokens, with small values."""
    special = TOKENS - 1
    fields = {name: value for name, value in sorted(vars(default).items()) if not name.startswith("_")}
    renamed = {mine: theirs for theirs, mine in default.attribute_map.items()}
    in_stages = any(isinstance(fields.get(name), (list, tuple)) for name in ("depths", "num_heads", "hidden_sizes"))
    for name, value in fields.items():
        if type(value) is int and re.search(r"_(token|token_id|token_index|id)$", name):
            if value >= TOKENS - SPECIAL:
                yield name, special
                special -= 1
        elif type(value) is int and value > 0 and not re.search(_KEPT, name):
            change = _rule(name) or _rule(renamed.get(name, name))
            if change is not None and not (in_stages and re.search(_STAGED, name)):
                yield name, change(value)
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads") is not None:
        yield "num_key_value_heads", min(fields["num_attention_heads"], 4)
    if fields.get("head_dim", 0) is None:
        yield "head_dim", 16
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in rope or re.search(_WITH_SECTIONS, default.model_type)):
        yield "rope_parameters", {**rope, "mrope_section": [2, 3, 3]}  # of half of a head
    if getattr(default, "is_encoder_decoder", False) and getattr(default, "decoder_start_token_id", None) is None:
        yield "decoder_start_token_id", 0
    if "use_cache" in fields:
        yield "use_cache", False


_KEPT = r"^num_(feat_extract|conv|extract)_|^num_stages|^conv_dim$"
_WITH_SECTIONS = r"^glm.*(v|ocr|image|ga)|^qwen2.*(vl|thinker)|^paddleocr"
"""Model types whose code has sections of rotary positions for large heads, if their configuration has none."""

_STAGED = r"embed_dim$|^num_heads$|hidden_size$|layers$|^dim$"
"""Sizes that others must fit: those of a list beside them."""


def _rule(name: str) -> Callable[[int], int] | None:
    return next((change for pattern, change in _SIZES if re.search(pattern, name)), None)
