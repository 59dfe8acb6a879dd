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


TIGHT = """
import torch, planner
from torch import nn
layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
model, x = nn.Sequential(*layers).cuda(), torch.randn(2048, 512, device="cuda")
loss = lambda output: output.square().mean()
plan = planner.plan(model, x, budget="80%", loss_fn=loss)
needed_bytes, there_bytes = plan.reserved.reserved_bytes, torch.cuda.memory_reserved()
torch.cuda.set_per_process_memory_fraction((needed_bytes + 2**21) / torch.cuda.mem_get_info()[1])
planner.auto_wrap(model, x, budget=plan.budget_bytes, loss_fn=loss)
for _ in range(2):
    loss(model(x)).backward()
print(there_bytes < needed_bytes < 2**29)
"""


def test_a_card_with_room_for_the_plan_alone_has_room_to_time_operations() -> None:
    assert gpu.run(TIGHT) == "True\n"  # what is written between two runs takes 256 MiB if they are free
