"""The training step as plain data: operations in their base order and the storages they make.

Nothing here imports torch. ``planner.capture.lowering`` builds a :class:`TrainingGraph` from a joint fx
graph; tests and other people build one by hand.

A *value* is a storage: aliases and views share one and cost nothing. What is resident for the
whole step (parameters, buffers, the caller's inputs) is no value; it is counted once, in
``static_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from cost_models.base import OperationCost as OperationCost
from planner.errors import UsageError

LOSS_NAME = "loss"
LOSS_TARGET = "the loss and what runs outside the captured graph"

ACCUMULATE_TARGET = "copies of gradients that autograd cannot take over as they are"

FOUND_TARGET = "found"
"""Target of the operation that makes values left by earlier steps, before all others."""

RETURNED_TARGET = "returned"
"""Target of what stands for the moment at which a call returns, if outputs of the last one are kept until then."""

LOSS_KEY = f"|{LOSS_NAME}|l0"


def named_by(key: str) -> tuple[str, str]:
    """Return the module and the operator that an operation's key names.

    >>> named_by("h.0.mlp|aten.mm.default|f0"), operator_name("aten.mm.default"), operator_name("given")
    (('h.0.mlp', 'aten.mm.default'), 'mm', 'given')
    """
    module, _, rest = key.partition("|")
    return module, rest.partition("|")[0]


def chooses(target: str) -> bool:
    """Whether an operator chooses by value, as a router does which expert gets a row.

    It runs once: logits that are recomputed with other last bits could choose differently, and gradients would be of
    other experts (transformers issue 47467).
    """
    return operator_name(target) in ("topk", "sort", "argmax")


def operator_name(target: str) -> str:
    """Return an operator's own name."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


class Phase(StrEnum):
    """Where in the step an operation belongs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage made during the step, under a name that is unique."""

    name: str
    size_bytes: int
    """As the allocator rounds it."""
    retained: bool = False
    """Held until the step ends whatever the plan says: model outputs, gradients, tangents."""
    kind: str = "activation"
    """What the anatomy of the peak calls it: that, ``"output"``, ``"tangent"``, or ``"gradient"`` of a parameter or
    input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel of the step (several for a library call), reading and making values, under a name that is unique.

    What a cost model reads of it is described in :class:`cost_models.CostedOperation`.
    """

    name: str
    key: str
    """``module|target|phase+occurrence``: stable between captures of one model; what plan files use."""
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Indices of the values read and made. Resident storages do not appear."""
    phase: Phase = Phase.FORWARD
    module: str = ""
    """Path of the module that it comes from, ``""`` for the model itself."""
    source: str = ""
    """``file:line`` of the user's code, ``""`` if unknown."""
    recomputable: bool = True
    """Whether running it again gives the same bits."""
    state_bytes: int = 0
    """What must be kept from its first run to its last if it runs more than once (random state)."""
    flops: int = 0
    moved_bytes: int = 0
    dtype: str = "float32"
    signature: str = ""
    region: str = ""
    """What it is compiled with, if that is not the whole step: it is recomputed only while its region runs."""
    then: tuple[tuple[str, int], ...] = ()
    """What is one operation with it, and runs right after it: keys, and which of its outputs each writes over."""
    again: bool = False
    """Whether the model's own backward computes it again, and saves nothing of it."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that it comes from: one, but for operations that are one with others."""
        return (self.module, *(named_by(key)[0] for key, _ in self.then))

    @property
    def keys(self) -> tuple[str, ...]:
        """Its key, and those of what is one operation with it, in the order in which they run."""
        return (self.key, *(key for key, _ in self.then))

    def made_by(self, output: int) -> tuple[str, int]:
        """Return the key of what made one of its outputs, and which of that one's outputs it is."""
        last = next((key for key, over in reversed(self.then) if over == output), None)
        return (self.key, output) if last is None else (last, 0)


@dataclass(frozen=True, kw_only=True)
class TrainingGraph:
    """Operations, each once as the unplanned step runs them, and their values; UsageError if that does not fit."""

    operations: tuple[Operation, ...]
    """Base order: forward, then the loss, then backward."""
    values: tuple[Value, ...]
    """Every value is made by exactly one operation, before any operation that reads it."""
    static_bytes: dict[str, int] = field(default_factory=dict)
    """What is resident before the step, by kind (``parameters``, ``buffers``, ``inputs``, ...)."""
    alignment_bytes: int = 1
    """What sizes were rounded up to."""
    name: str = ""
    kinds: dict[str, str] = field(default_factory=dict)
    """By its path, the class of each module that can be called; empty where that is not known."""
    runs_after: Mapping[int, tuple[int, ...]] | None = None
    """For an operation, earlier ones that must stay before it beside those that make what it reads. If this is None,
    nothing is known of that, and the order is fixed; see :mod:`planner.ir.order`."""

    def __post_init__(self) -> None:
        made: set[int] = set()
        for operation in self.operations:
            for value in operation.inputs:
                if value not in made:
                    raise UsageError(f"operation {operation.name!r} reads value {value} before it is made")
            for value in operation.outputs:
                if value in made:
                    raise UsageError(f"value {value} is made twice, again by {operation.name!r}")
                if not 0 <= value < len(self.values):
                    raise UsageError(f"operation {operation.name!r} makes unknown value {value}")
                made.add(value)
        if len(made) != len(self.values):
            raise UsageError("some values are made by no operation")
        if any(value.size_bytes < 0 for value in self.values):
            raise UsageError("a value has a negative size")
        for index, earlier in (self.runs_after or {}).items():
            if not all(0 <= before < index < len(self.operations) for before in earlier):
                raise UsageError(f"operation {index} cannot run after {earlier}")

    def with_sizes(self, sizes: Sequence[int]) -> TrainingGraph:
        """Return the graph with other bytes of its values."""
        values = (
            value if value.size_bytes == size_bytes else replace(value, size_bytes=size_bytes)
            for value, size_bytes in zip(self.values, sizes, strict=True)
        )
        return replace(self, values=tuple(values))

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each value, the index of the operation that makes it."""
        producer = [-1] * len(self.values)
        for index, operation in enumerate(self.operations):
            for value in operation.outputs:
                producer[value] = index
        return tuple(producer)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the operations that read it, in base order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, operation in enumerate(self.operations):
            for value in operation.inputs:
                if not readers[value] or readers[value][-1] != index:
                    readers[value].append(index)
        return tuple(map(tuple, readers))

    @cached_property
    def has_units(self) -> bool:
        """Whether parts of the step are captured, each on its own; else the whole step is one unit."""
        return any(operation.region for operation in self.operations)

    def is_private(self, value: int) -> bool:
        """Whether the unit that makes a value is all that ever holds it."""
        (region, *others) = {self.operations[index].region for index in (self.producer[value], *self.readers[value])}
        return not others and bool(region) == self.has_units

    @cached_property
    def loss_index(self) -> int:
        """Index of the operation between forward and backward; the number of operations if none."""
        losses = (index for index, operation in enumerate(self.operations) if operation.phase is Phase.LOSS)
        return next(losses, len(self.operations))

    @property
    def total_static_bytes(self) -> int:
        """Everything resident before the step."""
        return sum(self.static_bytes.values())

    @property
    def found_bytes(self) -> int:
        """What earlier steps have left, which is there before the step, and may go in it."""
        found = (operation for operation in self.operations if operation.target == FOUND_TARGET)
        return sum(self.values[value].size_bytes for operation in found for value in operation.outputs)
