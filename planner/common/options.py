"""What a person asks for, in groups: a keyword of the public functions is a field of one of these, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.common.limits import Progress, SolveLimits
from planner.common.registry import did_you_mean
from planner.common.units import Size, is_share, parse_size
from planner.errors import UsageError

if TYPE_CHECKING:
    from cost_models.measured import Profile

LEAST_BYTES = 2**20
"""Smaller values stay on the device: a transfer of less takes about as long to start as to run."""

Group = TypeVar("Group")


def picked(kind: type[Group], asked: Mapping[str, Any]) -> Group:
    """Make a group of options of the keywords that are its own.

    >>> picked(Budget, {"budget": "60%", "solver": "ilp"}).budget
    '60%'
    """
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: asked[name] for name in names if name in asked})


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What memory a step may take."""

    budget: Size | None = None
    """What the whole device may hold; ``"60%"`` is of eager's peak."""
    activation_budget: Size | None = None
    """In its place, what the step may allocate on top of what is resident; ``"60%"`` is of what eager does."""
    at_least_bytes: int = 0
    """What the whole device may hold even if the budget comes to less; see :meth:`after`."""

    @property
    def is_given(self) -> bool:
        """Whether there is one at all."""
        return self.budget is not None or self.activation_budget is not None

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage of the eager step."""
        return is_share(self.budget) or is_share(self.activation_budget)

    def check(self, *, or_none: bool = False) -> None:
        """Refuse two budgets, none where one is needed, and one that cannot be read."""
        both = None not in (self.budget, self.activation_budget)
        if both or not (self.is_given or or_none):
            raise UsageError("give one of budget (the whole device) and activation_budget (on top of what is resident)")
        for given in (self.budget, self.activation_budget):
            if given is not None:
                parse_size(given, whole_bytes=2**60)

    def in_bytes(self, whole_bytes: int, static_bytes: int) -> int:
        """Return what the whole device may hold.

        A percentage is of ``whole_bytes``, which eager's step needs, or of what it needs on top of ``static_bytes``.
        """
        self.check()
        if self.budget is not None:
            return parse_size(self.budget, whole_bytes=whole_bytes)
        assert self.activation_budget is not None
        return static_bytes + parse_size(self.activation_budget, whole_bytes=whole_bytes - static_bytes)

    def after(self, budget_bytes: int) -> Budget:
        """Return the budget for other input sizes: what a percentage came to is not taken back for smaller ones."""
        return replace(self, at_least_bytes=max(self.at_least_bytes, budget_bytes)) if self.is_share else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(SolveLimits):
    """How a plan is looked for."""

    time_limit_seconds: float = 10.0
    solver: str = "auto"
    """Name of a solver; ``"auto"`` picks."""
    compare: bool = True
    """Whether to find what the report shows beside the plan: the usual ways of checkpointing, the smallest peak."""
    progress: Progress | None = None

    def tell(self, line: str) -> None:
        """Say how it stands."""
        if self.progress is not None:
            self.progress(line)

    def under(self, name: str) -> Search:
        """Return the same search, each of whose lines begins with a name."""
        return replace(self, progress=lambda line: self.tell(f"{name}: {line}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What may wait in the host's memory between forward and backward."""

    offload: bool = False
    host_budget: Size | None = None
    """What it may take there; by default half of what this machine has."""
    offload_at_least: Size = LEAST_BYTES
    """Values below this size stay on the device."""
    offload_lossy: bool = False
    """Whether values of float32 wait there rounded to bfloat16; a UsageError where nothing is offloaded."""

    def __post_init__(self) -> None:
        if self.offload_lossy and not self.offload:
            raise UsageError("offload_lossy rounds what is offloaded: give offload too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a plan is made for, and what says how long operations take there."""

    device: str | None = None
    """Name in the table of devices, or a device file; by default the device that the model is on."""
    cost_model: str = "auto"
    """Name of a cost model."""
    profile: Profile | None = None
    """Costs that were recorded before."""


# Training.

OPTIMIZERS = (
    "none", "sgd", "momentum", "adam", "adamw", "nadam", "radam", "adagrad", "rmsprop", "adafactor", "adam8bit",
    "adamw8bit",
)  # fmt: skip
"""Optimizers whose memory is known; ``"none"`` keeps nothing, ``"momentum"`` is SGD with it."""


def check_optimizer(name: str) -> None:
    """Refuse what is no name, or none that is known, by a UsageError that lists the near ones, and all."""
    if not isinstance(name, str):
        raise UsageError(f"the optimizer is given by its name ('adamw'), not as {type(name).__name__}")
    if name not in OPTIMIZERS:
        hint = did_you_mean(name.lower(), OPTIMIZERS, write=str)
        raise UsageError(f"unknown optimizer {name!r}: {hint}known are {', '.join(OPTIMIZERS)}")


PARALLEL = ("none", "ddp", "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, as far as that takes memory."""

    optimizer: str = "none"
    """One of :data:`OPTIMIZERS`."""
    master_weights: bool = False
    """Whether parameters of 16 bits are updated through float32 copies."""
    gradient_accumulation: bool = False
    """Whether gradients of earlier backwards are there when the step begins."""
    data_parallel: str = "none"
    """``"none"``, ``"ddp"`` (each rank holds all) or ``"fsdp2"`` (``fully_shard`` on each block)."""
    ranks: int = 1
    """How many devices train together."""
    tensor_parallel: int = 1
    """How many devices share each layer."""
    reserve: Size = 0
    """What is to stay free for the allocator and for others: bytes, ``"1GiB"``, or ``"5%"`` of the device."""
    arena: bool = False
    """Whether what the step allocates has fixed places in one arena."""
    cuda_graphs: bool = False
    """Whether forward and backward are captured into CUDA graphs, each launched by one call."""

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


# Splits over many devices.

ENGINES = ("torchtitan", "megatron")
"""What trains on many devices, and is given a split."""


# Chunks.

CHUNKS = "slices"
"""Where the fingerprint of a plan says how many chunks there are, as schema 1 has it."""

AUTO, OFF = "auto", "off"

COUNTS = (2, 4, 8, 16, 32, 64)
"""What is tried in turn where the planner is to choose."""

TOLERANCE = 2e-6
"""How far loss and gradients of a chunked step may be from those of the step in one piece; see
:func:`planner.diagnose.verification.compare`. Products and sums are the same, added up in another order."""

Chunk = int | str
"""``"off"``, ``"auto"``, or how many chunks; 1 is ``"off"``."""


def check_chunk(chunk: Chunk) -> Chunk:
    """Return the number of chunks that is asked for, 1 for none, or :data:`AUTO`; refuse all else.

    >>> check_chunk("off"), check_chunk(8), check_chunk("auto")
    (1, 8, 'auto')
    """
    if chunk == AUTO or (isinstance(chunk, int) and not isinstance(chunk, bool) and 1 <= chunk < 2**31):
        return chunk
    if chunk == OFF:
        return 1
    hint = did_you_mean(str(chunk), (AUTO, OFF), most=1)
    wrong = f"chunk must be 'auto', 'off' or a number of chunks above zero, not {chunk!r}"
    raise UsageError(f"{wrong}: {hint.rstrip()}" if hint else wrong)


def chunks_of(fingerprint: Mapping[str, str | int]) -> int:
    """Return the number of chunks that a plan was made for, 1 if its step is in one piece."""
    return int(fingerprint.get(CHUNKS, 1))
