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
    """Yield one of the names that begin alike: classifiers, segmentation, video and optical flow, detection."""
    models: Any = import_module("torchvision.models")
    families: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        families.setdefault(re.split(r"[_\d]", name)[0], []).append(name)
    for name in map(_smallest, families.values()):
        yield f"torchvision/{name}", partial(_pictures, "torchvision.models", "get_model", name, num_classes=CLASSES)
    for name, shape in _FRAMES.items():
        yield f"torchvision/{name}", partial(_frames, name, shape)
    for name in _DETECTORS:
        yield f"torchvision/{name}", partial(_detector, name)


_FRAMES = {
    "deeplabv3_mobilenet_v3_large": (2, 3, 96, 96), "fcn_resnet50": (2, 3, 96, 96),
    "lraspp_mobilenet_v3_large": (2, 3, 96, 96), "r3d_18": (1, 3, 8, 56, 56), "s3d": (1, 3, 16, 224, 224),
    "raft_small": (1, 3, 128, 128),
}  # fmt: skip
"""Models of pictures that give a picture, of films and of two pictures, and the shape of what they read."""

_DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fcos_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
)


def _frames(name: str, shape: tuple[int, ...]) -> Case:
    of_two = name.startswith("raft")
    options = {} if of_two else {"weights_backbone": None} if len(shape) == 4 else {"num_classes": CLASSES}
    model: torch.nn.Module = import_module("torchvision.models").get_model(name, weights=None, **options)
    count, updates = (2, {"num_flow_updates": 3}) if of_two else (1, {})
    return Case(model.train(), lambda: (tuple(torch.randn(shape) for _ in range(count)), dict(updates)))


def _detector(name: str) -> Case:
    without = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
    model: torch.nn.Module = import_module("torchvision.models").get_model(name, **without)
    model.get_submodule("transform").min_size = (160,)  # type: ignore[assignment]

    def inputs() -> Inputs:
        target = {"boxes": torch.tensor([[10.0, 10.0, 80.0, 90.0]]), "labels": torch.tensor([1])}
        return ([torch.randn(3, 160, 160) for _ in range(IMAGES)], [dict(target) for _ in range(IMAGES)]), {}

    return Case(model.train(), inputs)


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

    for name in _OF_DIFFUSERS:
        yield f"diffusers/{name}", partial(_listed, name)


def _listed(name: str) -> Case:
    # By name, since what makes arguments is a lambda and cannot be sent to another process.
    return _of_diffusers(name, *_OF_DIFFUSERS[name])


def _denoiser(name: str, **options: Any) -> Case:
    def inputs(model: Any) -> dict[str, Any]:
        given = {"sample": torch.randn(IMAGES, model.config.in_channels, 16, 16), "timestep": _times(IMAGES)}
        return {**given, "encoder_hidden_states": _tokens(8)} if "Condition" in name else given

    return _of_diffusers(name, options, inputs)


def _of_diffusers(name: str, options: dict[str, Any], inputs: Callable[[Any], dict[str, Any]]) -> Case:
    model = getattr(import_module("diffusers"), name)(**options)
    return Case(model.train(), lambda: ((), inputs(model)))


def _times(samples: int) -> torch.Tensor:
    return torch.randint(1000, (samples,))


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(IMAGES, count, 32)


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
_LATENT = {**_HEADS, "sample_size": 8, "patch_size": 2, "num_layers": 2, "norm_num_groups": 8}
_CODER = {"block_out_channels": (16, 32), "norm_num_groups": 8}
_HALVES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}

_OF_DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "AutoencoderKL": ({**_CODER, **_HALVES}, lambda _: {"sample": torch.randn(IMAGES, 3, 32, 32)}),
    "VQModel": ({**_CODER, **_HALVES, "num_vq_embeddings": 32}, lambda _: {"sample": torch.randn(IMAGES, 3, 32, 32)}),
    "DiTTransformer2DModel": (
        {**_LATENT, "out_channels": 4, "num_embeds_ada_norm": CLASSES},
        lambda _: {
            "hidden_states": torch.randn(IMAGES, 4, 8, 8),
            "timestep": _times(IMAGES),
            "class_labels": torch.randint(CLASSES, (IMAGES,)),
        },
    ),
    "FluxTransformer2DModel": (
        {
            **_HEADS,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda _: {
            "hidden_states": torch.randn(IMAGES, 16, 4),
            "timestep": torch.rand(IMAGES),
            "encoder_hidden_states": _tokens(6),
            "pooled_projections": torch.randn(IMAGES, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(6, 3),
        },
    ),
}
"""Options of a small model of each class, and what makes its arguments."""


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
