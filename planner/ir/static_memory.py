"""What is resident on the device around forward and backward, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

OF_THE_MODEL = ("parameters", "buffers", "inputs")
"""What is resident because of the model itself, whatever surrounds it."""


SHARDS = "gradient shards"
"""In a plan's fingerprint: over how many ranks it spreads parameters and gradients."""

FINDS = "finds"
"""In a plan's fingerprint: what earlier steps have left, gradients say."""

"""In a plan's fingerprint: over how many devices it spreads each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """What a loss outside the captured graph takes, beside the outputs and their gradients."""

    working_bytes: int = 0
    """Most at a time from its first operation until the outputs have their gradients, without ``held_bytes``."""
    held_bytes: int = 0
    """Behind the loss itself until the step ends: a loss that shrinks to one number keeps what it shrank from."""
    is_known: bool = False
    """Where none is known somebody may hold the gradients of the outputs to the end."""
    outputs: tuple[tuple[tuple[int, ...], bool], ...] | None = None
    """Sizes of each output that has gradients, in order, and whether the loss depends on it; None if nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPasses:
    """What a loss takes that is computed when the forward ends, while its backward comes later, as in a pipeline."""

    saved_bytes: int
    """Between the two, without ``held_bytes``."""
    held_bytes: int
    """Behind the loss itself until the step ends."""
    forward_bytes: int
    """Most at a time in its forward, beside both."""
    backward_bytes: int
    """Most at a time in its backward, up to the gradients of the outputs, which are left out, beside both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """What is resident beside the model, and what the optimizer's own step needs."""

    static_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Resident through forward and backward, by kind: ``"optimizer"``, ``"gradients"``, ``"reserve"``, ..."""
    optimizer_step_bytes: int = 0
    """Temporaries of the optimizer's step, which comes after the backward and can be a second peak."""
    gradient_shards: int = 1
    """Over how many ranks each gradient is spread once it is complete."""
    tensor_bytes: tuple[int, ...] = ()
    """Size of each tensor of the model and its inputs, and last of all else but ``library_bytes``, for simulating an
    allocator."""
    library_bytes: tuple[int, ...] = ()
    """Size of each piece that matrix libraries keep, which lie by themselves."""
    has_caching_allocator: bool = False
    """Whether the device's memory is handed out as CUDA does."""
    has_expandable_segments: bool = False
    """Whether it is taken from the device by pages, at the end of one segment."""
    allocator_settings: str = ""
    """What is set of the allocator that is not simulated."""

    def without(self, *kinds: str) -> StaticMemory:
        """Return it without what is resident beside the model of some kinds."""
        gone_bytes = sum(self.static_bytes.get(kind, 0) for kind in kinds)
        static = {kind: size_bytes for kind, size_bytes in self.static_bytes.items() if kind not in kinds}
        *tensors, others = self.tensor_bytes or (0,)
        return replace(self, static_bytes=static, tensor_bytes=(*tensors, max(others - gone_bytes, 0)))

    @property
    def resident_bytes(self) -> tuple[int, ...]:
        """Return the size of everything that is resident, in the order in which it is made."""
        return (*self.tensor_bytes[:-1], *self.library_bytes, *self.tensor_bytes[-1:])
