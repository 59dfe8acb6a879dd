"""Lines of the user's code are found by where a file lies, not by what it is called."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import zoo
from planner.capture import fake_mode
from planner.capture.model_facts import kinds_of
from planner.errors import CaptureError
from tests.models import Layers, Stack

CODE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.wrong = wrong

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.wrong:
            x = x[:, :5]
        return self.second(x)
"""
FIRST, SECOND = 12, 15
"""Where the forward calls its layers."""

NAMES = ["capture.py", "my_eager_record.py", "torch/model.py", "planner/capture.py"]
"""Of files and folders of the planner and of torch, of which a user may have some of these names."""


MakeIn = Callable[..., tuple[nn.Module, Path]]


@pytest.fixture
def model_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeIn:
    """Give a function that writes a model into a file of a user's, and makes one."""

    def make(name: str, **options: bool) -> tuple[nn.Module, Path]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CODE)
        spec = util.spec_from_file_location(f"users_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module.Model(**options), path

    return make


@pytest.mark.parametrize(("name", "runtime"), zip(NAMES, ["graph", "modules"] * 2, strict=True))
def test_a_file_of_a_users_is_named_whatever_it_is_called(model_in: MakeIn, name: str, runtime: str) -> None:
    model, path = model_in(name)
    graph = planner.study(model, torch.randn(4, 8), runtime=runtime).graph
    sources = {operation.source for operation in graph.operations if "addmm" in operation.target}
    assert sources == {f"{path}:{FIRST}", f"{path}:{SECOND}"}


@pytest.mark.parametrize(("name", "runtime"), [("capture.py", "graph"), ("torch/model.py", "modules")])
def test_an_error_is_at_the_users_line(model_in: MakeIn, name: str, runtime: str) -> None:
    model, path = model_in(name, wrong=True)
    with pytest.raises(CaptureError, match=re.escape(f"(at {path}:{SECOND})")):
        planner.study(model, torch.randn(4, 8), runtime=runtime)


class Attends(Layers, scale=lambda: nn.Parameter(torch.ones(64))):
    """Attention that is replaced by that of a GPU, and layouts that are asked of kernels."""

    heads = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (x * self.scale).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(parts, parts, parts, is_causal=True)
        return F.elu(mixed).transpose(1, 2).square().sum()


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_no_operation_is_at_a_line_of_the_planners(runtime: str) -> None:
    graph = planner.study(Attends(), torch.randn(2, 16, 64), target="a100-80", runtime=runtime).graph
    sources = {operation.source.rpartition(":")[0] for operation in graph.operations}
    assert "tests/capture/test_provenance.py" in sources
    assert [source for source in sources if source.startswith(("planner/", "cost_models/"))] == []


@pytest.mark.parametrize("runtime", ["graph", "modules", "regional"])
def test_no_error_is_at_a_line_of_the_planners(runtime: str) -> None:
    model = nn.Sequential(*(Attends(heads=3) for _ in range(2)))
    with pytest.raises(CaptureError) as caught:
        planner.plan(model, torch.randn(2, 16, 64), budget="90%", target="a100-80", runtime=runtime)
    assert "tests/capture/test_provenance.py" in str(caught.value)


def test_a_model_of_the_zoo_has_lines() -> None:
    model = zoo.build("minigpt", layers=1, seq_len=8, batch_size=1, fake_mode=fake_mode())
    graph = planner.study(model.model, model.example_kwargs).graph
    assert any(operation.source.startswith("planner/zoo") for operation in graph.operations)


class _LooksUp(Stack):
    """Models of diffusers look attributes up by themselves, and Dynamo then names their modules otherwise."""

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)


def test_modules_have_their_names_where_a_model_looks_attributes_up_itself() -> None:
    model = _LooksUp(block=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    graph = planner.study(model, torch.randn(4, 8)).graph
    assert {o.module for o in graph.operations} <= {name for name, _ in model.named_modules()}
    assert "blocks.1.0" in {o.module for o in graph.operations}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_has_a_kind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    assert kinds_of(model) == {"": "Sequential", "0": "Linear", "1": "RecursiveScriptModule"}
