"""Models as people write them, with no library: how each computes its loss, and what it trains on.

Each entry of :data:`HANDWRITTEN` builds a module, and a function that returns new inputs of the same sizes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Inputs = Callable[[], tuple[Any, ...]]
Made = tuple[nn.Module, Inputs]
BATCH, WIDTH, TOKENS = 32, 64, 200

HANDWRITTEN: dict[str, Callable[[], Made]] = {}
"""By what they are called in tables."""


class Written(nn.Module):
    """A forward written as a function of the module and its inputs; ``parts`` are modules, parameters and buffers."""

    def __init__(self, compute: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


def written(
    name: str, inputs: Inputs, parts: Callable[[], dict[str, Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a forward, with what builds its parts, under a name."""

    def entered(compute: Callable[..., Any]) -> Callable[..., Any]:
        HANDWRITTEN[name] = lambda: (Written(compute, parts()), inputs)
        return compute

    return entered


def _perceptron(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _rows(*shape: int, count: int = BATCH) -> Inputs:
    return lambda: (torch.randn(count, *shape),)


def _pair() -> tuple[Any, ...]:
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def _labelled(*shape: int, count: int = 256) -> Inputs:
    return lambda: (torch.randn(count, *shape), torch.randint(10, (count,)))


_images = _labelled(3, 16, 16, count=BATCH)


def _texts() -> tuple[Any, ...]:
    return torch.randint(TOKENS, (BATCH, 24)), torch.randint(TOKENS, (BATCH, 24))


def _word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


# Recurrent.


def _language(kind: type[nn.RNNBase], **options: Any) -> dict[str, Any]:
    stack = kind(WIDTH, WIDTH, batch_first=True, **options)
    width = WIDTH * (2 if options.get("bidirectional") else 1)
    return {"tokens": nn.Embedding(TOKENS, WIDTH), "stack": stack, "head": nn.Linear(width, TOKENS)}


@written("lstm", _texts, lambda: _language(nn.LSTM, num_layers=2, dropout=0.2))
@written("gru-bidirectional", _texts, lambda: _language(nn.GRU, bidirectional=True))
def _recurrent(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run a language model on one of torch's recurrent stacks."""
    return _word_loss(model.head(model.stack(model.tokens(tokens))[0]), targets)


@written("lstm-packed", _texts, lambda: _language(nn.LSTM))
def _packed(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run the same on texts of several lengths, packed."""
    lengths = torch.arange(tokens.shape[1], 0, -1).repeat(2)[: len(tokens)].sort(descending=True).values
    packed = pack_padded_sequence(model.tokens(tokens), lengths, batch_first=True)
    states, _ = pad_packed_sequence(model.stack(packed)[0], batch_first=True)
    return _word_loss(model.head(states), targets[:, : states.shape[1]])


# Pictures.


def _boxes() -> tuple[Any, ...]:
    return torch.randn(8, 3, 32, 32), torch.rand(8, 5, 4), torch.randint(4, (8, 5))


@written("detection-losses", _boxes, lambda: {
    "first": nn.Conv2d(3, 32, 3, 2, 1), "norm": nn.GroupNorm(4, 32), "second": nn.Conv2d(32, 32, 3, 1, 1),
    "classes": nn.Conv2d(32, 4, 1), "boxes": nn.Conv2d(32, 4, 1),
})  # fmt: skip
def _detection(model: Any, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Match anchors with boxes; only those that match count for the boxes."""
    features = torch.relu(model.second(torch.relu(model.norm(model.first(images)))))
    logits = model.classes(features).flatten(2).transpose(1, 2)
    found = model.boxes(features).flatten(2).transpose(1, 2).sigmoid()
    with torch.no_grad():
        nearest = torch.cdist(found, boxes).min(-1)
        positive = nearest.values < nearest.values.median()
    wanted = torch.gather(boxes, 1, nearest.indices[..., None].expand(-1, -1, 4))
    chosen = torch.where(positive, torch.gather(labels, 1, nearest.indices), 0)
    loss_boxes = functional.smooth_l1_loss(found[positive], wanted[positive])  # as many rows as there are matches
    return {"boxes": loss_boxes, "classes": functional.cross_entropy(logits.flatten(0, 1), chosen.flatten())}


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


@written("layerdrop-numpy", _texts, lambda: {
    "tokens": nn.Embedding(TOKENS, WIDTH), "head": nn.Linear(WIDTH, TOKENS),
    "layers": nn.ModuleList(Layer() for _ in range(4)),
})  # fmt: skip
def _layerdrop(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Leave out layers of a transformer by numpy's random numbers."""
    x = model.tokens(tokens)
    for layer in model.layers:
        if float(numpy.random.uniform()) >= 0.3:
            x = layer(x)
    return _word_loss(model.head(x), targets)


@written("torch-transformer", _texts, lambda: {
    "tokens": nn.Embedding(TOKENS, WIDTH), "head": nn.Linear(WIDTH, TOKENS),
    "body": nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True),
})  # fmt: skip
def _transformer(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run torch's own transformer, with its masks."""
    mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1] - 1)
    states = model.body(model.tokens(tokens), model.tokens(targets[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
    return _word_loss(model.head(states), targets[:, 1:])


# Graphs.


def _graph() -> tuple[Any, ...]:
    return torch.randn(50, WIDTH), torch.randint(50, (2, 400)), torch.randn(50)


@written("graph-attention", _graph, lambda: {"values": nn.Linear(WIDTH, WIDTH), "scores": nn.Linear(2 * WIDTH, 1)})
def _graph_attention(model: Any, nodes: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
    """Attend over the edges of each node: a softmax by ``scatter_reduce``."""
    for _ in range(3):
        values = model.values(nodes)
        scores = functional.leaky_relu(model.scores(torch.cat([values[edges[0]], values[edges[1]]], -1)))[:, 0]
        largest = torch.zeros(len(nodes)).scatter_reduce(0, edges[1], scores.detach(), "amax")
        weights = torch.exp(scores - largest[edges[1]])
        totals = torch.zeros(len(nodes)).scatter_add(0, edges[1], weights) + 1e-9
        sent = values[edges[0]] * (weights / totals[edges[1]])[:, None]
        nodes = torch.tanh(torch.zeros_like(nodes).index_add(0, edges[1], sent))
    return functional.mse_loss(nodes.sum(1), targets)


@written("graph-sparse-matrix", _graph, lambda: {"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))})
def _sparse_adjacency(model: Any, nodes: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
    """Take a graph as a sparse matrix."""
    matrix = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(nodes), len(nodes))).coalesce()
    for layer in model.layers:
        nodes = torch.tanh(torch.sparse.mm(matrix, layer(nodes)))
    return functional.mse_loss(nodes.sum(1), targets)


# Losses that are more than one call.


@written(
    "ppo",
    lambda: (torch.randn(256, WIDTH), torch.randint(6, (256,)), -torch.rand(256), torch.randn(256)),
    lambda: {"policy": _perceptron(WIDTH, 128, 128, 6), "critic": _perceptron(WIDTH, 128, 128, 1)},
)
def _ppo(model: Any, states: Tensor, actions: Tensor, before: Tensor, returns: Tensor) -> Tensor:
    """Return the clipped loss of PPO, with a value and an entropy, of a policy and a critic."""
    decided = torch.distributions.Categorical(logits=model.policy(states))
    values = model.critic(states)[:, 0]
    advantages = (returns - values).detach()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.exp(decided.log_prob(actions) - before)
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return -gain + 0.5 * functional.mse_loss(values, returns) - 0.01 * decided.entropy().mean()


@written("gan-generator", _rows(16), lambda: {
    "generator": nn.Sequential(
        nn.Linear(16, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    ),
    "discriminator": nn.Sequential(
        nn.utils.spectral_norm(nn.Conv2d(3, 32, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 64, 1)
    ).requires_grad_(False),
})  # fmt: skip
def _gan(model: Any, noise: Tensor) -> Tensor:
    """Return a generator's loss through a discriminator, which is not to learn from it."""
    return functional.softplus(-model.discriminator(model.generator(noise))).mean()


@written("physics-torch-func", _rows(2), lambda: {"network": _perceptron(2, WIDTH, WIDTH, 1)})
def _physics(model: Any, points: Tensor) -> Tensor:
    """Return a residual of an equation, with derivatives by ``torch.func``."""

    def value(point: Tensor) -> Tensor:
        found: Tensor = model.network(point)[0]
        return found

    slope = torch.func.vmap(torch.func.grad(value))(points)
    return (slope[:, 1] - slope[:, 0]).pow(2).mean()


@written("inner-step", _pair, lambda: {"network": _perceptron(WIDTH, 64, 1)})
def _inner_step(model: Any, known: Tensor, new: Tensor) -> Tensor:
    """Return a loss after one step of an inner optimization, as of MAML."""
    weights = dict(model.network.named_parameters())
    inner = torch.func.functional_call(model.network, weights, (known,)).pow(2).mean()
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    after = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(model.network, after, (new,)).sub(1).pow(2).mean()


@written("moving-average", _pair, lambda: {
    "online": _perceptron(WIDTH, 128, 32), "average": _perceptron(WIDTH, 128, 32).requires_grad_(False),
})  # fmt: skip
def _moving_average(model: Any, first: Tensor, second: Tensor) -> Tensor:
    """Learn from a moving average of the network, which the forward moves, as of BYOL."""
    with torch.no_grad():
        for own, moving in zip(model.online.parameters(), model.average.parameters(), strict=True):
            moving.lerp_(own, 0.01)
        wanted = functional.normalize(model.average(second), dim=-1)
    return 2 - 2 * (functional.normalize(model.online(first), dim=-1) * wanted).sum(-1).mean()


# Densities and sampling.


@written("vector-quantized", _rows(WIDTH), lambda: {
    "encoder": _perceptron(WIDTH, 128, 16), "decoder": _perceptron(16, 128, WIDTH),
    "codes": nn.Embedding(40, 16), "usage": torch.zeros(40),
})  # fmt: skip
def _vector_quantized(model: Any, x: Tensor) -> Tensor:
    """Quantize by a code book with gradients straight through, and count its usage in a buffer."""
    latent = model.encoder(x)
    chosen = torch.cdist(latent, model.codes.weight).argmin(-1)
    model.usage.mul_(0.9).add_(torch.bincount(chosen, minlength=40) * 0.1)
    code = model.codes(chosen)
    commitment = functional.mse_loss(latent, code.detach()) + functional.mse_loss(code, latent.detach())
    return functional.mse_loss(model.decoder(latent + (code - latent).detach()), x) + commitment


@written("normalizing-flow", _rows(WIDTH), lambda: {
    "couplings": nn.ModuleList(_perceptron(WIDTH // 2, 128, WIDTH) for _ in range(4)),
    "rotations": nn.ParameterList(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] for _ in range(4)),
})  # fmt: skip
def _flow(model: Any, x: Tensor) -> Tensor:
    """Run a normalizing flow of affine couplings and a learned rotation."""
    volume = x.new_zeros(len(x))
    for coupling, rotation in zip(model.couplings, model.rotations, strict=True):
        fixed, moved = (x @ rotation).chunk(2, -1)
        scale, shift = coupling(fixed).chunk(2, -1)
        x = torch.cat([fixed, moved * torch.tanh(scale).exp() + shift], -1)
        volume = volume + torch.tanh(scale).sum(-1) + torch.linalg.slogdet(rotation).logabsdet
    return (0.5 * x.pow(2).sum(-1) - volume).mean()


# Numbers and transforms.


@written("fourier-operator", _rows(64), lambda: {
    "weights": nn.ParameterList(torch.randn(16, 16, 8, dtype=torch.cfloat) / 16 for _ in range(3)),
    "lift": nn.Conv1d(1, 16, 1), "mix": nn.Conv1d(16, 16, 1), "head": nn.Conv1d(16, 1, 1),
})  # fmt: skip
def _fourier(model: Any, x: Tensor) -> Tensor:
    """Run a Fourier neural operator: weights of complex numbers on the lowest frequencies."""
    x = model.lift(x[:, None])
    for weight in model.weights:
        spectrum = torch.fft.rfft(x)
        kept = torch.einsum("bif,iof->bof", spectrum[..., :8], weight)
        back = torch.fft.irfft(functional.pad(kept, (0, spectrum.shape[-1] - 8)), x.shape[-1])
        x = functional.gelu(back + model.mix(x))
    return model.head(x).pow(2).mean()


@written("gaussian-process", _rows(WIDTH), lambda: {
    "features": _perceptron(WIDTH, 64, 8), "scale": nn.Parameter(torch.zeros(())),
})  # fmt: skip
def _gaussian_process(model: Any, x: Tensor) -> Tensor:
    """Compute a Cholesky factor, a triangular solve and a determinant."""
    points = model.features(x)
    kernel = torch.exp(-torch.cdist(points, points).pow(2) * model.scale.exp()) + 0.1 * torch.eye(len(x))
    factor = torch.linalg.cholesky(kernel)
    solved = torch.linalg.solve_triangular(factor, x[:, :1], upper=False)
    return 0.5 * solved.pow(2).sum() + factor.diagonal().log().sum()


@written("state-space-loop", _rows(12, WIDTH), lambda: {
    "inward": nn.Linear(WIDTH, 32), "outward": nn.Linear(32, WIDTH), "decay": nn.Parameter(torch.zeros(32)),
})  # fmt: skip
def _state_space(model: Any, steps: Tensor) -> Tensor:
    """Write the states of a linear recurrence, in a loop over time, into one tensor."""
    driven, decay = model.inward(steps), torch.sigmoid(model.decay)
    states, state = torch.empty_like(driven), driven.new_zeros(len(steps), 32)
    for position in range(steps.shape[1]):
        state = decay * state + driven[:, position]
        states[:, position] = state
    return functional.mse_loss(model.outward(states)[:, :-1], steps[:, 1:])


@written("equilibrium", _rows(WIDTH), lambda: {"step": nn.Linear(2 * WIDTH, WIDTH)})
def _equilibrium(model: Any, x: Tensor) -> Tensor:
    """Iterate without gradients until nothing moves, and take one step with them."""
    with torch.no_grad():
        state = torch.zeros_like(x)
        for _ in range(30):
            after = torch.tanh(0.3 * model.step(torch.cat([state, x], -1)))
            if (after - state).abs().max() < 1e-2:
                break
            state = after
    return torch.tanh(0.3 * model.step(torch.cat([state, x], -1))).pow(2).mean()


# Embeddings, outputs and other ways to write a module.


@written(
    "sparse-bags",
    lambda: (torch.randint(500, (256, 5)), torch.randint(300, (256,)), torch.randn(256)),
    lambda: {
        "users": nn.EmbeddingBag(500, 32, sparse=True),
        "items": nn.Embedding(300, 32, sparse=True),
        "head": _perceptron(64, 128, 1),
    },
)
def _sparse_bags(model: Any, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
    """Use embeddings with sparse gradients, as of recommenders."""
    found = torch.cat([model.users(users), model.items(items)], -1)
    return functional.mse_loss(model.head(found)[:, 0], ratings)


@dataclass
class Outcome:
    loss: Tensor
    logits: Tensor
    count: int


@written("dataclass-output", _labelled(WIDTH), lambda: {"network": _perceptron(WIDTH, 128, 128, 10)})
def _dataclass(model: Any, x: Tensor, labels: Tensor) -> Outcome:
    """Return a dataclass, which torch does not know as a tree."""
    logits = model.network(x)
    return Outcome(functional.cross_entropy(logits, labels), logits, len(x))


@written("early-exit", _labelled(WIDTH), lambda: {
    "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)),
    "heads": nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(5)),
})  # fmt: skip
def _early_exit(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Run layers until one is sure enough: how many is up to the data."""
    losses = []
    for layer, head in zip(model.layers, model.heads, strict=True):
        x = torch.relu(layer(x))
        logits = head(x)
        losses.append(functional.cross_entropy(logits, labels))
        if logits.softmax(-1).amax(-1).mean() > 0.18:
            break
    return torch.stack(losses).mean()


@written(
    "list-of-texts",
    lambda: ([torch.randint(TOKENS, (length,)) for length in range(10, 42)], torch.randint(10, (32,))),
    lambda: {"tokens": nn.Embedding(TOKENS, WIDTH), "body": _perceptron(WIDTH, 128, 10)},
)
def _list_of_texts(model: Any, texts: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Take a list of sequences that differ in length, and return a dictionary."""
    pooled = torch.stack([model.body(model.tokens(text)).mean(0) for text in texts])
    return {"loss": functional.cross_entropy(pooled, labels), "pooled": pooled.detach()}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@written("autograd-function", _rows(WIDTH), lambda: {
    "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
})  # fmt: skip
def _autograd_function(model: Any, x: Tensor) -> Tensor:
    """Use an ``autograd.Function`` between layers."""
    for layer in model.layers:
        x = torch.tanh(Square.apply(layer(x)))
    return x.mean()


@written("own-checkpoints", _rows(WIDTH), lambda: {
    "blocks": nn.ModuleList(_perceptron(WIDTH, 256, WIDTH) for _ in range(4)),
})  # fmt: skip
def _own_checkpoints(model: Any, x: Tensor) -> Tensor:
    """Run blocks that the author put under ``torch.utils.checkpoint``."""
    for block in model.blocks:
        x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x.pow(2).mean()


@written("own-autocast", _labelled(WIDTH), lambda: {"network": _perceptron(WIDTH, 256, 256, 10)})
def _own_autocast(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Compute in bfloat16 inside the forward, by the model's own choice."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.network(x)
    return functional.cross_entropy(logits.float(), labels)


@written("weight-norm", _rows(24, WIDTH), lambda: {
    "layers": nn.ModuleList(
        nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**n)) for n in range(4)
    ),
})  # fmt: skip
def _weight_norm(model: Any, steps: Tensor) -> Tensor:
    """Compute weights by parametrizations, in a causal stack of dilated convolutions."""
    x = steps.transpose(1, 2)
    for n, layer in enumerate(model.layers):
        x = x + torch.relu(layer(functional.pad(x, (2 * 2**n, 0))))
    return functional.mse_loss(x[..., :-1], steps.transpose(1, 2)[..., 1:])


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


HANDWRITTEN["kept-by-a-hook"] = lambda: (Hooked(), _labelled(WIDTH))


@written("feature-queue", _pair, lambda: {
    "network": _perceptron(WIDTH, 128, 32), "queue": functional.normalize(torch.randn(128, 32), dim=-1),
})  # fmt: skip
def _feature_queue(model: Any, first: Tensor, second: Tensor) -> Tensor:
    """Keep a queue of old features in a buffer, as of MoCo."""
    a, b = (functional.normalize(model.network(each), dim=-1) for each in (first, second))
    positive, negative = (a * b.detach()).sum(-1, keepdim=True), a @ model.queue.clone().T
    model.queue = torch.cat([b.detach(), model.queue])[:128]
    logits = torch.cat([positive, negative], -1) / 0.1
    return functional.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))
