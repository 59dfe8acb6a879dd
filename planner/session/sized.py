"""Bytes of a captured step at new input sizes, by expressions in the symbols of its sizes.

The graph stays the same; bytes of values, resident memory and workspace follow from the sizes. A formula is a guess
until another specialized size confirms it: see :meth:`SizedStep.agrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from planner.analysis.study import Study
from planner.capture.fake_internals import without_data
from planner.capture.inputs import new_bytes
from planner.capture.joint import SYMBOLIC_VALUE, fake_mode_of
from planner.capture.model_facts import of_model
from planner.capture.symbolic import SizedFloat, SizedInt, Sizes, expression_of
from planner.capture.torch_internals import FakeTensorMode
from planner.common.units import round_up
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.in_place import joined
from planner.ir.static_memory import StaticMemory
from planner.measure.workspace import TO_RUN, of_calls
from planner.plans.plan import EagerStep, Plan
from planner.session.step import LoweredStep, PlannedStep, called_with, fingerprint_of


class UnknownSizeError(Exception):
    """No formula was found: the step is then specialized for each size."""


class _Call:
    """The call of a specialized step's node, at any sizes.

    How its tensors' layouts follow from sizes is found once; UnknownSizeError if one does not.
    """

    def __init__(self, node: fx.Node, known: Sizes) -> None:
        mode, graph = fake_mode_of(node.graph), fx.Graph()
        self._values: list[tuple[fx.Node, Any]] = []
        copies: dict[fx.Node, fx.Node] = {}

        def copied(source: fx.Node) -> fx.Node:
            if source not in copies:
                copies[source] = graph.placeholder(source.name)
                self._values.append((copies[source], _sized(source, known, mode)))
            return copies[source]

        self._arguments = fx.map_arg((node.args, node.kwargs), copied)
        self._node = graph.call_function(node.target, *self._arguments)  # type: ignore[arg-type]
        self._values.append((self._node, _sized(node, known, mode)))

    def at(self, sizes: Sizes) -> fx.Node:
        """Return the call at some sizes, as a node that the next use of this changes; UnknownSizeError as above."""

        def number(argument: Any) -> Any:
            return sizes.number(argument.made_by) if isinstance(argument, (SizedInt, SizedFloat)) else argument

        for node, value in self._values:
            node.meta["val"] = map_aggregate(value, lambda one: one.at(sizes) if isinstance(one, _Layout) else one)
        self._node.args, self._node.kwargs = map_aggregate(self._arguments, number)
        return self._node


def _sized(node: fx.Node, known: Sizes, mode: FakeTensorMode) -> Any:
    """Return a node's value with layouts in place of tensors."""

    def layouts(plain: Any, symbolic: Any) -> Any:
        if isinstance(plain, (list, tuple)):
            return type(plain)(layouts(a, b) for a, b in zip(plain, symbolic, strict=True))
        return _Layout.of(plain, symbolic, known, mode) if isinstance(plain, Tensor) else plain

    return layouts(node.meta["val"], node.meta.get(SYMBOLIC_VALUE))


@dataclass(frozen=True, eq=False)
class _Layout:
    """Shape and strides of a tensor as expressions in sizes."""

    plain: Tensor
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    """None along a dimension of one element: the stride that makes the layout dense."""
    mode: FakeTensorMode

    @classmethod
    def of(cls, plain: Tensor, symbolic: Any, known: Sizes, mode: FakeTensorMode) -> _Layout:
        """Find the layout of a tensor that exists at known sizes.

        Along a dimension of one element, kernels may choose another stride than symbolic tracing: the dense one, or 0
        if a number was expanded. Any other stride that differs raises UnknownSizeError.
        """
        if not isinstance(symbolic, Tensor):
            raise UnknownSizeError("a kernel lays its result out in its own way")
        shape = tuple(map(expression_of, symbolic.shape))
        if [*map(known.of, shape)] != [*plain.shape]:
            raise UnknownSizeError("a kernel gives a result of a size of its own")
        strides = []
        for d, (made, stride) in enumerate(zip(plain.stride(), map(expression_of, symbolic.stride()), strict=True)):
            if known.of(stride) == made:
                strides.append(stride)
            elif plain.shape[d] == 1 and made == _whole(plain.shape, plain.stride(), d + 1):
                strides.append(None)
            elif shape[d] == 1 and made == 0:
                strides.append(0)
            else:
                raise UnknownSizeError("a kernel lays its result out in its own way")
        return cls(plain, shape, tuple(strides), mode)

    def at(self, sizes: Sizes) -> Tensor:
        """Return a fake tensor of this layout at some sizes."""
        plain, shape = self.plain, [*map(sizes.of, self.shape)]
        strides = [0] * len(shape)
        for d in reversed(range(len(shape))):
            if self.strides[d] is not None:
                strides[d] = sizes.of(self.strides[d])
            elif shape[d] == 1:
                strides[d] = _whole(shape, strides, d + 1)
            else:
                raise UnknownSizeError("a kernel lays its result out in its own way")
        if shape == [*plain.shape] and strides == [*plain.stride()]:
            return plain
        return without_data(self.mode, shape, strides, plain.dtype, plain.device)


