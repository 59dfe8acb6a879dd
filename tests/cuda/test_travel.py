"""Plans and profiles travel: a step that is captured on a CPU for a GPU is, node by node, the step on that GPU."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import zoo
from planner.capture.fake_internals import fake_mode
from planner.capture.inputs import Inputs
from planner.capture.joint import tensors_of
from planner.common.options import grouped
from planner.measure import cuda_workspace, devices
from planner.session.step import LoweredStep, Options, captured, fingerprint_of, lower_as_run, plan_lowered
from tests.cuda import gpu
from tests.tiers import tiered

gpu.required()

Made = tuple[nn.Module, Inputs]


def lowered(made: Made) -> LoweredStep:
    """Lower a step for this GPU, on whatever device its model is."""
    options = Options.of(grouped(device=devices.here(torch.device("cuda")).name, cost_model="roofline"))
    return lower_as_run(made[0], captured(*made, options), options)


def differences(one: LoweredStep, other: LoweredStep, alike: tuple[str, ...] = ()) -> list[str]:
    """Compare two lowered steps node by node, types in ``alike`` as one; say what differs, kinds first."""

    def said(value: Any) -> str:
        return functools.reduce(lambda text, name: text.replace(name, alike[0]), alike, str(value))

    graphs = [step.lowered.graph for step in (one, other)]
    kinds = [Counter((o.target, o.phase) for o in graph.operations) for graph in graphs]
    if kinds[0] != kinds[1]:
        return [f"only one has {dict(kinds[0] - kinds[1])}, only the other {dict(kinds[1] - kinds[0])}"]
    found = []
    for index, (own, others) in enumerate(zip(*(graph.operations for graph in graphs), strict=True)):
        names = ("key", "inputs", "outputs", "signature", "dtype", "flops", "moved_bytes", "recomputable")
        pairs = {name: (getattr(own, name), getattr(others, name)) for name in names}
        made = zip(graphs, (own, others), strict=True)
        pairs["bytes"] = tuple([g.values[v].size_bytes for v in o.outputs] for g, o in made)
        nodes = [step.lowered.operation_nodes[index] for step in (one, other)]
        pairs["results"] = tuple(
            [(t.dtype, t.shape, t.stride()) for t in tensors_of(node)] if node else [] for node in nodes
        )
        found += [f"{own.key}: {name} {a} != {b}" for name, (a, b) in pairs.items() if said(a) != said(b)]
    if one.may_overwrite != other.may_overwrite and not alike:  # it takes results of one type
        found.append("other results may be written over inputs")
    if one.static_memory != other.static_memory:
        found.append(f"{one.static_memory} != {other.static_memory}")
    return found[:20]


def planned(made: Made, step: LoweredStep) -> planner.Plan:
    """Plan to keep all of a lowered step for this GPU."""
    asked = grouped(device=step.spec.name, cost_model="roofline", compare=False, budget=2**50)
    return plan_lowered(made[0], step, Options.of(asked)).plan


def hold(make: Callable[[str], Made], alike: tuple[str, ...] = ()) -> None:
    there, here = make("cpu"), make("cuda")
    elsewhere, on_it = lowered(there), lowered(here)
    assert differences(elsewhere, on_it, alike) == []
    assert fingerprint_of(there[0], elsewhere) == fingerprint_of(here[0], on_it)
    with pytest.MonkeyPatch.context() as patch:
        if gpu.FAKE:  # whose cuDNN takes nothing
            for kind in ("convolution", "convolution_backward"):
                patch.delitem(cuda_workspace._RULES, getattr(torch.ops.aten, kind).default)
        plan, own = planned(there, elsewhere), planned(here, on_it)
    assert [row.operation for row in plan.operations] == [row.operation for row in own.operations]
    assert plan.peak_bytes == pytest.approx(own.peak_bytes, rel=1e-3)


SMALL: dict[str, dict[str, int]] = {"llama-7b": {"layers": 1}, "mixtral-1b": {"layers": 1}}

BY_DEVICE = {"mixtral-1b": ("float32", "int32")}
"""Types that a model chooses by the kind of its device: `transformers` counts the rows of each expert in these."""

QUICK = [("minimind-26m", "float32"), ("minimind-26m", "bfloat16"), ("resnet50", "float32"), ("vit-b16", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "dtype"), tiered([(n, t) for n in zoo.names() for t in ("float32", "bfloat16")], quick=QUICK)
)
def test_a_model_of_the_zoo(name: str, dtype: str) -> None:
    def make(device: str) -> Made:
        sizes = SMALL.get(name, {"layers": 2})
        built = zoo.build(name, **sizes, dtype=dtype, device=device, fake_mode=fake_mode())
        return built.model, Inputs(built.example_args, built.example_kwargs)

    hold(make, BY_DEVICE.get(name, ()))


@gpu.only_fake
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100-80"])
def test_models_of_the_zoo_on_another_gpu(name: str) -> None:
    only = ["tests/cuda/test_travel.py", "-k", "test_a_model_of_the_zoo", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *only]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, env={**os.environ, "FAKE_GPU": name}, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:]


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.model(x)
        return getattr(made, "logits", made).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "name", tiered(["mobilenet_v3_small", "swin_t", "efficientnet_b0", "regnet_y_400mf", "vgg11_bn"], quick=[])
)
def test_a_model_of_torchvision(name: str, last: bool, dtype: torch.dtype) -> None:
    models = pytest.importorskip("torchvision.models")

    def make(device: str) -> Made:
        layout = torch.channels_last if last else torch.contiguous_format
        model = getattr(models, name)().to(dtype).to(memory_format=layout).to(device)
        x = torch.zeros(4, 3, 64, 64, dtype=dtype).to(memory_format=layout).to(device)
        return Loss(model.train()), Inputs.of(x)

    hold(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", tiered(["OPT", "GPTNeoX", "Qwen2", "Mistral", "Bloom", "Electra", "Roberta"], quick=[])
)
def test_a_model_of_transformers(name: str, dtype: torch.dtype) -> None:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"vocab_size": 100, "n_head": 4, "n_layer": 2, "ffn_dim": 128, "word_embed_proj_dim": 64}
    sizes |= {"num_key_value_heads": 2} if name in ("Qwen2", "Mistral") else {}

    def make(device: str) -> Made:
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}Model")(config).to(dtype).to(device)
        kind = type("Step", (Loss,), {"forward": lambda self, x: self.model(x).last_hidden_state.float().sum()})
        return kind(model.train()), Inputs.of(torch.ones(2, 64, dtype=torch.int64).to(device))

    hold(make)


class Net(nn.Module):
    """Convolutions with BatchNorm, LayerNorm, RMSNorm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(*(self._maps(3 if i == 0 else 16) for i in range(3)))
        self.norm, self.root, self.mix = nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 48)

    @staticmethod
    def _maps(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.maps(x).flatten(2).transpose(1, 2))
        query, key, value = self.mix(rows).unflatten(-1, (3, 2, 8)).movedim(2, 0).transpose(2, 3).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.root(mixed.transpose(1, 2).flatten(2)).square().mean()


