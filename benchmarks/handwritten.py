"""Models as people write them, with no library: what each trains on, and how its loss is made.

Each entry of :data:`HANDWRITTEN` gives a module and what makes new inputs of the same sizes for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Made = tuple[nn.Module, Callable[[], tuple[Any, ...]]]
BATCH, WIDTH, TOKENS = 32, 64, 200


def _perceptron(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _rows(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(BATCH, *shape),)


def _images(size: int = 16, count: int = BATCH) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(count, 3, size, size), torch.randint(10, (count,)))


def _texts(length: int = 24) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(TOKENS, (BATCH, length)), torch.randint(TOKENS, (BATCH, length)))


# Recurrent.


class Recurrent(nn.Module):
    """A language model on one of torch's recurrent stacks."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.stack = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), TOKENS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.stack(self.tokens(tokens))[0])
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Packed(Recurrent):
    """The same of texts of several lengths, packed."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        lengths = torch.arange(tokens.shape[1], 0, -1).repeat(2)[: len(tokens)].sort(descending=True).values
        packed = pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.stack(packed)[0], batch_first=True)
        return functional.cross_entropy(self.head(states).flatten(0, 1), targets[:, : states.shape[1]].flatten())


class Cells(nn.Module):
    """A recurrent cell in a Python loop."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, steps: Tensor) -> Tensor:
        state: Any = None
        total = steps.new_zeros(())
        for step in steps.unbind(1):
            state = self.cell(step, state)
            hidden = state[0] if isinstance(state, tuple) else state
            total = total + self.head(hidden).pow(2).mean()
        return total


class Seq2Seq(nn.Module):
    """An encoder, and a decoder that attends to it and is fed its own words at random."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, last = self.encoder(self.tokens(tokens))
        hidden, word, losses = last[0], targets[:, 0], []
        for position in range(1, 8):
            weights = torch.softmax((states @ hidden[:, :, None])[..., 0], -1)
            context = (weights[:, None] @ states)[:, 0]
            hidden = self.cell(torch.cat([self.tokens(word), context], -1), hidden)
            logits = self.head(hidden)
            losses.append(functional.cross_entropy(logits, targets[:, position]))
            word = targets[:, position] if random.random() < 0.5 else logits.argmax(-1)
        return torch.stack(losses).mean()


# Pictures.


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with batch norm, as of MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
        for _ in range(4):
            parts += [
                nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU6(inplace=True),
            ]
            parts += [nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish(inplace=True)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


class Residual(nn.Module):
    """A residual network; with ``drop``, whole blocks are left out at random, of each picture on its own."""

    def __init__(self, drop: float = 0.0, blocks: int = 5) -> None:
        super().__init__()
        self.drop = drop
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            change = block(x)
            if self.drop:
                kept = torch.rand(len(x), 1, 1, 1) >= self.drop
                change = change * kept / (1 - self.drop)
            x = torch.relu(x + change)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Dense(nn.Module):
    """Every layer sees all before it, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 12 * number, 12, 3, padding=1) for number in range(6))
        self.head = nn.Linear(3 + 12 * 6, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        seen = [images]
        for layer in self.layers:
            seen.append(torch.relu(layer(torch.cat(seen, 1))))
        return functional.cross_entropy(self.head(torch.cat(seen, 1).mean((2, 3))), labels)


class UNet(nn.Module):
    """Pooling that keeps its indices on the way down, and skips on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(32, 16, 2, stride=2)])
        self.middle, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(16, 5, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first = functional.silu(self.down[0](images))
        second = functional.silu(self.down[1](functional.max_pool2d(first, 2)))
        x = functional.silu(self.middle(functional.max_pool2d(second, 2)))
        x = torch.cat([self.up[0](x), functional.interpolate(first, scale_factor=0.5, mode="bilinear")], 1)
        logits = self.head(self.up[1](x) + first)
        return functional.cross_entropy(logits, (labels[:, None, None] % 5).expand(-1, *logits.shape[2:]))


class Detector(nn.Module):
    """A loss of detection: anchors are matched with boxes, and only those that match count for the boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.classes, self.boxes = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 4, 1)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        features = self.body(images)
        logits = self.classes(features).flatten(2).transpose(1, 2)
        found = self.boxes(features).flatten(2).transpose(1, 2).sigmoid()
        with torch.no_grad():
            distances = torch.cdist(found, boxes)
            nearest = distances.min(-1)
            positive = nearest.values < nearest.values.median()
        wanted = torch.gather(boxes, 1, nearest.indices[..., None].expand(-1, -1, 4))
        chosen = torch.where(positive, torch.gather(labels, 1, nearest.indices), 0)
        loss_boxes = functional.smooth_l1_loss(found[positive], wanted[positive])  # as many rows as there are matches
        loss_classes = functional.cross_entropy(logits.flatten(0, 1), chosen.flatten())
        return {"boxes": loss_boxes, "classes": loss_classes}


