"""A model on another device than the current one: everything that is drawn, saved and measured is of its device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.errors import UsageError
from tests.cuda import gpu
from tests.models import Layers, OneLinear

gpu.required()

_seen: list[int] = []
"""Where the generator of the second device stood whenever something was drawn from it."""


@torch.library.custom_op("tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(like: torch.Tensor) -> torch.Tensor:
    _seen.append(torch.cuda.default_generators[like.device.index].get_offset())
    return torch.rand_like(like)


noise.register_fake(torch.empty_like)


class Noisy(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * noise(x.detach())


class Tower(Layers, blocks=lambda: nn.ModuleList(Noisy(64) for _ in range(6))):
    by_name, gives_host = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (block(x=x) if self.by_name else block(x))
        loss = x.square().mean()
        return loss.cpu() if self.gives_host else loss


@gpu.two_devices
@pytest.mark.parametrize("gives_host", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("runtime", ["graph", "modules", "regional"])
def test_what_is_drawn_again_is_drawn_from_the_same_state(runtime: str, by_name: bool, gives_host: bool) -> None:
    model, x = Tower(by_name=by_name, gives_host=gives_host).to("cuda:1"), torch.randn(2048, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    planner.auto_wrap(model, x, **grouped(activation_budget="50%", runtime=runtime, time_limit_seconds=1))
    model(x).backward()
    for _ in range(2):
        _seen.clear()
        begun = torch.cuda.default_generators[1].get_offset()
        model(x).backward()
        assert len(_seen) > 6, "nothing was drawn again"
        assert sorted(set(_seen)) == _seen[:6]
        drawn = _seen[1] - _seen[0]
        assert torch.cuda.default_generators[1].get_offset() == begun + 6 * drawn
    assert torch.cuda.default_generators[0].get_offset() == 0
    assert torch.cuda.current_device() == 0


def test_a_model_over_several_devices_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to("cuda"))
    x = torch.randn(4, 8)
    for asks in (planner.plan, planner.auto_wrap, planner.profile):
        with pytest.raises(UsageError, match=r"over several devices: '0.weight' is on cpu, '1.weight' is on cuda:0"):
            asks(model, x, **({} if asks is planner.profile else {"budget": "80%"}))
