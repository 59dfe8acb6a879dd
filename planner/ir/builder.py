"""Builds a :class:`~planner.ir.graph.TrainingGraph`, operation by operation.

All three ways in (whole capture, recorded eager step, blocks) share it, so keys, loss, rounding of sizes and the tables
that lead back to fx nodes are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from planner.common.options import HELD, KEPT
from planner.common.units import round_up
from planner.ir import graph
from planner.ir.static_memory import LossMemory

Node = TypeVar("Node")

LOSS_WORKSPACE, LOSS_HELD = "loss workspace", "loss"
"""Names of the values that stand for the memory of a loss outside the graph."""

CPU_RANDOM_STATE_BYTES = 5056
"""Size of ``torch.get_rng_state()``: what a recomputed random operation keeps on a CPU. On CUDA the
state is a host tensor, so it costs nothing on the device."""


class Keys:
    """Hands out keys ``module|target|phase+occurrence``, which are stable between captures of a model."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def next(self, module: str, target: str, phase: graph.Phase) -> str:
        """Return the key of the next operation with this module, target and phase."""
        place = (module, target, phase[0])
        self._seen[place] += 1
        return f"{module}|{target}|{phase[0]}{self._seen[place] - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The surroundings that a step is lowered for.

    ``static_bytes`` are resident before it, by kind; ``kinds`` has the class of each callable module, by path; ``loss``
    is the memory of a loss outside the model. Random states count only if the planned memory is ``on_cpu``. Each
    gradient is spread over ``gradient_shards`` devices once complete. A step that ``finds_gradients`` adds to those of
    earlier backwards. ``outputs`` are dropped, held or kept; see :class:`planner.common.options.Training`.
    """

    alignment_bytes: int
    static_bytes: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    loss: LossMemory = field(default_factory=LossMemory)
    on_cpu: bool = True
    gradient_shards: int = 1
    finds_gradients: bool = False
    outputs: str = HELD


class GraphBuilder(Generic[Node]):
    """Adds values and operations, in base order; sizes are rounded up to what the allocator aligns to."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.keys = Keys()
        self.phase = graph.Phase.FORWARD
        self.operations: list[graph.Operation] = []
        self.values: list[graph.Value] = []
        self.made: set[int] = set()
        """Values that operations have made so far."""
        self.operation_nodes: list[Node | None] = []
        """For each operation the node it was made of; None if it has none in the model."""
        self.value_nodes: list[Node | None] = []
        self.kept: list[int] = []
        """Outputs of the last call, which its caller keeps until this one returns."""

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""
        return round_up(size_bytes, self.context.alignment_bytes)

    @property
    def random_state_bytes(self) -> int:
        """Bytes of planned memory that a recomputed random operation holds for its state."""
        return self.aligned(CPU_RANDOM_STATE_BYTES) if self.context.on_cpu else 0

    def add_value(
        self, name: str, size_bytes: int, *, kind: str = "activation", retained: bool = False, node: Node | None = None
    ) -> int:
        """Add a value with its size rounded up, and return its index."""
        value = graph.Value(name=name, size_bytes=self.aligned(size_bytes), kind=kind, retained=retained)
        return self._append_value(value, node)

    def _append_value(self, value: graph.Value, node: Node | None = None) -> int:
        self.values.append(value)
        self.value_nodes.append(node)
        return len(self.values) - 1

    def add(
        self,
        target: str,
        reads: Iterable[int] = (),
        makes: Iterable[int] = (),
        *,
        name: str,
        module: str = "",
        key: str = "",
        node: Node | None = None,
        dtype: str = "",
        **facts: Any,
    ) -> int:
        """Add an operation in the current phase, and return its index."""
        return self.append(
            graph.Operation(
                name=name,
                key=key or self.keys.next(module, target, self.phase),
                target=target,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=tuple(dict.fromkeys(makes)),
                phase=self.phase,
                module=module,
                dtype=dtype,
                **facts,
            ),
            node,
        )

    def append(self, operation: graph.Operation, node: Node | None = None) -> int:
        """Add an operation, and return its index."""
        self.operations.append(operation)
        self.made.update(operation.outputs)
        self.operation_nodes.append(node)
        return len(self.operations) - 1

    def add_loss_values(self) -> list[int]:
        """Add the memory of a loss outside the graph: its working memory, and what it holds to the end."""
        loss = self.context.loss
        # A value that nobody reads lives while the loss runs and no longer, if it is not retained.
        working = graph.Value(name=LOSS_WORKSPACE, size_bytes=loss.working_bytes)
        held = graph.Value(name=LOSS_HELD, size_bytes=self.aligned(loss.held_bytes), retained=True, kind="output")
        return [self._append_value(value) for value in (working, held) if value.size_bytes]

    def add_kept(self, sizes: Iterable[tuple[str, int, Node | None]]) -> None:
        """Add outputs of the last call by name, bytes and node, if the loop keeps them; before all other operations."""
        if self.context.outputs == KEPT:
            self.kept = [self.add_value(f"last {n}", size, kind="output", node=node) for n, size, node in sizes]
            self.add(graph.FOUND_TARGET, makes=self.kept, name="kept", recomputable=False)

    def add_loss(self, reads: Iterable[int], makes: Iterable[int]) -> int:
        """Add the operation between forward and backward; later operations belong to the backward."""
        if self.kept:
            self.add(graph.RETURNED_TARGET, self.kept, name="returned", recomputable=False)
        self.phase = graph.Phase.LOSS
        index = self.add(graph.LOSS_TARGET, reads, makes, name=graph.LOSS_NAME, key=graph.LOSS_KEY, recomputable=False)
        self.phase = graph.Phase.BACKWARD
        return index

    def finish(self) -> graph.TrainingGraph:
        """Return the finished graph."""
        return graph.TrainingGraph(
            operations=tuple(self.operations),
            values=tuple(self.values),
            static_bytes=dict(self.context.static_bytes),
            alignment_bytes=self.context.alignment_bytes,
            name=self.context.name,
            kinds=dict(self.context.kinds),
        )
