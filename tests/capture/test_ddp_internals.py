"""What a model is told of the DDP that calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from planner.capture.module_internals import Ddp, ddp_around


class Asking(nn.Sequential):
    """Asks what is around it while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = ddp_around(self)
        return super().forward(x)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(running: nn.Module) -> None:
    running(torch.ones(2, 3)).sum().backward()


def test_settings_and_what_is_there_of_gradients_are_seen() -> None:
    model = Asking(nn.Linear(3, 3))
    running = DistributedDataParallel(model, gradient_as_bucket_view=True)
    quiet = {"finds_gradients": False, "finds_views": False, "has_hooks": False}
    step(running)
    assert model.seen == Ddp(ranks=1, has_views=True, sends=True, **quiet)
    step(running)
    views = {"finds_gradients": True, "finds_views": True, "has_hooks": False}
    assert model.seen == Ddp(ranks=1, has_views=True, sends=True, **views)
    running.zero_grad(set_to_none=True)
    with running.no_sync():
        step(running)
        assert model.seen == Ddp(ranks=1, has_views=True, sends=False, **quiet)
        step(running)
    assert model.seen == Ddp(ranks=1, has_views=True, sends=False, **{**quiet, "finds_gradients": True})


def test_hooks_are_seen_and_only_the_ddp_that_calls() -> None:
    model = Asking(nn.Linear(3, 3))
    running = DistributedDataParallel(nn.Sequential(model, nn.ReLU()))
    running.register_comm_hook(None, allreduce_hook)
    step(running)
    assert model.seen is not None and model.seen.has_hooks and not model.seen.has_views
    assert ddp_around(model) is None
