"""The zoo's models from ``transformers``, built from configurations.

They are set up so that a step is one graph: no cache, no configuration that is filled in during
the first call, no warning on the way, experts that see what they were chosen for without a look at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.zoo.catalogue import Sizes

Made = tuple[Any, int]
"""A torch.nn.Module, and its number of token ids or classes."""


def model(
    sizes: Sizes, *, family: str, head: str, config: str = "Config", count: str = "num_hidden_layers", **options: Any
) -> Made:
    """Make a model of one family; ``options`` are of its configuration, which calls the number of layers ``count``."""
    hf = _transformers()
    options |= {count: sizes.layers} if count else {}
    return _made(getattr(hf, family + config)(**options), getattr(hf, family + head))


def language_model(sizes: Sizes, *, head: str = "ForCausalLM", **options: Any) -> Made:
    """Make a transformer that takes so many tokens."""
    return model(sizes, head=head, max_position_embeddings=sizes.positions, attn_implementation="sdpa", **options)


def _made(config: Any, kind: type[Any]) -> Made:
    """Make the model of a configuration, set up for a step in one graph; classes or tokens are what it tells apart."""
    config.use_cache = False
    # Otherwise the first call finds it out from the labels and writes it into the configuration.
    config.problem_type = "single_label_classification"
    with _without_values():
        model = kind(config)
    model.tie_weights()  # which is skipped with the values
    if kind.__name__.endswith("LMHeadModel"):  # the name of no loss: every call would warn, which a graph cannot do
        model.loss_type = "ForCausalLM"
    return model, config.num_labels if "Classification" in kind.__name__ else config.get_text_config().vocab_size


def configured(place: str, **changed: Any) -> tuple[Any, type[Any]]:
    """Read a configuration of this machine: from a folder or file, or from the Hub's cache. Return its model's class.

    That is the one that the configuration names, or what is trained with it usually; it takes labels.
    """
    hf = _transformers()
    try:
        config = hf.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False, **changed)
    except Exception as error:
        from planner.capture.failures import in_one_line

        absent = f"it is not on this machine, and nothing is downloaded: 'hf download {place} config.json' gets it"
        why = absent if isinstance(error, OSError) and not Path(place).exists() else in_one_line(error)
        raise UsageError(f"cannot read the configuration of {place!r}: {why}") from None
    kinds: list[Any] = [getattr(hf, name, None) for name in config.architectures or ()]
    kinds += [getattr(hf, f"MODEL_FOR_{task}_MAPPING").get(type(config), None) for task in _TASKS]
    kinds = [kind for kind in kinds if hasattr(kind, "forward") and "labels" in signature(kind.forward).parameters]
    if not kinds:
        raise UsageError(f"{place!r} is no model of transformers that computes a loss from labels: write a factory")
    return config, kinds[0]


_TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
"""What models of a configuration that names none are trained for, the first that there is."""


def of_configuration(place: str, *, sizes: Sizes) -> Made:
    """Make the model of a configuration."""
    changed = {"num_hidden_layers": sizes.layers, "image_size": sizes.image_size}
    return _made(*configured(place, **{name: value for name, value in changed.items() if value}))


def mixtral(sizes: Sizes, **options: Any) -> Made:
    """Make a Mixtral."""
    made, tokens = language_model(sizes, **options)
    # The first call would hang hooks for the router's logits under a lock, which a graph cannot do.
    import_module("transformers.utils.output_capturing").maybe_install_capturing_hooks(made.model)
    return made, tokens


def vit(sizes: Sizes, **options: Any) -> Made:
    """Make a ViT with patches of 16."""
    if sizes.image_size is None or sizes.image_size % 16:
        raise UsageError(f"vit-b16 cuts images into patches of 16: image size {sizes.image_size} is not a multiple")
    return model(sizes, image_size=sizes.image_size, **options)


def in_stages(sizes: Sizes, depths: Sequence[int], **options: Any) -> Made:
    """Make a model with so many blocks in each stage."""
    return model(sizes, count="", depths=[min(depth, sizes.layers) for depth in depths], **options)


def convnext(sizes: Sizes, depths: Sequence[int], drop_path: float, **options: Any) -> Made:
    """Make a ConvNeXt with so many blocks in each stage; each block is skipped at random."""
    import numpy as np

    if not sizes.image_size or sizes.image_size < 32:
        raise UsageError(f"ConvNeXt makes images 32 times smaller: image size {sizes.image_size} is too small")
    # The constructor asks a tensor for the rates, which a fake one cannot tell: they are set below.
    rates = SimpleNamespace(split=lambda counts: map(np.zeros, counts))
    with patch("torch.linspace", lambda *_, **__: rates):
        made, classes = in_stages(sizes, depths, **options)
    skip = import_module("transformers.models.convnext.modeling_convnext").ConvNextDropPath
    layers = [layer for stage in made.convnext.encoder.stages for layer in stage.layers]
    for index, layer in enumerate(layers):
        layer.drop_path = skip(drop_path * index / max(1, len(layers) - 1))
    return made, classes


def whisper_encoder(sizes: Sizes, **options: Any) -> Made:
    """Make the encoder of Whisper with a head that tells languages apart."""
    if sizes.seq_len is None or sizes.seq_len % 2:
        raise UsageError(f"whisper-small-encoder halves its input: {sizes.seq_len} mel frames are not even")
    return model(sizes, max_source_positions=sizes.seq_len // 2, **options)


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