def _boxes() -> tuple[Any, ...]:
    return torch.randn(8, 3, 32, 32), torch.rand(8, 5, 4), torch.randint(4, (8, 5))


# Attention and experts.


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        mixed: Tensor = x + self.mix(self.norms[1](x))
        return mixed


class LayerDrop(nn.Module):
    """A transformer that leaves out layers at random, by Python's random numbers, numpy's or torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.tokens, self.layers = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            if self.draw() >= 0.3:
                x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Transformer(nn.Module):
    """torch's own transformer, with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1] - 1)
        states = self.body(self.tokens(tokens), self.tokens(targets[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return functional.cross_entropy(self.head(states).flatten(0, 1), targets[:, 1:].flatten())


class Experts(nn.Module):
    """A mixture of experts, each called on the rows that it was given, and a loss that keeps them busy alike."""

    def __init__(self, layers: int = 3, experts: int = 4) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(_perceptron(WIDTH, 2 * WIDTH, WIDTH) for _ in range(experts)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        auxiliary = x.new_zeros(())
        for router, experts in zip(self.routers, self.experts, strict=True):
            shares = router(x).softmax(-1)
            weights, chosen = shares.topk(2, -1)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(experts):  # type: ignore[var-annotated]
                rows, place = (chosen == number).nonzero(as_tuple=True)
                mixed.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
            busy = functional.one_hot(chosen, len(experts)).float().mean((0, 1))
            auxiliary = auxiliary + (busy * shares.mean(0)).sum()
            x = x + mixed
        return x.pow(2).mean() + 0.01 * auxiliary, {"auxiliary": float(auxiliary.detach())}


class DenseExperts(nn.Module):
    """Experts that all see everything, with weights that are zero for most."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.first, self.second = (
            nn.Parameter(torch.randn(4, WIDTH, 128) / 8),
            nn.Parameter(torch.randn(4, 128, WIDTH) / 11),
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(2, -1)
        gates = torch.zeros(len(x), 4).scatter(1, chosen, weights.softmax(-1))
        hidden = functional.gelu(torch.einsum("bd,edh->beh", x, self.first))
        return torch.einsum("beh,ehd,be->bd", hidden, self.second, gates).pow(2).mean()


# Graphs and sets.


class GraphNetwork(nn.Module):
    """Messages along edges, added up at their ends by ``index_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(_perceptron(2 * WIDTH, WIDTH, WIDTH) for _ in range(3))
        self.updates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1))
            nodes = update(torch.zeros_like(nodes).index_add(0, edges[1], sent), nodes)
        return functional.mse_loss(nodes.sum(1), targets)


def _graph() -> tuple[Any, ...]:
    return torch.randn(50, WIDTH), torch.randint(50, (2, 400)), torch.randn(50)


class GraphAttention(nn.Module):
    """Attention over the edges of each node: a softmax by ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
        for _ in range(3):
            values = self.values(nodes)
            scores = functional.leaky_relu(self.scores(torch.cat([values[edges[0]], values[edges[1]]], -1)))[:, 0]
            largest = torch.zeros(len(nodes)).scatter_reduce(0, edges[1], scores.detach(), "amax")
            weights = torch.exp(scores - largest[edges[1]])
            totals = torch.zeros(len(nodes)).scatter_add(0, edges[1], weights) + 1e-9
            nodes = torch.zeros_like(nodes).index_add(
                0, edges[1], values[edges[0]] * (weights / totals[edges[1]])[:, None]
            )
            nodes = torch.tanh(nodes)
        return functional.mse_loss(nodes.sum(1), targets)


class SparseAdjacency(nn.Module):
    """A graph as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(nodes), len(nodes))).coalesce()
        for layer in self.layers:
            nodes = torch.tanh(torch.sparse.mm(matrix, layer(nodes)))
        return functional.mse_loss(nodes.sum(1), targets)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, 128, 1))
        self.head = _perceptron(128, 64, 10)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return functional.nll_loss(functional.log_softmax(self.head(self.points(points).amax(-1)), -1), labels)


