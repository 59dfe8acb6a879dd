"""What a plan is made for: model, inputs, device and graph, in the words of plan files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch

from planner.capture.lowering import LoweredGraph
from planner.common.options import DROPPED, HELD, KEPT
from planner.ir.builder import LOSS_HELD, LOSS_WORKSPACE
from planner.ir.checkpoints import KEPT as STANDS_IN
from planner.ir.graph import LOSS_TARGET, RETURNED_TARGET, TrainingGraph
from planner.ir.static_memory import LOSS, OUTPUTS

_DESCRIBED = re.compile(r"\(([\d, ]*)\) (\w+)")


def described(tensors: Iterable[torch.Tensor]) -> str:
    """Return sizes and types, as fingerprints have them."""
    return "; ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def are_no_larger(inputs: str, planned: str) -> bool:
    """Whether inputs, as :func:`described`, are in no dimension larger than those that a plan is for.

    >>> are_no_larger("(8, 64) float32", "(32, 64) float32"), are_no_larger("(8, 65) float32", "(32, 64) float32")
    (True, False)
    """
    ours, theirs = (
        [([int(size) for size in sizes.split(",") if size.strip()], dtype) for sizes, dtype in _DESCRIBED.findall(text)]
        for text in (inputs, planned)
    )
    if [(len(sizes), dtype) for sizes, dtype in ours] != [(len(sizes), dtype) for sizes, dtype in theirs]:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a <= b for (mine, _), (those, _) in pairs for a, b in zip(mine, those, strict=True))


def fingerprint(
    model: type, parameters: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], lowered: LoweredGraph, device: str
) -> dict[str, str | int]:
    """Say what a plan is made for, so that it is not applied to something else: a step of a model of such a class."""
    graph, joint = lowered.graph, lowered.joint
    digest = hashlib.sha256()
    operations = [operation for operation in graph.operations if operation.target != STANDS_IN]
    for operation in operations:
        sizes = [graph.values[v].size_bytes for v in operation.outputs]
        digest.update(f"{operation.key} {operation.inputs} {operation.outputs} {sizes}\n".encode())
    outputs = outputs_assumed(graph)
    made = [graph.values[v] for o in graph.operations if o.target == LOSS_TARGET for v in o.outputs]
    loss = [sum(v.size_bytes for v in made if v.name == name) for name in (LOSS_WORKSPACE, LOSS_HELD)]
    return {
        "model": f"{model.__module__}.{model.__qualname__}",
        "parameters": sum(p.numel() for p in parameters),
        "inputs": described(inputs),
        "device": device,
        "torch": torch.__version__,
        "assumes": ", ".join(dict.fromkeys(joint.branches)),
        "operations": len(operations),
        "graph": digest.hexdigest()[:16],
        **({} if outputs == HELD else {OUTPUTS: outputs}),
        **({LOSS: " ".join(map(str, loss))} if any(loss) else {}),
    }


def outputs_assumed(graph: TrainingGraph) -> str:
    """Return what a step assumes that the loop does with its outputs; see :class:`planner.common.options.Training`."""
    if any(operation.target == RETURNED_TARGET for operation in graph.operations):
        return KEPT
    return DROPPED if any(v.kind == "output" and v.size_bytes and not v.retained for v in graph.values) else HELD
