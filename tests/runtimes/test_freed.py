"""Nothing that torch keeps in its caches keeps a model: it is freed with its last name, wrapped or not."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import planner
from planner import runtimes
from planner.common.options import grouped
from planner.errors import CaptureError
from tests.models import DependingOnData, Stack, rows
from tests.tiers import tiered

BUDGET = {"budget": "80%", "time_limit_seconds": 0.5}


def planned(runtime: str) -> nn.Module:
    model = Stack(2)
    planner.plan(model, rows(128), **grouped(runtime=runtime, compare=False, **BUDGET))
    return model


def trained(runtime: str) -> nn.Module:
    model = planner.auto_wrap(Stack(2), rows(128), **grouped(runtime=runtime, **BUDGET))
    model(rows(128)).backward()
    return model


def trained_at_several_sizes(runtime: str) -> nn.Module:
    model = trained(runtime)
    for count in (64, 192, 256):
        model(rows(count)).backward()
    return model


def unwrapped(runtime: str) -> nn.Module:
    return planner.unwrap(trained(runtime))


def not_captured(runtime: str) -> nn.Module:
    model = planner.auto_wrap(DependingOnData(2), **grouped(runtime=runtime, **BUDGET))
    with suppress(CaptureError):
        model(rows(128)).backward()
    return model


WAYS = (planned, trained, trained_at_several_sizes, unwrapped, not_captured)
QUICK = [
    *product(["graph"], [trained_at_several_sizes, unwrapped]),
    *product(["modules", "regional"], [trained]),
    ("auto", not_captured),
]


@pytest.mark.filterwarnings("ignore:runtime 'modules'")
@pytest.mark.parametrize(("runtime", "way"), tiered(product(runtimes.names(), WAYS), quick=QUICK))
def test_a_model_is_freed(runtime: str, way: Callable[[str], nn.Module]) -> None:
    model = way(runtime)
    parts = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    gc.collect()  # the model, and with it what Dynamo names
    gc.collect()  # what hung on those names alone
    assert not any(part() is not None for part in parts)


IN_A_PROCESS_OF_ITS_OWN = """
import gc
from torch import fx
from tests.runtimes.test_freed import unwrapped

def alive():
    gc.collect()
    return sum(isinstance(kept, fx.GraphModule) for kept in gc.get_objects())

unwrapped("graph")
before = alive()
for _ in range(40):
    unwrapped("graph")
    now = alive()
assert now <= before + 4, (before, now)
"""


@pytest.mark.slow
def test_wrapping_again_and_again_holds_no_more_graphs() -> None:
    """What is left of each are notes of torch's own, of some hundred bytes."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_PROCESS_OF_ITS_OWN], check=True)


@pytest.mark.parametrize("runtime", tiered(["regional", "parts"], slow=["parts"]))
def test_what_was_captured_goes_with_the_plan(runtime: str) -> None:
    """A cycle through autograd's nodes is one that no collection sees."""
    counts = []
    for _ in range(3):
        unwrapped(runtime)
        gc.collect()
        counts.append(sum(type(each) is FakeTensor for each in gc.get_objects()))
    assert counts[1] == counts[2]