def _whole(shape: Sequence[int], strides: Sequence[int], dimension: int) -> int:
    """Return the extent of a dimension in memory; 1 beyond the last."""
    return shape[dimension] * strides[dimension] if dimension < len(shape) else 1


@dataclass(frozen=True, eq=False)
class SizedStep:
    """One planned step, with formulas for its bytes at other sizes."""

    model: nn.Module
    step: LoweredStep
    study: Study
    sizes: Sizes
    """Sizes that the step was specialized for."""

    def at(self, given: Sequence[Any], sizes: Sizes, eager: EagerStep | None = None) -> tuple[LoweredStep, Study]:
        """Return the step and its study at other sizes, with the operations of the known ones.

        UnknownSizeError if a formula is missing, as where a kernel saves a buffer whose size only it knows: it must not
        run on one of another size.
        """
        lowered = self.step.lowered
        joint = replace(lowered.joint, inputs=[x for x in given if isinstance(x, Tensor)])
        around = self._around(self.inputs(joint.inputs))
        graph = replace(lowered.graph.with_sizes(self._values_bytes(sizes)), static_bytes=dict(around.static_bytes))
        step = replace(self.step, lowered=replace(lowered, graph=graph, joint=joint), static_memory=around)
        costs = _scaled(self.study.ways.single_costs, lowered.graph, graph, self._workspaces(sizes))
        in_place = joined(graph, step.may_overwrite, costs)
        study = replace(
            self.study,
            graph=in_place.graph,
            costs=in_place.costs(costs),
            in_place=in_place,
            origin=replace(
                self.study.origin, fingerprint=fingerprint_of(self.model, step), capture_seconds=0.0, eager=eager
            ),
            static_memory=around,
        )
        return step, study

    def planned(
        self, given: Sequence[Any], sizes: Sizes, eager: EagerStep | None, plan_study: Callable[[Study], Plan]
    ) -> PlannedStep:
        """Plan the step at other sizes, with eager's peak there."""
        step, study = self.at(given, sizes, eager)
        return PlannedStep.of(step, study, plan_study(study))

    def agrees(self, other: SizedStep, given: Sequence[Any]) -> bool:
        """Whether the formulas give another specialized step exactly."""
        try:
            _, study = self.at(given, other.sizes)
        except UnknownSizeError:
            return False

        def facts(of: Study) -> tuple[Any, ...]:
            graph, workspaces_bytes = of.graph, [cost.workspace_bytes for cost in of.costs]
            runs = [(o.key, o.inputs, o.outputs, o.then, o.state_bytes, o.recomputable) for o in graph.operations]
            return runs, graph.values, graph.static_bytes, of.static_memory, workspaces_bytes

        return facts(study) == facts(other.study)

    # Bytes of values.

    @cached_property
    def _formulas(self) -> tuple[Any, ...]:
        """For each value, an expression of its bytes, or a number."""
        lowered = self.step.lowered
        makers = [lowered.operation_nodes[index] for index in lowered.graph.producer]
        nodes = [*lowered.value_nodes, *[None] * (len(makers) - len(lowered.value_nodes))]
        return tuple(
            self._formula(value.size_bytes, node or maker)
            for value, node, maker in zip(lowered.graph.values, nodes, makers, strict=True)
        )

    def _formula(self, size_bytes: int, node: fx.Node | None) -> Any:
        for expression in _sizes_about(node):
            if self._rounded(self.sizes.of(expression)) == size_bytes:
                return expression
        return size_bytes

    def _values_bytes(self, sizes: Sizes) -> list[int]:
        known = {expression: self._rounded(sizes.of(expression)) for expression in set(self._formulas)}
        return [known[expression] for expression in self._formulas]

    def _rounded(self, size_bytes: int) -> int:
        return round_up(size_bytes, self.step.lowered.graph.alignment_bytes)

    def _around(self, inputs: Sequence[Tensor]) -> StaticMemory:
        """Return the resident memory with these inputs."""
        around, alignment = self.step.static_memory, self.step.lowered.graph.alignment_bytes
        now = {id(tensor): tensor for tensor in inputs}
        sizes = around.tensor_bytes
        if len(sizes) > 1:
            of_inputs = [self._rounded(tensor.nbytes) for tensor in now.values()]
            sizes = (*sizes[: len(sizes) - 1 - len(of_inputs)], *of_inputs, sizes[-1])
        resident = {**around.static_bytes, "inputs": new_bytes(inputs, set(), alignment)}
        return replace(around, static_bytes=resident, tensor_bytes=sizes)

    def inputs(self, given: Sequence[Any]) -> list[Tensor]:
        """Return the model's inputs among all that the program is given; the rest are parameters and buffers."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        return [tensors[position] for position in self._positions]

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        joint = self.step.lowered.joint
        asked = {id(tensor) for tensor in called_with(self.model, joint)}
        return tuple(at for at, tensor in enumerate(joint.inputs) if id(tensor) in asked)

    # What operations cost.

    def _workspaces(self, sizes: Sizes) -> list[int]:
        """Return each operation's workspace, measured again if it had some."""
        signatures, calls = self._with_workspace
        measured = of_calls([call.at(sizes) for call in calls.values()], of_model(self.model), TO_RUN)
        found = dict(zip(calls, measured, strict=True))
        operations = self.step.lowered.graph.operations
        workspaces_bytes = [cost.workspace_bytes for cost in self.study.ways.single_costs]
        for index, text in signatures.items():
            workspaces_bytes[index] = (found[text] or 0) + operations[index].state_bytes
        return workspaces_bytes

    @cached_property
    def _with_workspace(self) -> tuple[dict[int, str], dict[str, _Call]]:
        """Operations with workspace: signatures by index, and one call of each signature."""
        lowered, costs, signatures = self.step.lowered, self.study.ways.single_costs, {}
        for index, (operation, cost) in enumerate(zip(lowered.graph.operations, costs, strict=True)):
            if operation.signature and cost.workspace_bytes > operation.state_bytes:
                signatures[index] = operation.signature
        nodes = {text: lowered.operation_nodes[index] for index, text in signatures.items()}
        return signatures, {text: _Call(node, self.sizes) for text, node in nodes.items() if node is not None}


