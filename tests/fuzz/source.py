"""From a seed to the source text of a random model: the same text wherever it is asked for."""

from __future__ import annotations

import linecache
import random
import re
import sys
import textwrap
import tomllib
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PARTS = tomllib.loads((Path(__file__).parent / "blocks.toml").read_text(encoding="utf-8"))
"""What models are made of: the file says how it is read."""

_IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 4.0).round() / 4.0

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2.0)
"""

_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.shared_norm = nn.Linear({C}, {C}), nn.LayerNorm({C})
        self.table, self.scale = nn.Embedding(32, {C}), nn.Parameter(torch.ones({C}))
{init}

    def forward(self, x, tokens, mask):
        x0 = x
        x = x * self.scale
        kept = [x]
{forward}


def make():
    torch.manual_seed({seed})
    model = Model(){settings}
    x = torch.randn({B}, {T}, {C}, dtype=torch.{dtype}){gradient}
    tokens, mask = torch.randint(0, 32, ({B}, {T})), torch.rand({B}, {T}) < 0.9
    mask[:, 0] = True
    return model, (x, tokens, mask), {loss}
"""

_SIZES = (
    {"B": 2, "H": 4, "W": 8, "C": 32},
    {"B": 4, "H": 8, "W": 8, "C": 64},
    {"B": 2, "H": 8, "W": 8, "C": 48},
    {"B": 3, "H": 4, "W": 6, "C": 20},
    {"B": 1, "H": 8, "W": 16, "C": 64},
)
_DTYPES = ("float32",) * 8 + ("bfloat16", "float64")


def write(seed: int, blocks: Sequence[int] | None = None) -> str:
    """Write the module that a seed stands for.

    Parameters
    ----------
    seed : int
    blocks : sequence of int, optional
        Only these of its blocks, by number: what is left when a failure is made smaller.

    Returns
    -------
    str
        Python source that defines ``make() -> (model, example_inputs, loss_fn or None)``.
    """
    rng = random.Random(f"model {seed}")
    sizes: dict[str, Any] = dict(rng.choice(_SIZES))
    sizes |= {"T": sizes["H"] * sizes["W"], "D": sizes["C"] // 4}
    dtype = rng.choice(_DTYPES)
    gradient = rng.choice(("", "", ".requires_grad_()"))
    settings = rng.choice(("", "", "", "", "", ".eval()")) + (f".to(torch.{dtype})" if dtype != "float32" else "")
    chosen = range(count(seed)) if blocks is None else blocks
    lines = [_block(seed, number, sizes) for number in chosen]
    end_init, end = (_fill(text, rng, sizes) for text in _texts(rng.choice(_PARTS["ends"])))
    loss = _fill(rng.choice(_PARTS["losses"]), rng, sizes) if end.startswith("LOSS ") else "None"
    lines.append((end_init, end.removeprefix("LOSS ")))
    return (
        _IMPORTS.lstrip()
        + "\n"
        + _MODEL.format(
            **sizes,
            seed=seed,
            dtype=dtype,
            gradient=gradient,
            settings=settings,
            loss=loss,
            init=_indented(init for init, _ in lines),
            forward=_indented(forward for _, forward in lines),
        )
    )


def count(seed: int) -> int:
    """Say how many blocks the model of a seed has."""
    return random.Random(f"count {seed}").randint(2, 8)


def load(source: str, name: str) -> Callable[[], Any]:
    """Run source text of :func:`write`, and give its ``make``; errors then show its lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType(name)
    sys.modules[name] = module  # Dynamo looks up there what a function sees
    exec(compile(source, name, "exec"), vars(module))
    make: Callable[[], Any] = vars(module)["make"]
    return make


def _block(seed: int, number: int, sizes: dict[str, Any]) -> tuple[str, str]:
    # A generator of its own for each block: it stays what it is when others are left out.
    rng = random.Random(f"block {seed} {number}")
    kinds = sorted(_PARTS["blocks"])
    (kind,) = rng.choices(kinds, [_PARTS["rare"].get(kind, 1.0) for kind in kinds])
    init, forward = _texts(rng.choice(_PARTS["blocks"][kind]))
    return _fill(init, rng, sizes | {"i": number}), _fill(forward, rng, sizes | {"i": number})


def _texts(part: dict[str, str]) -> tuple[str, str]:
    return part.get("init", ""), part["forward"]


def _fill(text: str, rng: random.Random, sizes: dict[str, Any]) -> str:
    def filled(match: re.Match[str]) -> str:
        name = match[1]
        return str(sizes[name]) if name in sizes else _fill(rng.choice(_PARTS["picks"][name]), rng, sizes)

    return re.sub(r"(?<!\{)\{(\w+)\}(?!\})", filled, text).replace("{{", "{").replace("}}", "}")


def _indented(parts: Any) -> str:
    return textwrap.indent("\n".join(part for part in parts if part), " " * 8)