# Losses that are more than one call.


class PPO(nn.Module):
    """The clipped loss of PPO, with a value and an entropy, of a policy and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = _perceptron(WIDTH, 128, 128, 6), _perceptron(WIDTH, 128, 128, 1)

    def forward(self, states: Tensor, actions: Tensor, before: Tensor, returns: Tensor) -> Tensor:
        decided = torch.distributions.Categorical(logits=self.policy(states))
        values = self.critic(states)[:, 0]
        advantages = (returns - values).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = torch.exp(decided.log_prob(actions) - before)
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return -gain + 0.5 * functional.mse_loss(values, returns) - 0.01 * decided.entropy().mean()


def _played() -> tuple[Any, ...]:
    return torch.randn(256, WIDTH), torch.randint(6, (256,)), -torch.rand(256), torch.randn(256)


class QLearning(nn.Module):
    """A loss against a copy of the network that learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.target = (
            _perceptron(WIDTH, 128, 128, 6),
            _perceptron(WIDTH, 128, 128, 6).requires_grad_(False),
        )

    def forward(self, states: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            best = rewards + 0.99 * self.target(following).amax(-1)
        return functional.huber_loss(self.network(states).gather(1, actions[:, None])[:, 0], best)


def _remembered() -> tuple[Any, ...]:
    return torch.randn(256, WIDTH), torch.randint(6, (256,)), torch.randn(256), torch.randn(256, WIDTH)


class Reparameterized(nn.Module):
    """An actor of SAC: actions are drawn, squashed, and judged by a critic that does not learn here."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _perceptron(WIDTH, 128, 12), _perceptron(WIDTH + 6, 128, 1).requires_grad_(False)

    def forward(self, states: Tensor) -> Tensor:
        mean, deviation = self.actor(states).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, deviation.clamp(-5, 2).exp())
        raw = drawn.rsample()
        action = torch.tanh(raw)
        chance = (drawn.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(-1)
        return (0.2 * chance - self.critic(torch.cat([states, action], -1))[:, 0]).mean()


class GANStep(nn.Module):
    """A generator's loss through a discriminator, which is not to learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.utils.spectral_norm(nn.Conv2d(3, 32, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 64, 1)
        ).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return functional.softplus(-self.discriminator(self.generator(noise))).mean()


class GradientPenalty(nn.Module):
    """A critic's loss with a penalty on its gradient, as of WGAN-GP: a derivative within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = _perceptron(WIDTH, 128, 128, 1)

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return (self.critic(fake) - self.critic(real)).mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()


class Physics(nn.Module):
    """A residual of the heat equation, with second derivatives by automatic differentiation."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(2, WIDTH, WIDTH, WIDTH, 1)

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        value = self.network(points)
        (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return (first[:, 1] - 0.1 * second[:, 0]).pow(2).mean() + value[:10].pow(2).mean()


class FunctionalPhysics(nn.Module):
    """The same by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(2, WIDTH, WIDTH, 1)

    def forward(self, points: Tensor) -> Tensor:
        def value(point: Tensor) -> Tensor:
            found: Tensor = self.network(point)[0]
            return found

        slope = torch.func.vmap(torch.func.grad(value))(points)
        return (slope[:, 1] - slope[:, 0]).pow(2).mean()


class InnerStep(nn.Module):
    """A loss after one step of an inner optimization, as of MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 64, 1)

    def forward(self, known: Tensor, new: Tensor) -> Tensor:
        weights = dict(self.network.named_parameters())
        inner = torch.func.functional_call(self.network, weights, (known,)).pow(2).mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        after = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        return torch.func.functional_call(self.network, after, (new,)).sub(1).pow(2).mean()


