"""A wrapped model in the hands of ``torch.compile``: its plan runs, or an error says why not, under every runtime."""

from __future__ import annotations

import copy
import logging
from itertools import product

import pytest
import torch
from torch import nn

import planner
from planner import runtimes
from planner.api import running_on
from planner.capture.torch_internals import Unsupported, installed_call
from planner.common.options import grouped
from planner.errors import UsageError
from tests.models import Layers, Stack, linear, mean_square, rows
from tests.runtimes.steps import assert_same, train
from tests.tiers import tiered


class Around(Layers, before=linear(32, 32), inner=lambda: Stack(2, has_loss=False)):
    """Contains a model that may be wrapped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x)).square().mean()


def wrap(model: nn.Module, runtime: str = "graph") -> nn.Module:
    return planner.auto_wrap(model, **grouped(activation_budget="80%", runtime=runtime, time_limit_seconds=2.0))


pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.mark.parametrize("runtime", tiered(runtimes.names(), quick=["graph", "modules", "regional"]))
def test_a_compiled_function_around_it_breaks_there_and_the_plan_runs(runtime: str) -> None:
    plain = Around()
    model = copy.deepcopy(plain)
    wrap(model.inner, runtime)
    compiled = torch.compile(model, backend="eager")
    assert_same(train(plain, rows()), train(compiled._orig_mod, rows()), runtimes.get(runtime).tolerance)
    model.zero_grad()
    compiled(rows()).backward()
    assert planner.plan_of(model.inner).recomputations
    torch.compiler.reset()
    with pytest.raises(Unsupported, match=r"wrapped by planner\.auto_wrap runs its own graphs"):
        torch.compile(model, backend="eager", fullgraph=True)(rows())


def test_what_was_compiled_before_the_wrapping_is_compiled_anew() -> None:
    model = Around()
    compiled = torch.compile(model, backend="eager")
    compiled(rows()).backward()
    wrap(model.inner)
    compiled(rows()).backward()
    assert planner.plan_of(model.inner).recomputations
    planner.unwrap(model.inner)
    assert running_on(model.inner) is None and "forward" not in vars(model.inner)
    torch.compile(model, backend="eager", fullgraph=True)(rows()).backward()


def test_without_gradients_it_is_taken_in_whole() -> None:
    model = Around()
    wrap(model.inner)
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(rows())
        assert torch.equal(found, model(rows()))


@pytest.mark.parametrize(
    ("runtime", "fullgraph"),
    tiered(
        product(runtimes.names(), [False, True]),
        quick=[("graph", True), ("graph", False), ("modules", False), ("regional", True)],
    ),
)
def test_its_own_compile_is_refused(runtime: str, fullgraph: bool) -> None:
    model = wrap(Stack(2), runtime)
    model.compile(backend="eager", fullgraph=fullgraph)
    error, told = (Unsupported, "wrapped by planner.auto_wrap") if fullgraph else (UsageError, "compile.., which runs")
    with pytest.raises(error, match=told):
        model(rows())
    planner.unwrap(model)
    model(rows()).backward()


def test_a_copy_is_compiled_like_any_other_model() -> None:
    copied = copy.deepcopy(wrap(Stack(2)))
    torch.compile(copied, backend="eager", fullgraph=True)(rows()).backward()


def test_a_compiled_part_of_a_wrapped_model_belongs_to_its_plan() -> None:
    plain = Stack(2)
    model = wrap(copy.deepcopy(plain))
    model.blocks[0].compile(backend="eager")
    assert_same(train(plain, rows()), train(model, rows()))
    assert planner.plan_of(model).recomputations


@pytest.mark.parametrize("runtime", ["graph", "regional"])
def test_parts_are_not_compiled_where_there_is_no_memory(runtime: str) -> None:
    """Forwards on fake tensors show what a loss outside takes, and blocks. Torch refuses to compile there, or crashes.

    Blocks are followed once as they are, and once something stands for them.
    """
    model = Stack(2, has_loss=False)
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="compiled by their own"):
        planner.auto_wrap(
            model, rows(), loss_fn=mean_square, **grouped(budget="90%", runtime=runtime, time_limit_seconds=1.0)
        )
    mean_square(model(rows())).backward()
    assert all(installed_call(block) is not None for block in model.blocks)


@pytest.mark.parametrize("runtime", tiered(["graph", "parts", "regional"], slow=["parts"]))
def test_parts_that_are_compiled_before_run_as_planned_and_that_is_said(
    runtime: str, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    plain = Stack(4)
    model = copy.deepcopy(plain)
    for block in model.blocks:
        block.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"compile\(\) \(blocks.0, blocks.1, blocks.2 and 1 more\)"):
        planner.auto_wrap(model, **grouped(activation_budget="80%", runtime=runtime, time_limit_seconds=1.0))
    for _ in range(2):
        assert_same(train(plain, rows()), train(model, rows()))
        plain.zero_grad()
        model.zero_grad()
    assert planner.plan_of(model).recomputations
    assert not caplog.records and not recwarn  # Dynamo does not follow planned calls
