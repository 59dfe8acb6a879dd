"""Every model type that ``transformers`` has, at a size that trains in a moment, with random weights and inputs.

Nothing is listed by hand that the library says: model types and classes are those of its own mappings, a configuration
is its default with the sizes of :data:`_SIZES` made small, and a call has the arguments that ``forward`` names. What
needs more is an entry of :data:`_OWN`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TOKENS, SPECIAL, CLASSES, PIXELS, SAMPLES = 4, 64, 320, 40, 5, 64, 4000
"""Sizes of the inputs; the last of the tokens are special ones."""

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


# Arguments for a call, found by their names: random, and new in every call.

_MAIN = ("input_ids", "pixel_values", "input_features", "input_values")
_LEARNED = (
    "labels", "mask_labels", "class_labels", "start_positions", "end_positions", "decoder_input_ids", "future_values",
    "past_time_features", "past_observed_mask", "future_time_features",
)  # fmt: skip
"""What a call is given if it has arguments of these names, to learn from."""

_BATCHES = ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
_TEXTS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")


def arguments(task: str, model: nn.Module) -> dict[str, Any]:
    """Return arguments for one call: those that it must have, its main input, and what to learn."""
    call = _Call(task, model.config, inspect.signature(model.forward).parameters)
    main = next((name for name in (model.main_input_name, *_MAIN) if name in call.parameters), model.main_input_name)
    both = ("input_ids", "pixel_values") if task == "BASE" else ()
    masks = ("attention_mask", "input_features_mask") if main == "input_features" else ()
    also = [name for name in (*both, *masks, *_LEARNED) if name in call.parameters]
    needed = [name for name, each in call.parameters.items() if _is_needed(each)]
    found = {name: _VALUES[name](call) for name in dict.fromkeys([main, *needed, *also]) if name in _VALUES}
    given = {name: value for name, value in found.items() if value is not None}
    return {**given, "return_loss": True} if "return_loss" in call.parameters else given


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return named and parameter.default is inspect.Parameter.empty


@dataclass(frozen=True)
class _Call:
    task: str
    config: Any
    parameters: Mapping[str, inspect.Parameter]

    def first(self, *names: str, default: Any, of: Any = None) -> Any:
        """Return the first of these fields that a configuration has."""
        config = self.config if of is None else of
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)

    def image(self) -> tuple[int, int, int]:
        """Return the channels, height and width of a picture."""
        size = self.first("image_size", default=None)
        if size is None:
            size = self.first("image_size", default=PIXELS, of=self.first("vision_config", default=self.config))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        return self.first("num_channels", default=3), height, width


def _tokens(call: _Call) -> Tensor:
    return torch.randint(5, TOKENS - SPECIAL, (BATCH, LENGTH))


def _decoder_tokens(call: _Call) -> Tensor | None:
    """Return nothing where they are made of the labels."""
    decodes = getattr(call.config, "is_encoder_decoder", False)
    return _tokens(call) if decodes and "labels" not in call.parameters else None


def _positions(call: _Call) -> Tensor:
    return torch.randint(LENGTH, (BATCH,))


def _boxes(call: _Call) -> Tensor:
    corner = torch.randint(200, (BATCH, LENGTH, 2))
    return torch.cat([corner, corner + torch.randint(1, 200, (BATCH, LENGTH, 2))], -1)


def _mask(call: _Call) -> Tensor:
    length = _features(call).shape[1] if "input_features" in call.parameters else LENGTH
    return torch.ones(BATCH, length, dtype=torch.long)


def _pixel_mask(call: _Call) -> Tensor:
    return torch.ones(BATCH, *call.image()[1:], dtype=torch.long)


def _pictures(call: _Call) -> Tensor:
    return _videos(call) if call.task == "VIDEO_CLASSIFICATION" else torch.randn(BATCH, *call.image())


def _videos(call: _Call) -> Tensor:
    return torch.randn(BATCH, call.first("num_frames", "frames_per_clip", default=4), *call.image())


def _masked(call: _Call) -> Tensor:
    patches = (call.image()[-1] // call.config.patch_size) ** 2
    return (torch.arange(patches) % 2).bool().expand(BATCH, patches)


def _sounds(call: _Call) -> Tensor:
    if hasattr(call.config, "max_length") and hasattr(call.config, "num_mel_bins"):
        return torch.randn(BATCH, call.config.max_length, call.config.num_mel_bins)
    channels = call.first("audio_channels", default=0)
    return torch.randn(*((BATCH, channels) if channels else (BATCH,)), SAMPLES)


def _features(call: _Call) -> Tensor:
    """Return features of sounds: Whisper's have the time last, most others first."""
    part = call.first("audio_config", "encoder_config", default=call.config)
    if hasattr(part, "num_mel_bins") and hasattr(part, "max_source_positions") and not hasattr(part, "conv_channels"):
        return torch.randn(BATCH, part.num_mel_bins, 2 * part.max_source_positions)
    names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim", "feature_size")
    return torch.randn(BATCH, 2 * LENGTH, call.first(*names, default=80, of=part))


