"""Planning a pipeline from a model: capture one micro-batch, cut it, count what each device holds, plan."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from planner.capture.inputs import Inputs, LossFunction, check_module
from planner.capture.lowering import LoweredGraph
from planner.capture.torch_internals import GIVES_GRADIENTS_AWAY, storage_id
from planner.common.options import Search, Target, Training
from planner.common.units import Size
from planner.errors import UsageError
from planner.extras.pipelines.devices import make_pipeline_plan
from planner.extras.pipelines.plan import PipelinePlan
from planner.extras.pipelines.schedules import PipelineSchedule
from planner.extras.pipelines.stages import Stage, cut
from planner.ir.in_place import joined
from planner.ir.static_memory import LossMemory, StaticMemory
from planner.measure.resident import static_memory
from planner.session.step import Options, captured, cost, lower_step, origin_of, with_loss


def plan_pipeline(
    model: nn.Module,
    inputs: Any = None,
    *,
    budget: Size,
    stages: int,
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    loss_fn: LossFunction | None = None,
    training: Training | str = Training(),
    search: Search | str = Search(),
    target: Target | str = Target(),
    name: str = "",
) -> PipelinePlan:
    """Plan every stage of a pipeline under a memory budget for each device; nothing is run.

    Parameters
    ----------
    model : torch.nn.Module
        Whole. Its layers are cut into stages whose forwards take about equally long.
    inputs : tensor, tuple, dict or Inputs
        Those of one micro-batch.
    budget : int, float or str
        What each device may hold; ``"60%"`` is of the highest peak of a device without recompute.
    stages : int
        How many devices stand in a row.
    micro_batches : int
        Of one training step.
    schedule : str
        ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``; see :mod:`planner.extras.pipelines.schedules`.
    chunks : int
        Groups of layers on each device, 2 or more for ``"interleaved"``.
    loss_fn, target, name
        See :func:`planner.plan`.
    training : str or Training
        See :func:`planner.plan`; ``data_parallel`` is ``"none"`` or ``"ddp"``.
    search : str or Search
        See :func:`planner.plan`; the time limit is for each device.

    Returns
    -------
    PipelinePlan

    Raises
    ------
    UsageError
        If an argument is wrong, or there are more stages than layers.
    CaptureError
        If the model cannot be captured as one graph.
    InfeasibleBudgetError
        If some stage has no plan, with the smallest budget that is known to be enough.

    Examples
    --------
    >>> import torch
    >>> from planner.extras.pipelines import plan_pipeline
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> made = plan_pipeline(model, torch.randn(256, 64), budget="1GiB", stages=2, micro_batches=4,
    ...                              loss_fn=lambda output: output.sum())
    >>> [stage.micro_batches_in_flight for stage in made.stages]
    [2, 1]
    """
    options = Options.of(locals(), loss=LossMemory())
    pipeline = PipelineSchedule(stages=stages, micro_batches=micro_batches, name=schedule, chunks=chunks)
    training = options.training
    if training.data_parallel == "fsdp2":
        raise UsageError("fsdp2 inside a pipeline is not planned: use Training(data_parallel='ddp'), or no pipeline")
    whole = WholeStep(model, Inputs.of(inputs), loss_fn, options)
    parts = cut(whole.graph, whole.costs, stages * chunks, holds_received=not GIVES_GRADIENTS_AWAY)
    devices = [parts[index::stages] for index in range(stages)]
    costing, step = whole.costing, whole.step
    origin = origin_of(costing, step.spec, capture_seconds=whole.seconds, warnings=(*costing.warnings, *step.warnings))
    around = _surroundings(model, whole, devices, training, micro_batches)
    return make_pipeline_plan(devices, around, pipeline, budget=budget, search=options.search, origin=origin)


class WholeStep:
    """A step of a whole model, captured with nothing around it, to be cut: its graph, costs, and what it reads."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss_fn: LossFunction | None, options: Options) -> None:
        check_module(model)
        begun = time.perf_counter()
        options = with_loss(model, replace(options, training=Training()), loss_fn, inputs)
        self.step = lower_step(model, captured(model, inputs, options), options)
        self.costing = cost(model, self.step.lowered, self.step.spec, options)
        in_place = joined(self.step.lowered.graph, self.step.may_overwrite, self.costing.costs)
        self.graph, self.costs = in_place.graph, in_place.costs(self.costing.costs)
        single = _storages_read(self.step.lowered)
        self._reads = [set[int]().union(*(single[part] for part in parts)) for parts in in_place.parts]
        self.seconds = time.perf_counter() - begun

    def storages_read(self, stages: Sequence[Stage]) -> set[int]:
        """Return the storages of the step's inputs that stages read, directly or through views."""
        operations = (index for stage in stages for index in stage.operations if index < len(self._reads))
        return set[int]().union(*(self._reads[index] for index in operations))


def _surroundings(
    model: nn.Module, whole: WholeStep, devices: Sequence[Sequence[Stage]], training: Training, micro_batches: int
) -> list[StaticMemory]:
    """Count for each device the parameters that its operations read, their optimizer state, and its inputs."""
    read_by = [whole.storages_read(chunks) for chunks in devices]
    of_model = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    unread = of_model.difference(*read_by)
    found = []
    for device, own in enumerate(read_by):
        part = part_of(model, own if device else own | unread)  # what none reads is on the first
        inputs = [tensor for tensor in whole.step.lowered.joint.inputs if storage_id(tensor) in own - of_model]
        around = static_memory(part, inputs, whole.step.spec, training)
        static_bytes = {**around.static_bytes, "inputs": around.static_bytes["inputs"] * micro_batches}
        found.append(replace(around, static_bytes=static_bytes))
    return found


def part_of(model: nn.Module, storages: Container[int]) -> nn.Module:
    """Return a module that holds a model's parameters and buffers of these storages."""
    part = nn.Module()
    for number, parameter in enumerate(model.parameters()):
        if storage_id(parameter) in storages:
            part.register_parameter(f"parameter{number}", parameter)
    for number, buffer in enumerate(model.buffers()):
        if storage_id(buffer) in storages:
            part.register_buffer(f"buffer{number}", buffer)
    return part


def _storages_read(lowered: LoweredGraph) -> list[set[int]]:
    """Return for each operation the storages of the step's inputs that it reads."""
    given = zip(lowered.joint.placeholders, lowered.joint.inputs, strict=True)
    looks_at: dict[fx.Node, set[int]] = {node: {storage_id(tensor)} for node, tensor in given}

    def read(node: fx.Node) -> set[int]:
        return set[int]().union(*(looks_at.get(source, set()) for source in node.all_input_nodes))

    for node in lowered.joint.graph.nodes:
        if node in lowered.alias_nodes:
            looks_at[node] = read(node)
    return [read(node) if node is not None else set() for node in lowered.operation_nodes]
