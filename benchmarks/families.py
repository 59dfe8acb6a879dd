"""Every model type that ``transformers`` has, at a size that trains in a moment, with random weights and inputs.

Nothing is listed by hand that the library says: model types and classes are those of its own mappings, a configuration
is its default with the sizes of :data:`_SIZES` made small, and a call has the arguments that ``forward`` names. What
needs more is an entry of :data:`_OWN`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, TOKENS, SPECIAL, CLASSES, PIXELS, SAMPLES = 4, 64, 320, 40, 5, 64, 4000
"""Sizes of the inputs; the last of the tokens are special ones."""

MOST_PARAMETERS = 30_000_000
"""What is larger is not made small by what is known here, and not run."""

TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC",
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

_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    **dict.fromkeys(
        ("autoformer", "informer", "time_series_transformer"),
        {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1},
    ),
    "bros": {"dim_bbox": 8},
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
    return model, lambda: _called(task, model)


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
    if isinstance(rope := fields.get("rope_parameters"), dict) and "mrope_section" in rope:
        yield "rope_parameters", {**rope, "mrope_section": [2, 3, 3]}  # of half of a head
    if "use_cache" in fields:
        yield "use_cache", False


_KEPT = r"^num_(feat_extract|conv|extract)_|^num_stages|^conv_dim$"
_STAGED = r"embed_dim$|^num_heads$|hidden_size$|layers$|^dim$"
"""Sizes that others must fit: those of a list beside them."""


def _rule(name: str) -> Callable[[int], int] | None:
    return next((change for pattern, change in _SIZES if re.search(pattern, name)), None)


# Inputs.


def _called(task: str, model: nn.Module) -> dict[str, Any]:
    """Return arguments for one call: those that it must have, its main input, and what to learn."""
    parameters = inspect.signature(model.forward).parameters
    needed = [name for name, each in parameters.items() if _is_needed(each)]
    main = _main_input(model, parameters)
    both = ("input_ids", "pixel_values") if task == "BASE" else ()
    masks = ("attention_mask", "input_features_mask") if main == "input_features" else ()
    wanted = dict.fromkeys([main, *needed, *(name for name in (*both, *masks, *_LEARNED) if name in parameters)])
    given = {}
    for name in wanted:
        value = _value(name, task, model)
        if value is not None:
            given[name] = value
    if "return_loss" in parameters:
        given["return_loss"] = True
    return given


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return named and parameter.default is inspect.Parameter.empty


def _main_input(model: Any, parameters: Any) -> str:
    usual = (model.main_input_name, "input_ids", "pixel_values", "input_features", "input_values")
    return next((name for name in usual if name in parameters), model.main_input_name)


_LEARNED = (
    "labels",
    "mask_labels",
    "class_labels",
    "start_positions",
    "end_positions",
    "future_values",
    "decoder_input_ids",
)


def _value(name: str, task: str, model: Any) -> Any:
    """Return a random value of one argument, or None if none is known, or none is needed."""
    config = model.config
    shape = _image_shape(config)
    if name == "labels":
        return _labels(task, config, shape)
    if name == "decoder_input_ids":  # made of the labels, where there are any
        has_labels = "labels" in inspect.signature(model.forward).parameters
        return (
            None
            if has_labels
            or ("encoder" not in type(config).__name__.lower() and not getattr(config, "is_encoder_decoder", False))
            else _tokens()
        )
    if name in ("mask_labels", "class_labels"):
        if task not in ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"):
            return None
        made = {
            "mask_labels": lambda: torch.randint(2, (2, *shape[1:])).float(),
            "class_labels": lambda: torch.randperm(CLASSES)[:2],
        }
        return [made[name]() for _ in range(BATCH)]
    if name in ("start_positions", "end_positions"):
        return torch.randint(LENGTH, (BATCH,))
    if name in ("input_ids", "decoder_input_ids", "text_input_ids"):
        return _tokens()
    if (
        name in ("attention_mask", "input_features_mask")
        and "input_features" in inspect.signature(model.forward).parameters
    ):
        return torch.ones(_features(config).shape[:2], dtype=torch.long)
    if name in ("attention_mask", "pixel_mask"):
        return torch.ones((BATCH, LENGTH) if name == "attention_mask" else (BATCH, *shape[1:]), dtype=torch.long)
    if name == "bbox":
        corner = torch.randint(200, (BATCH, LENGTH, 2))
        return torch.cat([corner, corner + torch.randint(1, 200, (BATCH, LENGTH, 2))], -1)
    if name == "pixel_values":
        return (
            torch.randn(BATCH, *shape)
            if task != "VIDEO_CLASSIFICATION"
            else torch.randn(BATCH, _frames(config), *shape)
        )
    if name in ("pixel_values_videos", "pixel_values_video"):
        return torch.randn(BATCH, _frames(config), *shape)
    if name == "input_values":
        if "spectrogram" in type(config).__name__.lower() or (
            hasattr(config, "max_length") and hasattr(config, "num_mel_bins")
        ):
            return torch.randn(BATCH, config.max_length, config.num_mel_bins)
        return (
            torch.randn(BATCH, SAMPLES)
            if not hasattr(config, "audio_channels")
            else torch.randn(BATCH, config.audio_channels, SAMPLES)
        )
    if name in ("input_features", "input_audio_embeds"):
        return _features(config)
    if name in ("inputs_embeds", "hidden_states"):
        return torch.randn(BATCH, LENGTH, config.hidden_size)
    if name in (
        "past_values",
        "past_time_features",
        "past_observed_mask",
        "future_values",
        "future_time_features",
        "future_observed_mask",
    ):
        return _series(name, config)
    if name == "bool_masked_pos":
        patches = (shape[-1] // config.patch_size) ** 2
        return (torch.arange(patches) % 2).bool().expand(BATCH, patches)
    if name == "inputs":
        return _tokens()
    return None


def _tokens() -> torch.Tensor:
    return torch.randint(5, TOKENS - SPECIAL, (BATCH, LENGTH))


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", PIXELS)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return getattr(config, "num_channels", 3) or 3, height, width


def _frames(config: Any) -> int:
    return next((getattr(config, name) for name in ("num_frames", "frames_per_clip") if hasattr(config, name)), 4)


def _features(config: Any) -> torch.Tensor:
    """Return features of sounds: Whisper's have the time last, most others first."""
    part = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    if (
        hasattr(part, "num_mel_bins")
        and hasattr(part, "max_source_positions")
        and not hasattr(part, "input_feat_per_channel")
    ):
        return torch.randn(BATCH, part.num_mel_bins, 2 * part.max_source_positions)
    width = next(
        (
            getattr(part, n)
            for n in (
                "feature_projection_input_dim",
                "input_feat_per_channel",
                "num_mel_bins",
                "input_dim",
                "feature_size",
            )
            if hasattr(part, n)
        ),
        80,
    )
    return torch.randn(BATCH, 2 * LENGTH, width)