def example(device: str) -> tuple[nn.Module, torch.Tensor]:
    return Net().to(device), torch.randn(8, 3, 16, 16, device=device)


OPTIONS: dict[str, Any] = {"time_limit_seconds": 1, "cost_model": "roofline"}


@pytest.mark.parametrize("runtime", ["graph", "modules"])
def test_a_plan_travels_either_way(runtime: str, tmp_path: Path) -> None:
    name = devices.here(torch.device("cuda")).name
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        model, x = example(source)
        plan = planner.plan(model, x, **grouped(budget="100%", device=name, runtime=runtime, **OPTIONS))
        plan.save(tmp_path / "step.plan")
        model, x = example(target)
        if target == "cuda":
            planner.auto_wrap(model, x, budget=planner.Plan.load(tmp_path / "step.plan"))
            model(x).backward()
            taken = planner.plan_of(model)
        else:
            taken = planner.plan(model, x, **grouped(device=name, runtime=runtime, budget=plan.budget_bytes, **OPTIONS))
        assert taken.peak_bytes == plan.peak_bytes
        assert [row.operation for row in taken.operations] == [row.operation for row in plan.operations]


def test_a_profile_that_was_taken_on_the_gpu_serves_elsewhere() -> None:
    name = devices.here(torch.device("cuda")).name
    model, x = example("cuda")
    profile = planner.profile(model, x, time_limit_seconds=20)
    model, x = example("cpu")
    asked = grouped(activation_budget="70%", device=name, profile=profile, time_limit_seconds=1)
    plan = planner.plan(model, x, **asked)
    options = Options.of(grouped(device=name))
    step = lower_as_run(model, captured(model, Inputs.of(x), options), options)
    asked = {operation.signature for operation in step.lowered.graph.operations}
    assert asked - {""} <= set(profile.measurements)
    assert plan.cost_model == "measured"
