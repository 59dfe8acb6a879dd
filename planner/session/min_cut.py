"""PyTorch's own min-cut partitioner, read back as schedules of our operations, to set beside plans.

It takes an ``activation_memory_budget``, a ratio, and decides what to save and in which order the backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from planner.capture.common_subexpressions import eliminate_common_subexpressions
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import min_cut_partition
from planner.errors import PlannerError
from planner.ir.schedule import Schedule
from planner.session.step import Options, captured, lower_step, study_lowered

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Values of ``activation_memory_budget`` that are tried."""


@dataclass(frozen=True)
class Partition:
    """The forward and backward graph that PyTorch's partitioner writes."""

    forward: fx.Graph
    backward: fx.Graph
    num_forward_outputs: int


def partition(joint: JointGraph, ratio: float) -> Partition:
    """Let PyTorch's partitioner split a joint graph under its own kind of budget; nothing is run."""
    module = fx.GraphModule(joint.module, eliminate_common_subexpressions(joint.module.graph))
    forward, backward = min_cut_partition(module, ratio, joint.num_forward_outputs)
    return Partition(forward.graph, backward.graph, joint.num_forward_outputs)


def read_schedule(split: Partition, lowered: LoweredGraph) -> Schedule:
    """Write PyTorch's two graphs as a schedule of our operations, in its own order.

    A node keeps its name in both graphs, so one that computes in both runs again. Views and the
    elements of tuples are no operations: what they look at is saved or made again with its owner.
    """
    index_of = {node.name: index for index, node in enumerate(lowered.operation_nodes) if node is not None}
    free = {node.name for node in lowered.alias_nodes}

    def runs(graph: fx.Graph) -> list[int]:
        names = [node.name for node in graph.nodes if node.op == "call_function"]
        if unknown := [name for name in names if name not in index_of and name not in free]:
            raise PlannerError(f"PyTorch's partitioner runs {unknown[0]}, which is no operation of the joint graph")
        return [index_of[name] for name in names if name in index_of]

    return Schedule((*runs(split.forward), lowered.graph.loss_index, *runs(split.backward)))


def schedules(model: nn.Module, inputs: Inputs, options: Options) -> Iterator[Schedule]:
    """Return what PyTorch's partitioner decides at each ratio, on the graph that :func:`planner.study` captures."""
    joint = captured(model, inputs, options)
    step = lower_step(model, joint, options)
    in_place = study_lowered(model, step, options).in_place
    assert in_place is not None
    for ratio in RATIOS:
        yield in_place.read(read_schedule(partition(joint, ratio), step.lowered))