class Siamese(nn.Module):
    """One network on two inputs, and a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 256, 256, 32)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (functional.normalize(self.network(each), dim=-1) for each in (first, second))
        logits = a @ b.T / 0.1
        return functional.cross_entropy(logits, torch.arange(len(a)))


class Triplet(Siamese):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.network(first), self.network(second)
        return functional.triplet_margin_loss(a, b, b.roll(1, 0))


class Distilled(nn.Module):
    """A student against a teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = _perceptron(WIDTH, 128, 10), _perceptron(WIDTH, 256, 256, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        return functional.kl_div(self.student(x).log_softmax(-1), wanted, reduction="batchmean")


class Momentum(nn.Module):
    """A network against a moving average of itself, which the forward moves, as of BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = _perceptron(WIDTH, 128, 32), _perceptron(WIDTH, 128, 32).requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            for own, moving in zip(self.online.parameters(), self.average.parameters(), strict=True):
                moving.lerp_(own, 0.01)
            wanted = functional.normalize(self.average(second), dim=-1)
        return 2 - 2 * (functional.normalize(self.online(first), dim=-1) * wanted).sum(-1).mean()


class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(20, WIDTH, 5, 2, 2), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.ReLU()
        )
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, sounds: Tensor, targets: Tensor) -> Tensor:
        chances = self.head(self.body(sounds).transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        lengths = (torch.full((len(sounds),), len(chances)), torch.full((len(sounds),), targets.shape[1]))
        return functional.ctc_loss(chances, targets, *lengths)


# Densities and sampling.


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _perceptron(WIDTH, 256, 32), _perceptron(16, 256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return functional.mse_loss(self.decoder(latent), x) + 1e-3 * divergence


class VectorQuantized(nn.Module):
    """A code book with gradients straight through, and usage that is counted in a buffer."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _perceptron(WIDTH, 128, 16), _perceptron(16, 128, WIDTH)
        self.codes = nn.Embedding(40, 16)
        self.register_buffer("usage", torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        latent = self.encoder(x)
        chosen = torch.cdist(latent, self.codes.weight).argmin(-1)
        self.usage.mul_(0.9).add_(torch.bincount(chosen, minlength=40) * 0.1)
        code = self.codes(chosen)
        commitment = functional.mse_loss(latent, code.detach()) + functional.mse_loss(code, latent.detach())
        return functional.mse_loss(self.decoder(latent + (code - latent).detach()), x) + commitment


class Flow(nn.Module):
    """A normalizing flow of affine couplings and a learned rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(_perceptron(WIDTH // 2, 128, WIDTH) for _ in range(4))
        self.rotations = nn.ParameterList(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for coupling, rotation in zip(self.couplings, self.rotations, strict=True):
            x = x @ rotation
            fixed, moved = x.chunk(2, -1)
            scale, shift = coupling(fixed).chunk(2, -1)
            x = torch.cat([fixed, moved * torch.tanh(scale).exp() + shift], -1)
            volume = volume + torch.tanh(scale).sum(-1) + torch.linalg.slogdet(rotation).logabsdet
        return (0.5 * x.pow(2).sum(-1) - volume).mean()


class Diffusion(nn.Module):
    """Noise of a random strength, and a network that is to find it."""

    levels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.linspace(0.99, 0.01, 50))
        self.times, self.network = nn.Embedding(50, WIDTH), _perceptron(2 * WIDTH, 256, 256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(50, (len(x),))
        level, noise = self.levels[time, None], torch.randn_like(x)
        seen = level.sqrt() * x + (1 - level).sqrt() * noise
        return functional.mse_loss(self.network(torch.cat([seen, self.times(time)], -1)), noise)


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 128, 5 * 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, mean, deviation = self.network(x).chunk(3, -1)
        parts = torch.distributions.Normal(mean, functional.softplus(deviation) + 1e-3)
        mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=weight), parts)
        return -mixture.log_prob(x[:, 0]).mean()


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _perceptron(WIDTH, 128, 20), _perceptron(20, 128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.decoder(functional.gumbel_softmax(self.encoder(x), hard=True)), x)


class NumpyNoise(nn.Module):
    """Noise that numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 128, 128, 1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(numpy.random.normal(0, 0.1, x.shape).astype("float32"))
        return self.network(x + noise).pow(2).mean()


class PythonMixup(nn.Module):
    """A share that Python draws, new in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 128, 128, 1)

    def forward(self, x: Tensor) -> Tensor:
        share = random.betavariate(0.4, 0.4)
        return self.network(share * x + (1 - share) * x.flip(0)).pow(2).mean()


# Numbers and transforms.


class Fourier(nn.Module):
    """A Fourier neural operator: weights of complex numbers on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16, 8, dtype=torch.cfloat) / 16 for _ in range(3))
        self.lift, self.mix, self.head = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 16, 1), nn.Conv1d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[:, None])
        for weight in self.weights:
            spectrum = torch.fft.rfft(x)
            kept = torch.einsum("bif,iof->bof", spectrum[..., :8], weight)
            x = functional.gelu(
                torch.fft.irfft(functional.pad(kept, (0, spectrum.shape[-1] - 8)), x.shape[-1]) + self.mix(x)
            )
        return self.head(x).pow(2).mean()


