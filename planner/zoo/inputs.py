"""What a step of a model of the zoo is called with, for the sizes that were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.zoo.catalogue import Sizes


def token_inputs(sizes: Sizes, tokens: int) -> dict[str, Tensor]:
    """Return token ids and the ids to predict."""
    shape = (sizes.batch_size, sizes.seq_len or 1)
    return {"input_ids": torch.randint(tokens, shape), "labels": torch.randint(tokens, shape)}


def image_inputs(sizes: Sizes, classes: int) -> dict[str, Tensor]:
    """Return images and a class for each."""
    return {"pixel_values": torch.randn(_image_shape(sizes)), "labels": torch.randint(classes, (sizes.batch_size,))}


def pixel_inputs(sizes: Sizes, classes: int) -> dict[str, Tensor]:
    """Return images and a class for each pixel."""
    batch, _, *extent = _image_shape(sizes)
    return {"pixel_values": torch.randn(_image_shape(sizes)), "labels": torch.randint(classes, (batch, *extent))}


def noise_inputs(sizes: Sizes, steps: int, channels: int = 3) -> dict[str, Tensor]:
    """Return noisy images, how noisy they are, and the noise."""
    shape = _image_shape(sizes, channels)
    return {
        "pixel_values": torch.randn(shape),
        "timesteps": torch.randint(steps, shape[:1]),
        "labels": torch.randn(shape),
    }


def text_and_noise_inputs(sizes: Sizes, steps: int) -> dict[str, Tensor]:
    """Return noisy latent images, how noisy they are, the noise, and a text of 77 tokens to go by."""
    text = torch.randn(sizes.batch_size, 77, 768)
    return noise_inputs(sizes, steps, channels=4) | {"context": text}


def sound_inputs(sizes: Sizes, classes: int) -> dict[str, Tensor]:
    """Return mel spectrograms and a class for each."""
    shape = (sizes.batch_size, 80, sizes.seq_len or 2)
    return {"input_features": torch.randn(shape), "labels": torch.randint(classes, shape[:1])}


def _image_shape(sizes: Sizes, channels: int = 3) -> tuple[int, ...]:
    extent = sizes.image_size or 1
    return sizes.batch_size, channels, extent, extent
