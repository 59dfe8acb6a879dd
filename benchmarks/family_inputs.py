"""Arguments for a call of a model of ``transformers``, found by their names: random, and new in every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TOKENS, SPECIAL, CLASSES, PIXELS, SAMPLES = 4, 64, 320, 40, 5, 64, 4000
"""Sizes of the inputs; the last of the tokens are special ones."""

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