class Complex(nn.Module):
    """Linear layers of complex numbers, and a rotation of pairs, as rotary positions are often written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.roll(1, -1))
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        angle = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 10)
        turned = torch.view_as_real(torch.view_as_complex(z.real.reshape(*x.shape[:-1], -1, 2).contiguous()) * angle)
        return turned.pow(2).mean() + z.abs().mean()


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(33, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv1d(WIDTH, 10, 3, padding=1))

    def forward(self, sounds: Tensor, labels: Tensor) -> Tensor:
        spectrum = torch.stft(sounds, 64, 32, window=torch.hann_window(64), return_complex=True).abs()
        return functional.cross_entropy(self.net(torch.log1p(spectrum)).mean(-1), labels)


class Solver(nn.Module):
    """Linear algebra: a Cholesky factor, a triangular solve, a determinant, as of a Gaussian process."""

    def __init__(self) -> None:
        super().__init__()
        self.features = _perceptron(WIDTH, 64, 8)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        points = self.features(x)
        kernel = torch.exp(-torch.cdist(points, points).pow(2) * self.scale.exp()) + 0.1 * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        solved = torch.linalg.solve_triangular(factor, x[:, :1], upper=False)
        return 0.5 * solved.pow(2).sum() + factor.diagonal().log().sum()


class StateSpace(nn.Module):
    """A linear recurrence in a loop over time, and its states written into one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.decay = nn.Parameter(torch.zeros(32))

    def forward(self, steps: Tensor) -> Tensor:
        driven, decay = self.inward(steps), torch.sigmoid(self.decay)
        states, state = torch.empty_like(driven), driven.new_zeros(len(steps), 32)
        for position in range(steps.shape[1]):
            state = decay * state + driven[:, position]
            states[:, position] = state
        return functional.mse_loss(self.outward(states)[:, :-1], steps[:, 1:])


class NeuralODE(nn.Module):
    """Steps of Runge and Kutta through one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = _perceptron(WIDTH, 128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            first = self.slope(x)
            second = self.slope(x + 0.05 * first)
            x = x + 0.1 * second
        return x.pow(2).mean()


class Equilibrium(nn.Module):
    """A fixed point that is looked for without gradients until it stands still, and one step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            state = torch.zeros_like(x)
            for _ in range(30):
                after = torch.tanh(0.3 * self.step(torch.cat([state, x], -1)))
                if (after - state).abs().max() < 1e-2:
                    break
                state = after
        return torch.tanh(0.3 * self.step(torch.cat([state, x], -1))).pow(2).mean()


# Embeddings, outputs and other ways to write a module.


class SparseEmbeddings(nn.Module):
    """Embeddings with sparse gradients, as of recommenders."""

    def __init__(self, *, bags: bool) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(500, 32, sparse=True) if bags else nn.Embedding(500, 32, sparse=True)
        self.items, self.head = nn.Embedding(300, 32, sparse=True), _perceptron(64, 128, 1)

    def forward(self, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
        found = self.users(users)
        found = found if found.dim() == 2 else found.mean(1)
        return functional.mse_loss(self.head(torch.cat([found, self.items(items)], -1))[:, 0], ratings)


def _rated() -> tuple[Any, ...]:
    return torch.randint(500, (256, 5)), torch.randint(300, (256,)), torch.randn(256)


class Recommender(nn.Module):
    """Wide and deep, with dense embeddings and products of all pairs, as of DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(100, 16, max_norm=1.0 if n == 0 else None) for n in range(5))
        self.head = _perceptron(10, 128, 1)

    def forward(self, fields: Tensor, clicks: Tensor) -> Tensor:
        rows = torch.stack([each(column) for each, column in zip(self.fields, fields.unbind(1), strict=True)], 1)
        products = (rows @ rows.transpose(1, 2))[:, *torch.triu_indices(5, 5, 1)]
        return functional.binary_cross_entropy_with_logits(self.head(products)[:, 0], clicks)


@dataclass
class Outcome:
    loss: Tensor
    logits: Tensor
    count: int


class Dataclass(nn.Module):
    """A dataclass comes out, which torch does not know as a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 128, 128, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Outcome:
        logits = self.network(x)
        return Outcome(functional.cross_entropy(logits, labels), logits, len(x))


class Tied(nn.Module):
    """One matrix as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(TOKENS, WIDTH), _perceptron(WIDTH, 128, WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.body(self.tokens(tokens)) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EarlyExit(nn.Module):
    """Layers run until one is sure enough: how many is up to the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(5))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.relu(layer(x))
            logits = head(x)
            losses.append(functional.cross_entropy(logits, labels))
            if logits.softmax(-1).amax(-1).mean() > 0.18:
                break
        return torch.stack(losses).mean()


