"""Builds a :class:`~planner.ir.graph.TrainingGraph`, operation by operation.

Whichever way a step comes in (captured whole, recorded as eager runs it, or by blocks), its keys, its loss, the
rounding of its sizes and the way back to what its operations were made of are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from planner.common.units import round_up
from planner.ir.graph import LOSS_KEY, LOSS_NAME, LOSS_TARGET, Operation, Phase, TrainingGraph, Value
from planner.ir.static_memory import LossMemory

Node = TypeVar("Node")

CPU_RANDOM_STATE_BYTES = 5056
"""Size of ``torch.get_rng_state()``: what a recomputed random operation keeps on a CPU. On CUDA the
state is a host tensor, so it costs nothing on the device."""


class Keys:
    """Hands out keys ``module|target|phase+occurrence``, the same for the same model each time."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def next(self, module: str, target: str, phase: Phase) -> str:
        """Return the key of the next operation with this module, target and phase."""
        place = (module, target, phase[0])
        self._seen[place] += 1
        return f"{module}|{target}|{phase[0]}{self._seen[place] - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a step is lowered for, beside what runs in it.

    ``static_bytes`` are resident before it, by kind; ``kinds`` is the class of each module that can be called, by its
    path; ``loss`` is what a loss outside the model takes. Random states take the memory that is planned if that is
    ``on_cpu``. Each gradient is spread over ``gradient_shards`` devices once it is there. Where a step
    ``finds_gradients``, those of earlier backwards are there.
    """

    alignment_bytes: int
    static_bytes: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    loss: LossMemory = field(default_factory=LossMemory)
    on_cpu: bool = True
    gradient_shards: int = 1
    finds_gradients: bool = False


class GraphBuilder(Generic[Node]):
    """Adds values and operations, in base order; sizes are rounded up to what the allocator aligns to."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.keys = Keys()
        self.phase = Phase.FORWARD
        self.operations: list[Operation] = []
        self.values: list[Value] = []
        self.made: set[int] = set()
        """Values that an operation has made by now."""
        self.operation_nodes: list[Node | None] = []
        """What operations were made of; None where nothing of the model stands behind one."""
        self.value_nodes: list[Node | None] = []

    def aligned(self, size_bytes: int) -> int:
        """Round a size up as the allocator does."""
        return round_up(size_bytes, self.context.alignment_bytes)

    @property
    def random_state_bytes(self) -> int:
        """What a random operation that is to run again keeps of the memory that is planned."""
        return self.aligned(CPU_RANDOM_STATE_BYTES) if self.context.on_cpu else 0

    def add_value(
        self, name: str, size_bytes: int, *, kind: str = "activation", retained: bool = False, node: Node | None = None
    ) -> int:
        """Add a value, whose size is rounded up, and give its index."""
        value = Value(name=name, size_bytes=self.aligned(size_bytes), kind=kind, retained=retained)
        return self._append_value(value, node)

    def _append_value(self, value: Value, node: Node | None = None) -> int:
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
        node: Node | None = None,
        dtype: str = "",
        **facts: Any,
    ) -> int:
        """Add an operation of the phase that the step is in, and give its index."""
        return self.append(
            Operation(
                name=name,
                key=self.keys.next(module, target, self.phase),
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

    def append(self, operation: Operation, node: Node | None = None) -> int:
        """Add an operation as it is, and give its index."""
        self.operations.append(operation)
        self.made.update(operation.outputs)
        self.operation_nodes.append(node)
        return len(self.operations) - 1

    def add_loss_values(self) -> list[int]:
        """Add what a loss outside the graph takes: what it works with, and what stays behind it."""
        loss = self.context.loss
        # A value that nobody reads lives while the loss runs and no longer, if it is not retained.
        working = Value(name="loss workspace", size_bytes=loss.working_bytes)
        held = Value(name="loss", size_bytes=self.aligned(loss.held_bytes), retained=True, kind="output")
        return [self._append_value(value) for value in (working, held) if value.size_bytes]

    def add_loss(self, reads: Iterable[int], makes: Iterable[int]) -> int:
        """Add the operation between forward and backward; what comes next is of the backward."""
        self.phase = Phase.BACKWARD
        return self.append(
            Operation(
                name=LOSS_NAME,
                key=LOSS_KEY,
                target=LOSS_TARGET,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=tuple(makes),
                phase=Phase.LOSS,
                recomputable=False,
                dtype="",
            )
        )

    def finish(self) -> TrainingGraph:
        """Return the graph of what was added."""
        return TrainingGraph(
            operations=tuple(self.operations),
            values=tuple(self.values),
            static_bytes=dict(self.context.static_bytes),
            alignment_bytes=self.context.alignment_bytes,
            name=self.context.name,
            kinds=dict(self.context.kinds),
        )