def _sizes_about(node: fx.Node | None) -> Iterator[Any]:
    """Yield expressions that may be the bytes of a node's value: of its own result, or of what it reads."""
    if node is None:
        return
    read = list(node.all_input_nodes)
    for one in (node, *read, *(deeper for source in read for deeper in source.all_input_nodes)):
        yield from _sizes_of(one)


def _sizes_of(node: fx.Node) -> Iterator[Any]:
    """Yield expressions for the bytes of a node's results: of the storage, and of the tensor."""
    recorded = node.meta.get(SYMBOLIC_VALUE, node.meta.get("val"))
    for tensor in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
        if isinstance(tensor, Tensor):
            yield expression_of(tensor.untyped_storage().nbytes())
            yield expression_of(tensor.numel() * tensor.element_size())


def _scaled(
    costs: Sequence[OperationCost], before: TrainingGraph, now: TrainingGraph, workspaces_bytes: Sequence[int]
) -> tuple[OperationCost, ...]:
    """Return costs with times scaled by the bytes that operations touch, and with other workspaces."""
    made = []
    for operation, cost, workspace_bytes in zip(before.operations, costs, workspaces_bytes, strict=True):
        touched = (*operation.inputs, *operation.outputs)
        old_bytes = sum(before.values[value].size_bytes for value in touched)
        scale = sum(now.values[value].size_bytes for value in touched) / old_bytes if old_bytes else 1.0
        seconds, cold_seconds = cost.seconds * scale, cost.cold_seconds * scale
        made.append(replace(cost, seconds=seconds, cold_seconds=cold_seconds, workspace_bytes=workspace_bytes))
    return tuple(made)
