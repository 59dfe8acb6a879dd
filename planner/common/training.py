"""How a model is trained, as far as that takes memory: names and numbers, checked."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from planner.common.units import parse_size
from planner.errors import UsageError

OPTIMIZERS = (
    "none", "sgd", "momentum", "adam", "adamw", "nadam", "radam", "adagrad", "rmsprop", "adafactor", "adam8bit",
    "adamw8bit",
)  # fmt: skip
"""Optimizers whose memory is known; ``"none"`` keeps nothing, ``"momentum"`` is SGD with it."""


def check_optimizer(name: str) -> None:
    """Refuse a name that is not known.

    Raises
    ------
    UsageError
        Listing the near ones, and all.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"unknown optimizer {name!r}: {hint}known are {', '.join(OPTIMIZERS)}")


PARALLEL = ("none", "ddp", "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, as far as that takes memory.

    Parameters
    ----------
    optimizer : str
        One of :data:`OPTIMIZERS`.
    master_weights : bool
        Whether parameters of 16 bits are updated through float32 copies.
    gradient_accumulation : bool
        Whether gradients of earlier backwards are there when the step begins.
    data_parallel : str
        ``"none"``, ``"ddp"`` (each rank holds all) or ``"fsdp2"`` (``fully_shard`` on each block).
    ranks : int
        How many devices train together.
    tensor_parallel : int
        How many devices share each layer.
    reserve : int, float or str
        What is to stay free for the allocator and for others: bytes, ``"1GiB"``, or ``"5%"`` of the device.
    """

    optimizer: str = "none"
    master_weights: bool = False
    gradient_accumulation: bool = False
    data_parallel: str = "none"
    ranks: int = 1
    tensor_parallel: int = 1
    reserve: int | float | str = 0

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.data_parallel not in PARALLEL:
            raise UsageError(f"unknown data_parallel {self.data_parallel!r}: one of {', '.join(PARALLEL)}")
        if self.reserve:
            parse_size(self.reserve, whole_bytes=2**60)
        if self.ranks < 1 or (self.ranks > 1) != (self.data_parallel != "none"):
            raise UsageError(f"ranks={self.ranks} does not go with data_parallel={self.data_parallel!r}: give both")
        if self.tensor_parallel < 1:
            raise UsageError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")
        if self.tensor_parallel > 1 and self.data_parallel == "fsdp2":
            raise UsageError("fsdp2 of layers that are spread by tensor_parallel is not planned: use one of the two")
