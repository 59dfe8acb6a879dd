"""A U-Net that takes noise out of images, which returns its mean loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.zoo import ZooModel


def diffusion_unet(batch_size: int = 32, layers: int = 2, image_size: int = 32) -> ZooModel:
    """Return the network of denoising diffusion in training mode, and what one step calls it with."""
    images = (batch_size, 3, image_size, image_size)
    inputs = {"pixel_values": torch.randn(images), "labels": torch.randn(images)}
    inputs["timesteps"] = torch.randint(1000, (batch_size,))
    return ZooModel(name="diffusion-unet", model=DiffusionUNet(layers).train(), example_kwargs=inputs)


class PixelAttention(nn.Module):
    """Attention of every pixel to every other, one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.projection = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.flatten(2).transpose(1, 2).unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, dim=1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.projection(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class DiffusionUNet(nn.Module):
    """The network of denoising diffusion of Ho, Jain and Abbeel (2020): residual blocks, time steps, attention.

    Each level has ``blocks`` residual blocks going down, one more going up, ``multiples`` of ``width`` channels, and an
    image half the size of the one before; the second level and the lowest have attention.
    """

    def __init__(self, blocks: int = 2, width: int = 128, multiples: tuple[int, ...] = (1, 2, 2, 2)) -> None:
        super().__init__()
        self.width = width
        embedding = 4 * width

        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        stack, last = [width], width
        for level, multiple in enumerate(multiples):
            for _ in range(blocks):
                self.down.append(DiffusionBlock(last, width * multiple, embedding, attends=level == 1))
                last = width * multiple
                stack.append(last)
            if level < len(multiples) - 1:
                self.down.append(Resize(last, "down"))
                stack.append(last)
        self.middle = nn.ModuleList(DiffusionBlock(last, last, embedding, attends=attends) for attends in (True, False))
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(blocks + 1):
                self.up.append(DiffusionBlock(last + stack.pop(), width * multiple, embedding, attends=level == 1))
                last = width * multiple
            if level:
                self.up.append(Resize(last, "up"))
        self.norm = nn.GroupNorm(32, last)
        self.head = nn.Conv2d(last, 3, 3, padding=1)
        # The original starts these at zero, so that a block begins as its shortcut; then most gradients would be zero.
        for final in (*(m.second for m in self.modules() if isinstance(m, DiffusionBlock)), self.head):
            nn.init.normal_(final.weight, std=1e-3)

    def forward(self, pixel_values: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=timesteps.device) / half)
        angles = timesteps[:, None] * frequencies
        waves = torch.cat((angles.sin(), angles.cos()), dim=1)
        embedding = self.time(waves.to(pixel_values.dtype))
        x = self.stem(pixel_values)
        skips = [x]
        for block in self.down:
            x = block(x, embedding)
            skips.append(x)
        for block in self.middle:
            x = block(x, embedding)
        for block in self.up:
            x = block(x if isinstance(block, Resize) else torch.cat((x, skips.pop()), dim=1), embedding)
        return F.mse_loss(self.head(F.silu(self.norm(x))), labels)


class DiffusionBlock(nn.Module):
    """Two normalised convolutions around what the time step adds, then attention on some levels."""

    def __init__(self, incoming: int, outgoing: int, embedding: int, *, attends: bool) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(32, incoming)
        self.first = nn.Conv2d(incoming, outgoing, 3, padding=1)
        self.time = nn.Linear(embedding, outgoing)
        self.second_norm = nn.GroupNorm(32, outgoing)
        self.dropout = nn.Dropout(0.1)
        self.second = nn.Conv2d(outgoing, outgoing, 3, padding=1)
        self.shortcut = nn.Conv2d(incoming, outgoing, 1) if incoming != outgoing else nn.Identity()
        self.attention = PixelAttention(outgoing) if attends else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.first(F.silu(self.first_norm(x))) + self.time(F.silu(embedding))[:, :, None, None]
        h = self.second(self.dropout(F.silu(self.second_norm(h))))
        return self.attention(self.shortcut(x) + h)


class Resize(nn.Module):
    """Halve or double the image."""

    def __init__(self, width: int, direction: str) -> None:
        super().__init__()
        self.doubles = direction == "up"
        self.convolution = nn.Conv2d(width, width, 3, stride=1 if self.doubles else 2, padding=1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest") if self.doubles else x
        return self.convolution(x)