def _series(name: str, config: Any) -> torch.Tensor:
    past = getattr(config, "context_length", LENGTH) + max(getattr(config, "lags_sequence", None) or [0])
    future = getattr(config, "prediction_length", 8) or 8
    length = past if name.startswith("past") else future
    if "time_features" in name:
        return torch.randn(BATCH, length, config.num_time_features)
    width = getattr(config, "num_input_channels", getattr(config, "input_size", 1))
    shape = (BATCH, length) if hasattr(config, "lags_sequence") and width == 1 else (BATCH, length, width)
    return torch.ones(shape) if "mask" in name else torch.rand(shape) + 1


def _labels(task: str, config: Any, shape: tuple[int, int, int]) -> Any:
    count = getattr(config, "num_labels", CLASSES) or CLASSES
    if task in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
        return torch.randint(count, (BATCH,))
    if task == "TOKEN_CLASSIFICATION":
        return torch.randint(count, (BATCH, LENGTH))
    if task in ("SEMANTIC_SEGMENTATION",):
        return torch.randint(count, (BATCH, *shape[1:]))
    if task in ("OBJECT_DETECTION", "INSTANCE_SEGMENTATION"):
        return [
            {"class_labels": torch.randint(count, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(BATCH)
        ]
    if task == "CTC":
        return torch.randint(5, 30, (BATCH, 4))
    if task == "SPEECH_SEQ_2_SEQ":
        return torch.randint(5, TOKENS - SPECIAL, (BATCH, 16))
    if task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING"):
        return _tokens()
    return None