class ListOfTexts(nn.Module):
    """A list of sequences that differ in length comes in, and a dictionary goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(TOKENS, WIDTH), _perceptron(WIDTH, 128, 10)

    def forward(self, texts: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        pooled = torch.stack([self.body(self.tokens(text)).mean(0) for text in texts])
        return {"loss": functional.cross_entropy(pooled, labels), "pooled": pooled.detach()}


def _lists() -> tuple[Any, ...]:
    return [torch.randint(TOKENS, (length,)) for length in range(10, 42)], torch.randint(10, (32,))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OwnFunction(nn.Module):
    """An ``autograd.Function`` between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(Square.apply(layer(x)))
        return x.mean()


class OwnCheckpoints(nn.Module):
    """Blocks that the author put under ``torch.utils.checkpoint``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_perceptron(WIDTH, 256, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.pow(2).mean()


class Autocast(nn.Module):
    """bfloat16 inside the forward, by the model's own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 256, 256, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.network(x)
        return functional.cross_entropy(logits.float(), labels)


class WeightNorm(nn.Module):
    """Weights that are computed, by parametrizations, in a causal stack of dilated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**n)) for n in range(4)
        )

    def forward(self, steps: Tensor) -> Tensor:
        x = steps.transpose(1, 2)
        for n, layer in enumerate(self.layers):
            x = x + torch.relu(layer(functional.pad(x, (2 * 2**n, 0))))
        return functional.mse_loss(x[..., :-1], steps.transpose(1, 2)[..., 1:])


class LowRank(nn.Module):
    """Frozen weights, and small ones beside them that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(6))
        self.down = nn.ParameterList(torch.randn(WIDTH, 4) / 8 for _ in range(6))
        self.up = nn.ParameterList(torch.zeros(4, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + x @ down @ up)
        return x.pow(2).mean()


class Capsules(nn.Module):
    """Routing by agreement: a few rounds of softmax and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.randn(16, 5, 4, 8) / 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        votes = torch.einsum("bni,ncio->bnco", x.reshape(len(x), 16, 4), self.votes)
        agreement = x.new_zeros(len(x), 16, 5)
        for _ in range(3):
            shares = agreement.softmax(-1)
            total = (shares[..., None] * votes).sum(1)
            length = total.norm(dim=-1, keepdim=True)
            squashed = total * length / (1 + length.pow(2))
            agreement = agreement + (votes * squashed[:, None]).sum(-1)
        return functional.multi_margin_loss(squashed.norm(dim=-1), labels % 5)


class Hypernetwork(nn.Module):
    """A network that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = _perceptron(8, 64, 16 * 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.maker(x[:, :8]).view(-1, 16, 16)
        hidden = x[:, :16]
        for _ in range(3):
            hidden = torch.tanh(torch.bmm(weights, hidden[..., None])[..., 0])
        return hidden.pow(2).mean()


class Sampler(nn.Module):
    """Pictures that are bent by a learned transform, as of spatial transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.head = _perceptron(3 * 256, 32, 6), nn.Conv2d(3, 10, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        grid = functional.affine_grid(
            self.where(images.flatten(1)).view(-1, 2, 3), list(images.shape), align_corners=False
        )
        bent = functional.grid_sample(images, grid, align_corners=False)
        return functional.cross_entropy(self.head(bent).mean((2, 3)), labels)


class Rays(nn.Module):
    """Colours along rays, with positions as sines, as of NeRF."""

    def __init__(self) -> None:
        super().__init__()
        self.field = _perceptron(3 * 12, 64, 64, 4)

    def forward(self, origins: Tensor, colours: Tensor) -> Tensor:
        depths = torch.linspace(0, 1, 16) + torch.rand(len(origins), 16) / 16
        points = origins[:, None] * depths[..., None]
        waves = [wave(points * 2**n) for n in range(6) for wave in (torch.sin, torch.cos)]
        seen = self.field(torch.cat(waves, -1))
        opacity = 1 - torch.exp(-functional.softplus(seen[..., 3]))
        through = torch.cumprod(torch.cat([torch.ones(len(origins), 1), 1 - opacity[:, :-1]], 1), 1)
        return functional.mse_loss(((opacity * through)[..., None] * seen[..., :3].sigmoid()).sum(1), colours)


class Ensemble(nn.Module):
    """Several networks at once by ``vmap`` over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, WIDTH, 64) / 8), nn.Parameter(torch.randn(4, 64, 1) / 8)

    def forward(self, x: Tensor) -> Tensor:
        def one(first: Tensor, second: Tensor) -> Tensor:
            return (torch.tanh(x @ first) @ second).pow(2).mean()

        losses: Tensor = torch.vmap(one)(self.first, self.second)
        return losses.sum()


