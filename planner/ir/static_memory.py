"""What is resident on the device around forward and backward, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

OF_THE_MODEL = ("parameters", "buffers", "inputs")
"""Kinds of resident memory that the model itself needs."""


SHARDS = "gradient shards"
"""Key of a plan's fingerprint: over how many ranks parameters and gradients are spread."""

FINDS = "finds"
"""Key of a plan's fingerprint: what a step finds of earlier ones, such as gradients."""

OUTPUTS = "outputs"
"""Key of a plan's fingerprint: what a loop does with outputs; absent if they are held until the backward ends."""


LOSS = "loss"
"""Key of a plan's fingerprint: bytes that a loss outside works with, and that it holds to the end; absent without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """Memory of a loss outside the captured graph, without the outputs and their gradients."""

    working_bytes: int = 0
    """Peak from its first operation until the outputs have gradients, without ``held_bytes``."""
    held_bytes: int = 0
    """Held by the loss tensor until the step ends: a scalar that is a view keeps its storage."""
    is_known: bool = False
    """Whether a loss was recorded; if not, the outputs' gradients may be held to the end."""
    outputs: tuple[tuple[tuple[int, ...], bool], ...] | None = None
    """For each output that requires gradients, its shape and whether the loss depends on it; None if unknown."""

    @classmethod
    def of(cls, fingerprint: Mapping[str, str | int]) -> LossMemory | None:
        """Return the loss that a plan was made for, if there was one outside."""
        sizes = [int(size) for size in str(fingerprint.get(LOSS, "")).split()]
        return cls(working_bytes=sizes[0], held_bytes=sizes[1], is_known=True) if len(sizes) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Memory that is resident around forward and backward, and temporaries of the optimizer's step."""

    static_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Resident through forward and backward, by kind: ``"optimizer"``, ``"gradients"``, ``"reserve"``, ..."""
    optimizer_step_bytes: int = 0
    """Temporaries of the optimizer's step, which comes after the backward and can be a second peak."""
    gradient_shards: int = 1
    """Over how many ranks each complete gradient is spread."""
    tensor_bytes: tuple[int, ...] = ()
    """Sizes of the tensors of model and inputs, and as the last one all other resident memory except ``library_bytes``;
    for simulating an allocator."""
    library_bytes: tuple[int, ...] = ()
    """Sizes of the workspaces that matrix libraries keep, which the allocator places separately."""
    has_caching_allocator: bool = False
    """Whether the device has CUDA's caching allocator."""
    has_expandable_segments: bool = False
    """Whether the allocator uses expandable segments."""
    allocator_settings: str = ""
    """Allocator settings that are not simulated."""

    def without(self, *kinds: str) -> StaticMemory:
        """Return a copy without some kinds."""
        gone_bytes = sum(self.static_bytes.get(kind, 0) for kind in kinds)
        static = {kind: size_bytes for kind, size_bytes in self.static_bytes.items() if kind not in kinds}
        *tensors, others = self.tensor_bytes or (0,)
        return replace(self, static_bytes=static, tensor_bytes=(*tensors, max(others - gone_bytes, 0)))

    @property
    def resident_bytes(self) -> tuple[int, ...]:
        """Return the sizes of all resident memory, in order of allocation."""
        return (*self.tensor_bytes[:-1], *self.library_bytes, *self.tensor_bytes[-1:])
