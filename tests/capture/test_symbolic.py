"""From a program with symbols to the program of given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Stopped, until_stopped
from planner.capture.symbolic import OtherProgramError, SizedFloat, SizedInt, Sizes, at_sizes
from planner.capture.torch_internals import with_symbolic_sizes
from tests.models import WIDTH, OneLinear, mean_square

aten = torch.ops.aten


class Scaled(OneLinear):
    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).flatten(0, 1) * x.shape[1] ** -0.5
        return mean_square(y.unflatten(0, (-1, x.shape[1]))[:, 0:] * weights)


def inputs(batch: int, length: int) -> Inputs:
    return Inputs((torch.randn(batch, length, WIDTH), torch.randn(batch, length, 1)), {})


@pytest.fixture(scope="module")
def captured() -> tuple[JointGraph, Sequence[Any]]:
    """Return a joint graph with symbols, and what it was captured with."""

    def stop(joint: JointGraph, given: Sequence[Any]) -> Any:
        raise Stopped((joint, given))

    asked = inputs(3, 5)
    with with_symbolic_sizes([(tensor, {0, 1}) for tensor in asked.tensors()]):
        found: tuple[JointGraph, Sequence[Any]] = until_stopped(Scaled(), asked, lambda _: None, make_program=stop)
    assert not any(hasattr(tensor, "_dynamo_weak_dynamic_indices") for tensor in asked.tensors())
    return found


def resized(given: Sequence[Any], batch: int, length: int) -> list[Any]:
    sizes = {3: batch, 5: length}
    return [
        sizes[x] if isinstance(x, int) else torch.zeros([sizes.get(n, n) for n in x.shape]) if x.dim() == 3 else x
        for x in given
    ]


def test_a_plain_graph_holds_no_symbol_and_no_slice_of_everything(captured: Any) -> None:
    joint, given = captured
    plain = at_sizes(joint, resized(given, 4, 7))
    targets = [node.target for node in plain.graph.nodes]
    assert aten.slice.Tensor not in targets and aten.slice_backward.default not in targets
    assert len(plain.placeholders) == len(plain.inputs) == len(plain.outputs[1])
    shapes = {tuple(node.meta["val"].shape) for node in plain.graph.nodes if hasattr(node.meta.get("val"), "shape")}
    assert (28, WIDTH) in shapes and (4, 7, 1) in shapes
    assert all(isinstance(size, int) for shape in shapes for size in shape)


def test_numbers_of_sizes_are_what_python_computes(captured: Any) -> None:
    joint, given = captured
    numbers = []
    for node in at_sizes(joint, given).graph.nodes:
        torch.fx.map_arg(node.args, lambda _: None)
        numbers += [x for x in torch.utils._pytree.tree_leaves(node.args) if isinstance(x, (SizedInt, SizedFloat))]
    assert {5**-0.5, 15} <= set(numbers)
    there = Sizes(joint, resized(given, 4, 7))
    computed = {here: there.number(here.made_by) for here in numbers}
    assert computed[5**-0.5] == 7**-0.5 and computed[15] == 28


def test_sizes_that_the_program_does_not_hold_for_are_refused(captured: Any) -> None:
    joint, given = captured
    wrong = [torch.zeros(4, 6, 1) if isinstance(x, torch.Tensor) and x.shape[-1] == 1 else x for x in given]
    with pytest.raises(OtherProgramError):
        at_sizes(joint, wrong)
    with pytest.raises(OtherProgramError, match="other arguments"):
        at_sizes(joint, given[1:])
