"""Recurrent layers on CUDA: one operation of cuDNN for a whole stack, with the bytes and the draws of eager."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.cudnn_stack import _dropout_states, _lie, _places, cudnn_rnn, dropout_state_bytes
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError
from planner.session.step import fingerprint_of
from tests.cuda import gpu
from tests.cuda.test_travel import differences, lowered
from tests.tiers import tiered

gpu.required()

LENGTH, BATCH, FEATURES, SIZE = 64, 128, 96, 160
Options = dict[str, Any]
STACKS: list[tuple[str, Options]] = [
    ("LSTM", {}),
    ("LSTM", {"dropout": 0.5, "batch_first": True}),
    ("LSTM", {"bidirectional": True}),
    ("LSTM", {"proj_size": 32}),
    ("LSTM", {"bias": False}),
    ("GRU", {"dropout": 0.5}),
    ("GRU", {"bidirectional": True, "bias": False}),
    ("RNN", {"nonlinearity": "relu"}),
    ("RNN", {"batch_first": True}),
]
QUICK = [STACKS[1], STACKS[3], STACKS[6]]
each_stack = pytest.mark.parametrize(("kind", "options"), tiered(STACKS, quick=QUICK))


class Net(nn.Module):
    """Products around a stack of recurrent layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES), nn.GELU())
        self.stack = getattr(nn, kind)(FEATURES, SIZE, num_layers=2, **options)
        width = (options.get("proj_size") or SIZE) * (2 if options.get("bidirectional") else 1)
        self.after = nn.Sequential(nn.Linear(width, SIZE), nn.GELU(), nn.Linear(SIZE, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.stack(self.before(x))[0]).float().square().mean()


def made(
    kind: str, options: Options, device: str = "cuda", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    x = torch.randn(LENGTH, BATCH, FEATURES, dtype=dtype, device=device)
    return Net(kind, **options).to(device, dtype), x


@each_stack
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_captured_on_a_cpu_is_the_one_on_the_gpu(kind: str, options: Options, dtype: torch.dtype) -> None:
    models = []
    steps = []
    for device in ("cpu", "cuda"):
        model, x = made(kind, options, device, dtype)
        models.append(model)
        steps.append(lowered((model, Inputs.of(x))))
    # On the GPU parameters lie in one piece, which is rounded up once, and has room for biases that are not there.
    sizes = [step.static_memory.static_bytes["parameters"] for step in steps]
    parameters = list(models[0].stack.parameters())
    missing = 0 if options.get("bias", True) else len(parameters) * parameters[0].shape[0]
    assert abs(sizes[0] - sizes[1]) <= 512 * len(parameters) + missing * x.itemsize
    pieces = [sorted(step.static_memory.tensor_bytes) for step in steps]
    lie = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in models[1].parameters()}
    assert pieces[0] == pieces[1]
    assert Counter(512 * -(-size_bytes // 512) for size_bytes in lie.values()) <= Counter(pieces[0])
    steps[0] = replace(steps[0], static_memory=steps[1].static_memory)
    assert "\n".join(differences(*steps)) == ""
    assert fingerprint_of(models[0], steps[0]) == fingerprint_of(models[1], steps[1])


@each_stack
def test_a_stack_is_one_operation_each_way(kind: str, options: Options) -> None:
    model, x = made(kind, options)
    targets = [str(n.target) for n in capture(model, Inputs.of(x)).graph.nodes if n.op == "call_function"]
    assert targets.count("checkpoint_planner.cudnn_rnn.default") == 1
    assert targets.count("checkpoint_planner.cudnn_rnn_backward.default") == 1
    assert len(targets) < 120


@functools.cache
def state_of_dropout() -> int:
    """Let cuDNN make its random state, which then stays; return its size."""
    model, x = made("GRU", {"dropout": 0.5})
    model(x)
    return dropout_state_bytes(model)


def left_over() -> int:
    """Count what other tests left on the device, but for workspaces of libraries."""
    state_of_dropout()
    _dropout_states.clear()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    asked_bytes: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return asked_bytes


@each_stack
@pytest.mark.parametrize("budget", ["100%", "80%"])
def test_what_is_asked_for_is_what_is_said(kind: str, options: Options, budget: str) -> None:
    left_bytes = left_over() - (state_of_dropout() if "dropout" in options else 0)
    model, x = made(kind, options)
    searched: Options = {"time_limit_seconds": 1, "cost_model": "roofline"}
    try:
        planner.auto_wrap(model, x, **grouped(activation_budget=budget, **searched))
    except InfeasibleBudgetError as refusal:
        planner.auto_wrap(model, x, **grouped(budget=refusal.minimum_feasible_peak_bytes, **searched))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        model.zero_grad()
    plan = planner.plan_of(model)
    stats = torch.cuda.memory_stats()
    # Blocks of the allocator depend on what other tests left behind; what it is asked for does not.
    seen = stats["requested_bytes.all.peak"] - left_bytes
    assert seen <= plan.budget_bytes
    assert seen == pytest.approx(plan.peak_bytes, rel=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_draws_dropout_runs_once(dropout: float) -> None:
    model, x = made("LSTM", {"dropout": dropout})
    graph = lowered((model, Inputs.of(x))).lowered.graph
    (stack,) = (each for each in graph.operations if each.target == "checkpoint_planner.cudnn_rnn.default")
    assert stack.recomputable is (dropout == 0.0)


@gpu.only_fake
def test_cudnn_is_asked_how_much_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDNN_RESERVE", "12345")
    model, x = made("GRU", {"bias": False, "bidirectional": True})
    (node,) = capture(model, Inputs.of(x[:17])).graph.find_nodes(
        op="call_function", target=torch.ops.checkpoint_planner.cudnn_rnn.default
    )
    assert node.meta["val"][3].numel() == 12345


@pytest.mark.parametrize("bias", [True, False])
def test_weights_lie_where_torch_puts_them(bias: bool) -> None:
    stack = nn.GRU(FEATURES, SIZE, num_layers=3, bidirectional=True, bias=bias, device="cuda")
    parameters = stack._flat_weights
    places, count = _places(parameters, 3, True)
    assert _lie(parameters, places)
    assert parameters[0].untyped_storage().nbytes() == 4 * count
    assert not _lie([p.clone() for p in parameters], places)


def test_a_second_backward_starts_from_what_was_kept() -> None:
    """CuDNN writes into what is kept, and eager hands it a copy where the graph stays."""
    model, x = made("LSTM", {})
    state = torch.zeros(2, BATCH, SIZE, device="cuda")
    output, *_ = cudnn_rnn(
        x.requires_grad_(), list(model.stack._flat_weights), state, state, "lstm", 2, 0.0, True, False
    )
    allocated = []
    for keeps in (True, False):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(output.sum(), x, retain_graph=keeps)
        allocated.append(torch.cuda.max_memory_allocated() - before)
    assert allocated[0] > allocated[1]
