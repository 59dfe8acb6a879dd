"""The installed torch has every private API that the planner stands on, and they do what they did."""

from __future__ import annotations

import inspect
import logging
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from planner.capture import torch_internals as internals
from tests.models import OneLinear


def test_this_torch_has_what_the_planner_stands_on() -> None:
    """What every capture needs besides, every test of a capture tries."""
    x = torch.randn(2, 4)

    def doubled(y: torch.Tensor) -> Any:
        return y * 2 if torch.compiler.is_dynamo_compiling() else None

    owned = internals.OwnedFunction(doubled, "doubled")
    owned.compiled(lambda graph_module, _: graph_module, (x,), {})
    assert owned.run((x,), {}) is not None, "compiled graphs are not run alone"
    assert owned.run((x[:1],), {}) is None, "or not only for what they were compiled for"

    written = torch.zeros(2)
    alias, version = written.detach(), internals.version_of(written)
    assert internals.version_of(written.add_(1)) == version + 1 == internals.version_of(alias)
    assert [internals.numbers_among(torch.ops.aten.mul.Tensor, (x, other)) for other in (2.0, x)] == [1, 0]

    around: list[Any] = []

    def look_around(y: torch.Tensor) -> torch.Tensor:
        around.extend(frame.f_code for frame, _ in walk_stack(inspect.currentframe()))
        return y

    checkpointing.checkpoint(look_around, x, use_reentrant=False)
    assert internals.CHECKPOINT in around, "torch.utils.checkpoint runs what it checkpoints elsewhere"
    torch._dynamo.mark_dynamic(x, 0, max=8)
    assert internals.is_marked_dynamic(x), "mark_dynamic leaves other marks on a tensor"


def test_compilation_with_the_settings_logs_no_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    logger = logging.getLogger("model")
    added = lambda self, message: self.error(message)  # noqa: E731
    monkeypatch.setattr(logging.Logger, "error_once", added, raising=False)  # as transformers does, when it is imported

    def double(x: torch.Tensor) -> torch.Tensor:
        logger.error("passes in silence")
        logger.error_once("passes, too")
        return x * 2

    with internals.dynamo_settings():
        owned = internals.OwnedFunction(double, "double")
        doubled = owned.compiled(lambda graph_module, _: graph_module, (torch.ones(2),), {})
    assert doubled.tolist() == [2, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_module_of_several_paths_has_its_own_parameters_again(uses: int) -> None:
    shared = OneLinear()
    model = nn.ModuleDict({"first": shared, **{f"block{n}": nn.Sequential(shared, nn.ReLU()) for n in range(uses)}})
    before = dict(model.named_parameters(remove_duplicate=False))
    other = {id(tensor): torch.zeros_like(tensor) for tensor in before.values()}
    with internals.other_state(model, {path: other[id(tensor)] for path, tensor in before.items()}):
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert all(inside[path] is other[id(tensor)] for path, tensor in before.items())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[path] is tensor for path, tensor in before.items())
