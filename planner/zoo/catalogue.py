"""Which models the zoo has: their sizes, how each is made of sizes, and what it is called with."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def _entry(*, make: str, sizes: dict[str, Any], options: dict[str, Any] | None = None, **told: str) -> Entry:
    makers = {"minigpt": _minigpt, "unet": _unet, **vars(hf)}
    return Entry(sizes=Sizes(**sizes), make=partial(makers[make], **(options or {})), **told)


ZOO = {
    name: _entry(**told)
    for name, told in tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8")).items()
}
