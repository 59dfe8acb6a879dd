"""A planned step as a formula: what a capture with symbols, made plain for some sizes, says of all others.

The graph stays; the bytes of its values, what is resident, and the workspace of its kernels are those of the sizes at
hand. A formula is a guess until another size, made plain too, was found to be what it says: see :meth:`agrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from planner.analysis.study import Study
from planner.capture.device import of_model
from planner.capture.expressions import expression_of
from planner.capture.inputs import new_bytes
from planner.capture.joint import is_cudnn_rnn
from planner.capture.recurrent import is_onednn_lstm
from planner.capture.symbolic import SYMBOLIC_VALUE, Sizes
from planner.common import timings
from planner.common.units import round_up
from planner.ir.graph import OperationCost
from planner.ir.in_place import joined
from planner.ir.resized import resized, scaled
from planner.ir.static_memory import StaticMemory
from planner.measure.workspace import TO_RUN, of_calls
from planner.plans.plan import EagerStep, Plan
from planner.session.sized_calls import SizedCalls, UnknownSizeError
from planner.session.sized_eager import RecordedAt, SizedEager
from planner.session.step import LoweredStep, PlannedStep, called_with, fingerprint_of


@dataclass(frozen=True, eq=False)
class SizedStep:
    """One planned step, and how its bytes follow from sizes."""

    model: nn.Module
    step: LoweredStep
    study: Study
    sizes: Sizes
    """At which the step was made plain."""

    def learn_eager(self, step: Study, sizes: Sizes) -> None:
        """Take a recording of eager's own step at some sizes into account."""
        self._eager.learn(RecordedAt(step, sizes, self._workspaces_of_all(sizes)))

    def eager_at(self, given: Sequence[Any], sizes: Sizes) -> EagerStep | None:
        """Return what eager's step needs for what the program is given; None if only a recording can say that."""
        inputs_bytes = self._around(self.inputs(given)).static_bytes["inputs"]
        return self._eager.at(sizes, inputs_bytes, self._workspaces_of_all(sizes))

    @cached_property
    def _eager(self) -> SizedEager:
        nodes = self.step.lowered.joint.graph.nodes
        return SizedEager({expression for node in nodes for expression in _sizes_of(node)})

    def lowered_at(self, given: Sequence[Any], sizes: Sizes) -> LoweredStep:
        """Return the step for what the program is given, its operations as they were at the sizes that are known.

        UnknownSizeError if a kernel keeps what no formula says: with the bytes of other sizes it would run astray.
        """
        if self._asks_kernels:
            raise UnknownSizeError("only a kernel says how much it keeps")
        values_bytes = self._values_bytes(sizes)
        lowered = self.step.lowered
        joint = replace(lowered.joint, inputs=[x for x in given if isinstance(x, Tensor)])
        around = self._around(self.inputs(joint.inputs))
        graph = resized(lowered.graph, values_bytes, around.static_bytes)
        return replace(self.step, lowered=replace(lowered, graph=graph, joint=joint), static_memory=around)

    def at(self, given: Sequence[Any], sizes: Sizes, eager: EagerStep | None = None) -> tuple[LoweredStep, Study]:
        """Return the step and its study for what the program is given; UnknownSizeError if no formula says them."""
        step = self.lowered_at(given, sizes)
        graph, around = step.lowered.graph, step.static_memory
        costs = scaled(self._single_costs, self.step.lowered.graph, graph, self._workspaces_of_all(sizes))
        in_place = joined(graph, step.may_overwrite, costs, self.study.in_place)
        study = replace(
            self.study,
            graph=in_place.graph,
            costs=in_place.costs(costs),
            in_place=in_place,
            origin=replace(
                self.study.origin,
                fingerprint=fingerprint_of(self.model, step),
                capture_seconds=0.0,
                eager=eager,
            ),
            static_memory=around,
        )
        return step, study

    @timings.stage("lowering")
    def planned(
        self, given: Sequence[Any], sizes: Sizes, eager: EagerStep | None, plan_study: Callable[[Study], Plan]
    ) -> PlannedStep:
        """Plan the step for what the program is given, with what eager's needs there."""
        step, study = self.at(given, sizes, eager)
        plan = plan_study(study)
        assert study.in_place is not None
        schedule = study.in_place.carried_out(plan.schedule_for(study.graph))
        return PlannedStep(step.lowered, study.costs, plan, schedule, study.in_place.over, step, study)

    def agrees(self, other: SizedStep, given: Sequence[Any]) -> bool:
        """Whether what is said here of the sizes of another step is what that is."""
        try:
            _, study = self.at(given, other.sizes)
        except UnknownSizeError:
            return False
        mine, theirs = study.graph, other.study.graph
        return (
            [(o.key, o.inputs, o.outputs, o.then, o.state_bytes, o.recomputable) for o in mine.operations]
            == [(o.key, o.inputs, o.outputs, o.then, o.state_bytes, o.recomputable) for o in theirs.operations]
            and mine.values == theirs.values
            and mine.static_bytes == theirs.static_bytes
            and study.static_memory == other.study.static_memory
            and [c.workspace_bytes for c in study.costs] == [c.workspace_bytes for c in other.study.costs]
        )

    @property
    def _single_costs(self) -> tuple[OperationCost, ...]:
        assert self.study.in_place is not None
        return self.study.in_place.single_costs

    # Bytes of values.

    @cached_property
    def _asks_kernels(self) -> bool:
        targets = {node.target for node in self.step.lowered.operation_nodes if node is not None}
        return any(is_cudnn_rnn(target) or is_onednn_lstm(target) for target in targets)

    @cached_property
    def _formulas(self) -> tuple[Any, ...]:
        """For each value, its bytes in symbols."""
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
        """Return what is resident, with these inputs."""
        around, alignment = self.step.static_memory, self.step.lowered.graph.alignment_bytes
        now = {id(tensor): tensor for tensor in inputs}
        sizes = around.tensor_bytes
        if len(sizes) > 1:
            of_inputs = [self._rounded(tensor.nbytes) for tensor in now.values()]
            sizes = (*sizes[: len(sizes) - 1 - len(of_inputs)], *of_inputs, sizes[-1])
        resident = {**around.static_bytes, "inputs": new_bytes(inputs, set(), alignment)}
        return replace(around, static_bytes=resident, tensor_bytes=sizes)

    def inputs(self, given: Sequence[Any]) -> list[Tensor]:
        """Return what the model is called with, of all that the program is given: parameters and buffers stay."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        return [tensors[position] for position in self._positions]

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        joint = self.step.lowered.joint
        asked = {id(tensor) for tensor in called_with(self.model, joint)}
        return tuple(at for at, tensor in enumerate(joint.inputs) if id(tensor) in asked)

    # What operations cost.

    def _workspaces_of_all(self, sizes: Sizes) -> list[int]:
        """Return what each operation needs, measured where there was some."""
        measured = self._workspaces(sizes)
        return [measured.get(index, cost.workspace_bytes) for index, cost in enumerate(self._single_costs)]

    def _workspaces(self, sizes: Sizes) -> dict[int, int]:
        """Measure the workspace of what has some."""
        signatures, texts, calls = self._with_workspace
        found = dict(zip(texts, of_calls([*calls.at(sizes)], of_model(self.model), TO_RUN), strict=True))
        operations = self.step.lowered.graph.operations
        return {index: (found[text] or 0) + operations[index].state_bytes for index, text in signatures.items()}

    @cached_property
    def _with_workspace(self) -> tuple[dict[int, str], list[str], SizedCalls]:
        """Operations whose kernels need some, by index, as signatures; these, each once; and a call of each."""
        lowered, signatures = self.step.lowered, {}
        for index, (operation, cost) in enumerate(zip(lowered.graph.operations, self._single_costs, strict=True)):
            if operation.signature and cost.workspace_bytes > operation.state_bytes:
                signatures[index] = operation.signature
        nodes = {text: lowered.operation_nodes[index] for index, text in signatures.items()}
        calls = {text: node for text, node in nodes.items() if node is not None}
        return signatures, [*calls], SizedCalls(calls.values(), self.sizes)


def _sizes_about(node: fx.Node | None) -> Iterator[Any]:
    """Return, in symbols, bytes that a value made by a node may have: its own, or those of what the node reads."""
    if node is None:
        return
    read = list(node.all_input_nodes)
    for one in (node, *read, *(deeper for source in read for deeper in source.all_input_nodes)):
        yield from _sizes_of(one)


def _sizes_of(node: fx.Node) -> Iterator[Any]:
    """Return, in symbols, the bytes of what a node makes: of the memory, and of what is seen of it."""
    recorded = node.meta.get(SYMBOLIC_VALUE, node.meta.get("val"))
    for tensor in recorded if isinstance(recorded, (list, tuple)) else [recorded]:
        if isinstance(tensor, Tensor):
            yield expression_of(tensor.untyped_storage().nbytes())
            yield expression_of(tensor.numel() * tensor.element_size())