def _embeddings(call: _Call) -> Tensor:
    return torch.randn(BATCH, LENGTH, call.config.hidden_size)


def _series(name: str) -> Callable[[_Call], Tensor]:
    def made(call: _Call) -> Tensor:
        past = call.first("context_length", default=LENGTH) + max(call.first("lags_sequence", default=[0]))
        length = past if name.startswith("past") else call.first("prediction_length", default=8)
        if "time_features" in name:
            return torch.randn(BATCH, length, call.config.num_time_features)
        width = call.first("num_input_channels", "input_size", default=1)
        shape = (BATCH, length) if hasattr(call.config, "lags_sequence") and width == 1 else (BATCH, length, width)
        return torch.ones(shape) if "mask" in name else torch.rand(shape) + 1

    return made


def _mask_labels(call: _Call) -> list[Tensor] | None:
    wanted = call.task in ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION")
    return [torch.randint(2, (2, *call.image()[1:])).float() for _ in range(BATCH)] if wanted else None


def _class_labels(call: _Call) -> list[Tensor] | None:
    wanted = call.task in ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION")
    return [torch.randperm(CLASSES)[:2] for _ in range(BATCH)] if wanted else None


def _labels(call: _Call) -> Any:
    count = call.first("num_labels", default=CLASSES)
    if call.task in _BATCHES:
        return torch.randint(count, (BATCH,))
    if call.task in _TEXTS:
        return _tokens(call)
    if call.task == "TOKEN_CLASSIFICATION":
        return torch.randint(count, (BATCH, LENGTH))
    if call.task == "SEMANTIC_SEGMENTATION":
        return torch.randint(count, (BATCH, *call.image()[1:]))
    if call.task in ("OBJECT_DETECTION", "INSTANCE_SEGMENTATION"):
        return [
            {"class_labels": torch.randint(count, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(BATCH)
        ]
    lengths = {"CTC": 4, "SPEECH_SEQ_2_SEQ": 16}
    return torch.randint(5, 16, (BATCH, lengths[call.task])) if call.task in lengths else None


_VALUES: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(("input_ids", "inputs", "text_input_ids"), _tokens),
    "decoder_input_ids": _decoder_tokens,
    **dict.fromkeys(("start_positions", "end_positions"), _positions),
    "bbox": _boxes,
    **dict.fromkeys(("attention_mask", "input_features_mask"), _mask),
    "pixel_mask": _pixel_mask,
    "pixel_values": _pictures,
    **dict.fromkeys(("pixel_values_videos", "pixel_values_video"), _videos),
    "bool_masked_pos": _masked,
    "input_values": _sounds,
    **dict.fromkeys(("input_features", "input_audio_embeds"), _features),
    **dict.fromkeys(("inputs_embeds", "hidden_states"), _embeddings),
    **{
        f"{when}_{what}": _series(f"{when}_{what}")
        for when in ("past", "future")
        for what in ("values", "time_features", "observed_mask")
    },
    "labels": _labels,
    "mask_labels": _mask_labels,
    "class_labels": _class_labels,
}
"""What makes an argument; one that is None is left out."""
