"""The protocol of cost models, and what they read of an operation.

A cost model says what one run of each operation of a training step costs on one device. It is
found by its file: a module of this package that defines ``COST_MODEL``, a class that can be built
from a :class:`~cost_models.devices.DeviceSpec` alone (further options have defaults).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from cost_models.devices import DeviceSpec


class CostedOperation(Protocol):
    """What a cost model reads of an operation; any object with these attributes will do."""

    @property
    def name(self) -> str:
        """Unique name in the graph."""

    @property
    def target(self) -> str:
        """The operator, for example ``"aten.mm.default"``."""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add as two; elements made, where there is no arithmetic to count."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written, each storage once."""

    @property
    def dtype(self) -> str:
        """Element type that it computes in, for example ``"float32"``."""

    @property
    def signature(self) -> str:
        """What it is called with, the same for calls that run the same kernels; empty if it cannot be run alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """What one run of an operation costs.

    Parameters
    ----------
    seconds : float
        Time of one run; of a recompute, where the first one takes longer.
    workspace_bytes : int
        What the kernel allocates beyond its outputs and frees before it returns; negative where it writes an output
        over an input that is not read afterwards.
    small_bytes : int
        How much of that is in small blocks beside a large one, such as counters; 0 where nobody looked.
    cold_seconds : float
        What a run takes on top if nothing that it reads is in a cache.
    cold_share : float
        How much of that the first run takes.
    again_seconds : float
        How much of ``seconds`` a recompute alone takes: the first run does not.
    """

    seconds: float
    workspace_bytes: int = 0
    small_bytes: int = 0
    cold_seconds: float = 0.0
    cold_share: float = 1.0
    again_seconds: float = 0.0

    @property
    def first_seconds(self) -> float:
        """Time of the first run."""
        return self.seconds - self.again_seconds + self.cold_share * self.cold_seconds


class CostModel(Protocol):
    """Costs of operations on one device."""

    name: ClassVar[str]

    @property
    def device(self) -> DeviceSpec:
        """Device that the costs hold for."""

    def costs(self, operations: Sequence[CostedOperation]) -> tuple[OperationCost, ...]:
        """Return the cost of one run of each operation, in their order."""


class CostModelFactory(Protocol):
    """What builds a cost model: the class itself, as a rule."""

    name: ClassVar[str]

    def __call__(self, device: DeviceSpec) -> CostModel:
        """Build the model for a device."""