class Hooked(nn.Module):
    """Features that a hook keeps, for a loss of them, as of a perceptual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _perceptron(WIDTH, 128, 128, 10)
        self.kept: list[Tensor] = []
        self.body[2].register_forward_hook(lambda module, given, made: self.kept.append(made))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.kept.clear()
        logits = self.body(x)
        return functional.cross_entropy(logits, labels) + 0.1 * self.kept[0].pow(2).mean()


class Counter(nn.Module):
    """Python numbers that change from step to step: an annealed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.steps = _perceptron(WIDTH, 128, 128, 10), 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        logits = self.network(x)
        return functional.cross_entropy(logits, labels) + min(1.0, self.steps / 100) * logits.pow(2).mean()


class Memory(nn.Module):
    """A queue of old features in a buffer, as of MoCo."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = _perceptron(WIDTH, 128, 32)
        self.register_buffer("queue", functional.normalize(torch.randn(128, 32), dim=-1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (functional.normalize(self.network(each), dim=-1) for each in (first, second))
        positive, negative = (a * b.detach()).sum(-1, keepdim=True), a @ self.queue.clone().T
        self.queue = torch.cat([b.detach(), self.queue])[:128]
        logits = torch.cat([positive, negative], -1) / 0.1
        return functional.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def _pair(width: int = WIDTH, count: int = BATCH) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(count, width), torch.randn(count, width))


def _labelled(*shape: int, count: int = 256) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(count, *shape), torch.randint(10, (count,)))


HANDWRITTEN: dict[str, Callable[[], Made]] = {
    "lstm": lambda: (Recurrent(nn.LSTM, num_layers=2, dropout=0.2), _texts()),
    "gru-bidirectional": lambda: (Recurrent(nn.GRU, bidirectional=True), _texts()),
    "rnn-two-layers": lambda: (Recurrent(nn.RNN, num_layers=2, nonlinearity="relu"), _texts()),
    "lstm-packed": lambda: (Packed(nn.LSTM), _texts()),
    "lstm-cells": lambda: (Cells(nn.LSTMCell), _rows(12, WIDTH)),
    "gru-cells": lambda: (Cells(nn.GRUCell), _rows(12, WIDTH)),
    "seq2seq-teacher-forcing": lambda: (Seq2Seq(), _texts()),
    "separable-convolutions": lambda: (Separable(), _images()),
    "residual": lambda: (Residual(), _images()),
    "stochastic-depth": lambda: (Residual(drop=0.3), _images()),
    "dense-connections": lambda: (Dense(), _images()),
    "unet-skips": lambda: (UNet(), _images()),
    "detection-losses": lambda: (Detector(), _boxes),
    "layerdrop-python": lambda: (LayerDrop(random.random), _texts()),
    "layerdrop-numpy": lambda: (LayerDrop(lambda: float(numpy.random.uniform())), _texts()),
    "layerdrop-torch": lambda: (LayerDrop(lambda: float(torch.rand(()))), _texts()),
    "torch-transformer": lambda: (Transformer(), _texts()),
    "experts-by-rows": lambda: (Experts(), _rows(WIDTH)),
    "experts-dense": lambda: (DenseExperts(), _rows(WIDTH)),
    "graph-index-add": lambda: (GraphNetwork(), _graph),
    "graph-attention": lambda: (GraphAttention(), _graph),
    "graph-sparse-matrix": lambda: (SparseAdjacency(), _graph),
    "pointnet": lambda: (PointNet(), _labelled(3, 64, count=BATCH)),
    "ppo": lambda: (PPO(), _played),
    "q-learning": lambda: (QLearning(), _remembered),
    "soft-actor": lambda: (Reparameterized(), _rows(WIDTH)),
    "gan-generator": lambda: (GANStep(), _rows(16)),
    "gradient-penalty": lambda: (GradientPenalty(), _pair()),
    "physics-informed": lambda: (Physics(), _rows(2)),
    "physics-torch-func": lambda: (FunctionalPhysics(), _rows(2)),
    "inner-step": lambda: (InnerStep(), _pair()),
    "siamese": lambda: (Siamese(), _pair()),
    "triplet": lambda: (Triplet(), _pair()),
    "distilled": lambda: (Distilled(), _rows(WIDTH)),
    "moving-average": lambda: (Momentum(), _pair()),
    "ctc": lambda: (CTC(), lambda: (torch.randn(8, 20, 80), torch.randint(1, 30, (8, 6)))),
    "vae": lambda: (VAE(), _rows(WIDTH)),
    "vector-quantized": lambda: (VectorQuantized(), _rows(WIDTH)),
    "normalizing-flow": lambda: (Flow(), _rows(WIDTH)),
    "diffusion": lambda: (Diffusion(), _rows(WIDTH)),
    "mixture-density": lambda: (MixtureDensity(), _rows(WIDTH)),
    "gumbel": lambda: (Gumbel(), _rows(WIDTH)),
    "numpy-noise": lambda: (NumpyNoise(), _rows(WIDTH)),
    "python-mixup": lambda: (PythonMixup(), _rows(WIDTH)),
    "fourier-operator": lambda: (Fourier(), _rows(64)),
    "complex-numbers": lambda: (Complex(), _rows(WIDTH)),
    "spectrogram": lambda: (Spectrogram(), _labelled(640, count=BATCH)),
    "gaussian-process": lambda: (Solver(), _rows(WIDTH)),
    "state-space-loop": lambda: (StateSpace(), _rows(12, WIDTH)),
    "neural-ode": lambda: (NeuralODE(), _rows(WIDTH)),
    "equilibrium": lambda: (Equilibrium(), _rows(WIDTH)),
    "sparse-embeddings": lambda: (SparseEmbeddings(bags=False), _rated),
    "sparse-bags": lambda: (SparseEmbeddings(bags=True), _rated),
    "recommender": lambda: (Recommender(), lambda: (torch.randint(100, (256, 5)), torch.rand(256).round())),
    "dataclass-output": lambda: (Dataclass(), _labelled(WIDTH)),
    "tied-weights": lambda: (Tied(), _texts()),
    "early-exit": lambda: (EarlyExit(), _labelled(WIDTH)),
    "list-of-texts": lambda: (ListOfTexts(), _lists),
    "autograd-function": lambda: (OwnFunction(), _rows(WIDTH)),
    "own-checkpoints": lambda: (OwnCheckpoints(), _rows(WIDTH)),
    "own-autocast": lambda: (Autocast(), _labelled(WIDTH)),
    "weight-norm": lambda: (WeightNorm(), _rows(24, WIDTH)),
    "low-rank": lambda: (LowRank(), _rows(WIDTH)),
    "capsules": lambda: (Capsules(), _labelled(WIDTH)),
    "hypernetwork": lambda: (Hypernetwork(), _rows(WIDTH)),
    "spatial-transformer": lambda: (Sampler(), _images()),
    "radiance-field": lambda: (Rays(), lambda: (torch.randn(64, 3), torch.rand(64, 3))),
    "vmapped-ensemble": lambda: (Ensemble(), _rows(WIDTH)),
    "kept-by-a-hook": lambda: (Hooked(), _labelled(WIDTH)),
    "annealed-weight": lambda: (Counter(), _labelled(WIDTH)),
    "feature-queue": lambda: (Memory(), _pair()),
}  # fmt: skip
"""By what they are called in tables."""
