"""The installed torch has every private API that the planner stands on, and they do what they did."""

from __future__ import annotations

import inspect
import logging
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import checkpoint as checkpointing

from planner.capture import torch_internals as internals
from planner.capture.common_subexpressions import eliminate_common_subexpressions


def differences() -> list[str]:
    """Try the private APIs once on a tiny model, and say what this version of torch does differently."""
    seen: dict[str, Any] = {}

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        seen["descriptors"] = [n.meta.get("desc") for n in joint.graph.nodes if n.op == "placeholder"]
        joint.graph = eliminate_common_subexpressions(joint.graph)
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    x = torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    internals.install_call(
        model,
        internals.compile_isolated(lambda y: internals.call_implementation(model)(y), internals.aot_backend(partition)),
    )
    actual = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    internals.install_call(model, None)
    problems = []

    def doubled(y: torch.Tensor) -> Any:
        return y * 2 if torch.compiler.is_dynamo_compiling() else None

    internals.compile_isolated(doubled, lambda graph_module, _: graph_module)(x)
    if internals.run_compiled(doubled, (x,), {}) is None or internals.run_compiled(doubled, (x[:1],), {}) is not None:
        problems.append("compiled graphs are not run alone, or not only for what they were compiled for")

    def look_around(y: torch.Tensor) -> torch.Tensor:
        seen["around"] = [frame.f_code for frame, _ in walk_stack(inspect.currentframe())]
        return y

    written = torch.zeros(2)
    alias, version = written.detach(), internals.version_of(written)
    if internals.version_of(written.add_(1)) != version + 1 or internals.version_of(alias) != version + 1:
        problems.append("writing in place is counted in another way")

    if [internals.numbers_among(torch.ops.aten.mul.Tensor, (x, other)) for other in (2.0, x)] != [1, 0]:
        problems.append("numbers are told from tensors in another way")
    checkpointing.checkpoint(look_around, x, use_reentrant=False)
    if internals.CHECKPOINT not in seen["around"]:
        problems.append("torch.utils.checkpoint runs what it checkpoints elsewhere")
    torch._dynamo.mark_dynamic(x, 0, max=8)
    if not internals.is_marked_dynamic(x):
        problems.append("mark_dynamic leaves other marks on a tensor")
    if not any(isinstance(d, internals.TangentAOTInput) for d in seen.get("descriptors", ())):
        problems.append("tangents of the joint graph carry no TangentAOTInput descriptor")
    if not all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)):
        problems.append("gradients of the partitioned graph differ from eager")
    return problems


def test_this_torch_has_what_the_planner_stands_on():
    assert differences() == [], f"torch {torch.__version__} is not supported"


def test_what_another_torch_does_differently_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(internals, "TangentAOTInput", int)
    assert differences() == ["tangents of the joint graph carry no TangentAOTInput descriptor"]


def test_compilation_with_the_settings_logs_no_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    logger = logging.getLogger("model")
    added = lambda self, message: self.error(message)  # noqa: E731
    monkeypatch.setattr(logging.Logger, "error_once", added, raising=False)  # as transformers does, when it is imported

    def double(x: torch.Tensor) -> torch.Tensor:
        logger.error("passes in silence")
        logger.error_once("passes, too")
        return x * 2

    with internals.dynamo_settings():
        doubled = internals.compile_isolated(double, lambda graph_module, _: graph_module)(torch.ones(2))
    assert doubled.tolist() == [2, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_module_of_several_paths_has_its_own_parameters_again(uses: int) -> None:
    shared = _Residual()
    model = nn.ModuleDict({"first": shared, **{f"block{n}": nn.Sequential(shared, nn.ReLU()) for n in range(uses)}})
    before = dict(model.named_parameters(remove_duplicate=False))
    other = {id(tensor): torch.zeros_like(tensor) for tensor in before.values()}
    with internals.other_state(model, {path: other[id(tensor)] for path, tensor in before.items()}):
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert all(inside[path] is other[id(tensor)] for path, tensor in before.items())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[path] is tensor for path, tensor in before.items())
