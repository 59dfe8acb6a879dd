"""Networks that take noise out of images, which return their mean loss: a U-Net and a transformer."""

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


def _waves(timesteps: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=timesteps.device) / (width // 2))
    angles = timesteps[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


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
        embedding = self.time(_waves(timesteps, self.width).to(pixel_values.dtype))
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


def diffusion_transformer(
    batch_size: int = 8, layers: int = 28, image_size: int = 32
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return DiT-XL/2 for a latent image of such a side, and what one step calls it with, as a factory of the zoo's."""
    latents = (batch_size, 4, image_size, image_size)
    inputs = {"latents": torch.randn(latents), "labels": torch.randn(latents)}
    inputs |= {name: torch.randint(1000, (batch_size,)) for name in ("timesteps", "classes")}
    return DiffusionTransformer(layers, side=image_size).train(), inputs


class DiffusionTransformer(nn.Module):
    """The diffusion transformer of Peebles and Xie (2022), in bfloat16 by autocast; predicts the noise alone."""

    def __init__(self, layers: int, width: int = 1152, heads: int = 16, patch: int = 2, side: int = 32) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.modulation, self.head = nn.Linear(width, 2 * width), nn.Linear(width, 4 * patch**2)

    def forward(self, latents: Tensor, timesteps: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(latents.device.type, torch.bfloat16):
            x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
            condition = F.silu(self.time(_waves(timesteps, 256)) + self.classes(classes))
            for block in self.blocks:
                x = block(x, condition)
            noise = self.head(_modulated(x, *self.modulation(condition)[:, None].chunk(2, -1)))
            return F.mse_loss(noise, F.pixel_unshuffle(labels, self.patch).flatten(2).transpose(1, 2))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each shifted, scaled and gated by what time step and class say."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, *others, last_gate = self.modulation(condition)[:, None].chunk(6, -1)
        parts = self.qkv(_modulated(x, shift, scale)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.projection(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + last_gate * self.down(F.gelu(self.up(_modulated(x, *others)), approximate="tanh"))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
