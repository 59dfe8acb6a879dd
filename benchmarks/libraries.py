"""Architectures by name: hand-written ones, and those of every library that is installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.trial import Case, Inputs

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "torch_geometric")
IMAGES, PIXELS, CLASSES = 2, 224, 10


def absent() -> list[str]:
    """Return the libraries that are not here, of which nothing is run."""
    return [library for library in LIBRARIES if find_spec(library) is None]


def architectures() -> dict[str, Callable[[], Case]]:
    """Return what builds each architecture, by names as ``library/model``: ten of one kind, ten of the next."""
    kinds = [_handwritten, *(_FOUND[library] for library in LIBRARIES if find_spec(library) is not None)]
    return {name: make for kind in kinds for name, make in kind()}


Named = Iterator[tuple[str, Callable[[], Case]]]


def _handwritten() -> Named:
    from benchmarks.handwritten import HANDWRITTEN

    for name in HANDWRITTEN:
        yield f"module/{name}", partial(_own, name)


def _own(name: str) -> Case:
    from benchmarks.handwritten import HANDWRITTEN

    model, inputs = HANDWRITTEN[name]()
    return Case(model.train(), lambda: (inputs(), {}))


def _transformers() -> Named:
    families = import_module("benchmarks.families")
    for kind in families.names():
        yield f"transformers/{kind}", partial(_family, kind)


def _family(kind: str) -> Case:
    import transformers

    transformers.logging.set_verbosity_error()
    model, arguments = import_module("benchmarks.families").build(kind)
    return Case(model, lambda: ((), arguments()))


def _timm() -> Named:
    """Yield one of each of its files, which are its families."""
    timm: Any = import_module("timm")
    for family in timm.list_modules():
        if names := timm.list_models(module=family):
            name = _smallest(names)
            yield f"timm/{name}", partial(_pictures, "timm", "create_model", name, num_classes=CLASSES)


def _torchvision() -> Named:
    """Yield one of the names that begin alike."""
    models: Any = import_module("torchvision.models")
    families: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        families.setdefault(re.split(r"[_\d]", name)[0], []).append(name)
    for name in map(_smallest, families.values()):
        yield f"torchvision/{name}", partial(_pictures, "torchvision.models", "get_model", name, num_classes=CLASSES)


def _smallest(names: Sequence[str]) -> str:
    """Return the name that sounds smallest."""
    sizes = ("atto", "femto", "pico", "nano", "xxs", "test", "tiny", "xs", "mini", "small", "18", "b0", "_s", "_t")
    rank = {name: next((n for n, size in enumerate(sizes) if size in name), len(sizes)) for name in names}
    return min(names, key=lambda name: (rank[name], len(name), name))


def _pictures(module: str, function: str, name: str, **options: Any) -> Case:
    model = getattr(import_module(module), function)(name, **options)
    size = getattr(model, "default_cfg", {}).get("input_size", (3, PIXELS, PIXELS))[-1]
    return Case(model.train(), lambda: ((torch.randn(IMAGES, 3, size, size),), {}))


def _diffusers() -> Named:
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    crossed = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32}
    yield "diffusers/UNet2DModel", partial(_denoiser, "UNet2DModel", down_block_types=down, up_block_types=up, **blocks)
    yield (
        "diffusers/UNet2DConditionModel",
        partial(
            _denoiser, "UNet2DConditionModel", up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **crossed, **blocks
        ),
    )


def _denoiser(name: str, **options: Any) -> Case:
    model = getattr(import_module("diffusers"), name)(**options)

    def inputs() -> Inputs:
        channels = model.config.in_channels
        given: tuple[Any, ...] = (torch.randn(IMAGES, channels, 16, 16), torch.randint(1000, (IMAGES,)))
        return (*given, torch.randn(IMAGES, 8, 32)) if "Condition" in name else given, {}

    return Case(model.train(), inputs)


def _torch_geometric() -> Named:
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
        yield f"torch_geometric/{name}", partial(_graphs, name)


def _graphs(name: str) -> Case:
    options = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(20)} if name == "PNA" else {}
    model = getattr(import_module("torch_geometric.nn.models"), name)(32, 64, 3, CLASSES, **options)
    return Case(model.train(), lambda: ((torch.randn(100, 32), torch.randint(100, (2, 800))), {}))


_FOUND: dict[str, Callable[[], Named]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
    "diffusers": _diffusers,
    "torch_geometric": _torch_geometric,
}
