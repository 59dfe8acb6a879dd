"""Operations are timed on CUDA as ``triton.testing.do_bench`` times: queued between events, one wait at the end."""

from __future__ import annotations

import torch
from torch import fx

from planner.capture import operands
from planner.capture.fake_internals import fake_mode
from planner.measure import profiling
from tests.cuda import gpu

gpu.required()

aten = torch.ops.aten
HERE = torch.device("cuda:0")


def product() -> fx.Node:
    graph, x = fx.Graph(), None
    with fake_mode():
        x = torch.empty(256, 256, device=HERE)
    given = graph.placeholder("given")
    node = graph.call_function(aten.mm.default, (given, given))
    given.meta["val"] = node.meta["val"] = x
    return node


@gpu.only_fake
def test_the_host_waits_twice_however_often_an_operation_runs() -> None:
    node, elsewhere = product(), torch.empty(1 << 20, dtype=torch.uint8, device=HERE)
    waits = []
    with operands.running_alone(HERE):
        for runs in (3, 12):
            trials = profiling.Trials(least_runs=runs, most_runs=runs, seconds=0.0, long_seconds=10.0)
            before = gpu.calls()
            assert profiling._time(profiling._Call(node, None, 0), HERE, trials, elsewhere).runs == runs
            waits.append(gpu.calls().synchronisations - before.synchronisations)
    assert waits[0] == waits[1] <= 2
