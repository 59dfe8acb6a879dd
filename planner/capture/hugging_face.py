"""Let Hugging Face models skip masks and install output hooks under capture as they do in eager.

Eager decoders look for padding and for packed sequences, and build no mask where there are none. On
fake tensors they cannot look, so a step that is followed there would hold masks that the real one
does not. What they would find is asked of the real inputs instead.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from planner.capture.inputs import Inputs
from planner.capture.torch_internals import FakeTensor

COLLECTS_OUTPUTS = "transformers.utils.output_capturing"
"""Collects hidden states and the like in variables of the thread where it is not compiled: they cannot be traced."""

_LIBRARY = "transformers.masking_utils"
_FINDS_PACKED = "find_packed_sequence_indices"
_COLLECTED, _INSTALLS = "_CAN_RECORD_REGISTRY", "maybe_install_capturing_hooks"
_LOOKS_FOR_PADDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@dataclass(frozen=True)
class Masking:
    """Which attention masks a batch needs."""

    padded: bool
    packed: bool


def masking_of(model: nn.Module, inputs: Inputs) -> Masking:
    """Inspect a batch as Hugging Face's models do; a batch without data counts as needing its mask."""
    library = sys.modules.get(_LIBRARY)
    if library is None:
        return Masking(padded=False, packed=False)
    named = _named(model, inputs)
    masks = [tensor for name, tensor in named.items() if name.endswith("mask") and tensor.dim() == 2]
    padded = any(isinstance(mask, FakeTensor) or not bool(mask.all()) for mask in masks)
    positions = named.get("position_ids")
    packed = positions is not None and (
        isinstance(positions, FakeTensor)
        or positions.dim() != 2
        or getattr(library, _FINDS_PACKED, lambda _: positions)(positions) is not None
    )
    return Masking(padded=padded, packed=packed)


@contextmanager
def as_with_data(masking: Masking) -> Iterator[None]:
    """Skip masks on fake tensors if the batch does not need them."""
    library = sys.modules.get(_LIBRARY)
    with ExitStack() as stack:
        if not masking.packed and hasattr(library, _FINDS_PACKED):
            stack.enter_context(patch.object(library, _FINDS_PACKED, lambda position_ids: None))
        for name in () if masking.padded else _LOOKS_FOR_PADDING:
            if (found := getattr(library, name, None)) is not None:
                stack.enter_context(patch.object(library, name, _never_padded(found)))
        yield


def install_output_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks that collect hidden states, router logits and the like.

    A model puts them in by itself in its first such call, once for all, under a lock that cannot be traced: whether it
    is captured would depend on what ran before.
    """
    library = sys.modules.get(COLLECTS_OUTPUTS)
    install, collected = getattr(library, _INSTALLS, None), getattr(library, _COLLECTED, None)
    if install is None or collected is None:
        return
    for module in filter(_collects_outputs, model.modules()):
        config = getattr(module, "config", None)
        for output in collected.get(module) or collected.get(str(type(module))) or ():
            flags = (f"output_{output}", *(("output_attentions",) if output.endswith("attentions") else ()))
            if any(kwargs.get(flag, getattr(config, flag, False)) for flag in flags):
                install(module)


def _collects_outputs(module: nn.Module) -> bool:
    forward = getattr(module.forward, "__func__", None)
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == COLLECTS_OUTPUTS:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _never_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda padding_mask, *args, **kwargs: original(None, *args, **kwargs)


def _named(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    bound = dict(inputs.kwargs)
    if inputs.args:
        forward = model.forward
        function, own = (forward.__func__, (forward.__self__,)) if inspect.ismethod(forward) else (forward, ())
        with suppress(TypeError, ValueError):  # the call itself will say what is wrong
            bound = _signature(function).bind(*own, *inputs.args, **inputs.kwargs).arguments
    for nested in [value for value in bound.values() if isinstance(value, dict)]:
        bound = {**bound, **nested}
    return {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}


_signature = lru_cache(maxsize=16)(inspect.signature)
