"""Prices of what Inductor writes itself: they are those of a kernel, not of operations one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.common.options import grouped
from planner.ir.graph import OperationCost, Phase
from planner.measure import costing, fusion


def test_inside_a_kernel_nothing_goes_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fused(*arguments: Any) -> Any:
        seen.append((*arguments, fusion.fused_costs(*arguments)))
        return seen[-1][-1]

    monkeypatch.setattr(costing, "fused_costs", fused)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    planner.plan(
        model, torch.randn(128, 64), **grouped(budget="1GiB", runtime="inductor", compare=False, time_limit_seconds=1.0)
    )
    lowered, alone, written, spec, _scale, together = seen[0]
    operations = lowered.graph.operations
    by_target = {operation.target: index for index, operation in reversed([*enumerate(operations)])}
    assert written.isdisjoint({by_target["aten.mm.default"], by_target["aten.addmm.default"]})
    assert all(alone[i] == together[i] for i in range(len(operations)) if i not in written)
    assert all(together[index].seconds < alone[index].seconds for index in written)
    erf, moved_bytes = by_target["aten.erf.default"], fusion._Traffic(lowered, written)
    assert moved_bytes(erf) == 0  # it reads a product of the kernel, and a sum there reads it
    # Where memory is slower than its data sheet says, arithmetic is not.
    alone = [OperationCost(seconds=cost.seconds, workspace_bytes=8) for cost in alone]  # as eager's kernels may need
    fast, slow = (fusion.fused_costs(lowered, alone, written, spec, scale) for scale in (1.0, 10.0))
    assert fast[erf].seconds == slow[erf].seconds > 0 == fast[erf].workspace_bytes
    assert all(quick.seconds <= late.seconds for quick, late in zip(fast, slow, strict=True))
    assert sum(cost.seconds for cost in fast) < sum(cost.seconds for cost in slow)
    reads_library = [i for i in written if any(lowered.graph.producer[v] not in written for v in operations[i].inputs)]
    assert reads_library and all(moved_bytes(i) > 0 for i in reads_library)
    assert max(moved_bytes(i) for i in written) <= 3 * (128 * 256 * 4)
    # What the forward's kernel made, and is no part of the backward's, is read there.
    saved = [
        (i, u) for i in written for u in operations[i].inputs
        if operations[i].phase is Phase.BACKWARD and operations[lowered.graph.producer[u]].phase is Phase.FORWARD
    ]  # fmt: skip
    assert saved and all(moved_bytes(i) >= lowered.graph.values[u].size_bytes for i, u in saved)
