"""What ``DistributedDataParallel`` around a model does with gradients, as far as that decides what a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """How DDP was told to treat gradients, and what it finds of them, as a call of the model begins."""

    ranks: int
    has_views: bool
    """Whether gradients are views into its buckets once they were sent (``gradient_as_bucket_view``)."""
    sends: bool
    """Whether this backward sends them; not within ``no_sync``."""
    finds_gradients: bool
    """Whether gradients of earlier backwards are there."""
    finds_views: bool
    """Whether these are views into the buckets."""
    has_hooks: bool
    """Whether hooks send gradients, which may hold what they like."""


def ddp_around(model: nn.Module) -> Ddp | None:
    """Describe the DDP that is calling a model; None if there is none."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is None or not any(module is model for module in ddp.modules()):
        return None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Ddp(
        ranks=ddp.process_group.size(),
        has_views=bool(ddp.gradient_as_bucket_view),
        sends=bool(ddp.require_backward_grad_sync),
        finds_gradients=bool(gradients),
        finds_views=bool(ddp.gradient_as_bucket_view) and any(map(_is_in_bucket, gradients)),
        has_hooks=bool(ddp._comm_hooks),
    )


def _is_in_bucket(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of a flat buffer; one that has a bucket by itself is not known from its own."""
    base = gradient._base
    return base is not None and base.dim() == 1 and base.untyped_storage().nbytes() > gradient.nbytes
