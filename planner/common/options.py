"""Keywords of the public functions, in groups: each is one frozen dataclass, made at the edge and passed whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.common.limits import Progress, SolveLimits
from planner.common.registry import did_you_mean
from planner.common.units import Size, is_share, parse_size
from planner.errors import UsageError

if TYPE_CHECKING:
    from cost_models.measured import Profile
    from planner.plans.plan import Plan

AUTO = "auto"
"""Where the planner is to choose."""

BEFORE = "before"
"""A word for a search that the first step waits for."""

LEAST_BYTES = 2**20
"""Smaller values stay on the device: a transfer of less takes about as long to start as to run."""

Group = TypeVar("Group")


def group(kind: type[Group], given: Any) -> Group:
    """Return a group of options; a plain word is its first field.

    >>> group(Training, "adamw") == Training("adamw")
    True
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, (str, int, float, type(None))):
        name, first = kind.__name__, fields(kind)[0].name  # type: ignore[arg-type]
        takes = f"planner.{name}(...), or a word for its {first}"
        raise UsageError(f"{name.lower()} takes {takes}, not {type(given).__name__}")
    return kind(given)  # type: ignore[call-arg]


def flat_name(option: Field[Any]) -> str:
    """Return the name of a field among the options of all groups, for example on the command line."""
    return str(option.metadata.get("flat", option.name))


def picked(kind: type[Group], asked: Mapping[str, Any]) -> Group:
    """Make a group of those of flat options that are its own.

    >>> picked(Budget, {"budget": "60%", "solver": "ilp"}).size
    '60%'
    """
    names = {flat_name(option): option.name for option in fields(kind)}  # type: ignore[arg-type]
    asked = {"offload": AUTO, **asked}  # details of it do not turn it on everywhere
    return kind(**{names[name]: value for name, value in asked.items() if name in names})


def grouped(**asked: Any) -> dict[str, Any]:
    """Return flat options as keywords of the public functions; whatever is in no group stays as it is.

    >>> grouped(optimizer="adamw", name="gpt2")["training"].optimizer
    'adamw'
    """
    made = {}
    for keyword, kind in GROUPS.items():
        own = {flat_name(option) for option in fields(kind)} & asked.keys()
        if own and not isinstance(asked.get(keyword), kind):
            made[keyword] = picked(kind, {name: asked.pop(name) for name in own})
    return asked | made


class _Group:
    """Shows what is not as by default, since groups are defaults of the public functions."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = [(option, getattr(self, option.name)) for option in fields(self) if option.repr]  # type: ignore[arg-type]
        given = ", ".join(f"{option.name}={value!r}" for option, value in shown if value != option.default)
        return f"{type(self).__name__}({given})"


def _option(default: Any, **metadata: Any) -> Any:
    """Return a field; the command line reads ``flat``, ``flag``, ``metavar``, ``choices`` and ``rare``."""
    return field(default=default, metadata={"is_option": True, **metadata})


@dataclass(frozen=True, slots=True, repr=False)
class Budget(_Group):
    """The memory that a step may take; a size alone is that of the whole device.

    Parameters
    ----------
    size : int, float or str, optional
        What the device may hold: 8GiB, 8GB, 60% of eager's. Bytes are given as a number.
    activations : int, float or str, optional
        What the step may allocate beyond what is resident. Instead of the size.
    strategy : str, optional
        Use the strategy of an established system (every-2). At its own peak, or within a size.
    plan : Plan, optional
        An existing plan to apply; the budget is the plan's unless a size is given.
    replan : bool
        Replace that plan if it belongs to another model or other shapes, instead of refusing it.
    at_least_bytes : int
        What the device may hold even if a percentage comes to less; see :meth:`after`.
    """

    size: Size | None = _option(None, flat="budget")
    _: KW_ONLY
    activations: Size | None = _option(None, flat="activation_budget")
    strategy: str | None = _option(None, metavar="NAME")
    plan: Plan | None = None
    replan: bool = False
    at_least_bytes: int = 0

    @classmethod
    def of(cls, given: Budget | Plan | Size | None) -> Budget:
        """Return a budget that is given as a group, a size, or an existing plan."""
        if given is None or isinstance(given, (Budget, int, float, str)) or not hasattr(given, "fingerprint"):
            return group(cls, given)
        return cls(plan=given)

    @property
    def is_given(self) -> bool:
        """Whether there is one at all."""
        return self.size is not None or self.activations is not None

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage of the eager step."""
        return is_share(self.size) or is_share(self.activations)

    def check(self, *, or_none: bool = False) -> None:
        """Refuse two budgets, a missing one, and one that cannot be parsed."""
        both = None not in (self.size, self.activations)
        if both or not (self.is_given or or_none):
            raise UsageError("give one budget: of the whole device, or Budget(activations=...)")
        for given in (self.size, self.activations):
            if given is not None:
                parse_size(given, whole_bytes=2**60)

    def in_bytes(self, whole_bytes: int, static_bytes: int) -> int:
        """Return what the whole device may hold.

        A percentage is of ``whole_bytes``, which eager's step needs, or of what it needs on top of ``static_bytes``.
        """
        self.check()
        if self.size is not None:
            return parse_size(self.size, whole_bytes=whole_bytes)
        assert self.activations is not None
        return static_bytes + parse_size(self.activations, whole_bytes=whole_bytes - static_bytes)

    def after(self, budget_bytes: int) -> Budget:
        """Return the budget for other input sizes: a percentage keeps its bytes for smaller ones."""
        return replace(self, at_least_bytes=max(self.at_least_bytes, budget_bytes)) if self.is_share else self

    def within(self, budget_bytes: int) -> Budget:
        """Return the same with another size of the whole device."""
        return replace(self, size=budget_bytes, activations=None)


@dataclass(frozen=True, slots=True, repr=False)
class Search(_Group, SolveLimits):
    """How plans are searched for; a word alone names the solver.

    Parameters
    ----------
    solver : str
        Name of a solver of whole graphs; auto picks.
    time_limit_seconds : float
        Seconds until the solver stops improving.
    deterministic : bool
        Count work, not seconds: the same plan every time.
    wait : bool
        Let the first step wait for the whole search; ``"before"`` instead of a solver does. Otherwise a wrapped model
        trains under the plan that a second finds, and a better one replaces it once a background process has found it.
    seed : int
        Seed of random choices in a solver.
    compare : bool
        Also find what reports show beside the plan: usual ways of checkpointing, and the smallest feasible peak.
    progress : callable, optional
        Called with short lines on the progress.
    enough, told
        See :class:`planner.common.limits.SolveLimits`.
    """

    solver: str = _option("auto", metavar="NAME")
    _: KW_ONLY
    time_limit_seconds: float = _option(10.0, flag="--time-limit")
    deterministic: bool = _option(False)
    seed: int = _option(0, rare=True)
    wait: bool = False
    compare: bool = True
    progress: Progress | None = None

    def __post_init__(self) -> None:
        SolveLimits.__post_init__(self)
        if self.solver == BEFORE:
            object.__setattr__(self, "solver", "auto")
            object.__setattr__(self, "wait", True)

    def tell(self, line: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(line)

    def within(self, seconds: float) -> Search:
        """Return the same search, for so many seconds at most."""
        return replace(self, time_limit_seconds=min(seconds, self.time_limit_seconds))

    def under(self, name: str) -> Search:
        """Return the same search, whose progress lines begin with a name."""
        return replace(self, progress=lambda line: self.tell(f"{name}: {line}"))


@dataclass(frozen=True, slots=True, repr=False)
class Offload(_Group):
    """What may be offloaded to the host between forward and backward; True and False stand for all or nothing.

    Parameters
    ----------
    enabled : bool or str
        Offload values to the host's memory too. ``"auto"`` does where that saves more than half a point of the step, or
        where no plan fits without, on GPUs whose link to the host is known.
    host_budget : int, float or str, optional
        Host memory for offloaded values: 64GiB, 60%. By default half of what is free here.
    at_least : int, float or str
        Smaller values stay on the device. By default 1MiB.
    link : int, float or str, optional
        Peak rate of the link to the host each way, if not the device's: 32GB/s.
    """

    enabled: bool | str = _option(True, flat="offload")
    _: KW_ONLY
    host_budget: Size | None = _option(None, rare=True)
    at_least: Size = _option(LEAST_BYTES, flat="offload_at_least", rare=True)
    link: Size | None = _option(None, rare=True)

    def __post_init__(self) -> None:
        if self.enabled not in (True, False, AUTO):
            raise UsageError(f"offload is True, False or {AUTO!r}, not {self.enabled!r}")


@dataclass(frozen=True, slots=True, repr=False)
class Target(_Group):
    """The device that a plan is for, and the cost model; a word alone names the device.

    Parameters
    ----------
    device : str, optional
        Accelerator to plan for: h100, or a device file. By default the model's device.
    cost_model : str
        roofline, measured, or auto. Costs come from the device's data sheet; from running every different operation
        here; or from brief measurements if model and device are here.
    profile : Profile, optional
        Costs that 'profile' recorded, here or elsewhere.
    """

    device: str | None = _option(None, metavar="NAME")
    _: KW_ONLY
    cost_model: str = _option("auto", metavar="NAME")
    profile: Profile | None = _option(None, metavar="FILE", rare=True)


OPTIMIZERS = (
    "none", "sgd", "momentum", "adam", "adamw", "nadam", "radam", "adagrad", "rmsprop", "adafactor", "adam8bit",
    "adamw8bit",
)  # fmt: skip
"""Optimizers whose memory is known; ``"none"`` keeps nothing, ``"momentum"`` is SGD with it."""


def check_optimizer(name: str) -> None:
    """Raise UsageError for an unknown optimizer, with similar names and all known ones."""
    if not isinstance(name, str):
        raise UsageError(f"the optimizer is given by its name ('adamw'), not as {type(name).__name__}")
    if name not in OPTIMIZERS:
        hint = did_you_mean(name.lower(), OPTIMIZERS, write=str)
        raise UsageError(f"unknown optimizer {name!r}: {hint}known are {', '.join(OPTIMIZERS)}")


PARALLEL = ("none", "ddp", "fsdp2")

HELD, DROPPED, KEPT = "held", "dropped", "kept"


@dataclass(frozen=True, slots=True, repr=False)
class Training(_Group):
    """How a model is trained, as far as that takes memory; a word alone names the optimizer.

    Parameters
    ----------
    optimizer : str
        Optimizer whose state is resident (adamw, ...). Its own step must fit, too.
    master_weights : bool
        16-bit parameters have float32 copies.
    gradient_accumulation : bool
        Gradients of earlier backwards are resident.
    outputs : str
        What the loop does with outputs (dropped, held). It drops what is not the loss before the backward, holds it
        until that ends, or keeps it until the next call returns (kept). By default it drops outputs of a model that
        returns its own loss.
    reserve : int, float or str
        What stays free: 1GiB, or 5% of the device.
    data_parallel : str
        Plan ahead for ddp or fsdp2. Each rank holds all, or ``fully_shard`` is called on each block.
    ranks : int
        Devices that train together.

    Notes
    -----
    ``data_parallel`` and ``ranks`` are read from a model that is sharded already, or called by
    ``DistributedDataParallel``; they are for planning before that.
    """

    optimizer: str = _option("none", metavar="NAME")
    _: KW_ONLY
    master_weights: bool = _option(False)
    gradient_accumulation: bool = _option(False, flag="--accumulate")
    outputs: str = _option(AUTO, metavar="WORD")
    reserve: Size = _option(0)
    data_parallel: str = _option("none", choices=PARALLEL, rare=True)
    ranks: int = _option(1, rare=True)

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.data_parallel not in PARALLEL:
            raise UsageError(f"unknown data_parallel {self.data_parallel!r}: one of {', '.join(PARALLEL)}")
        if self.outputs not in (AUTO, DROPPED, HELD, KEPT):
            raise UsageError(f"unknown outputs {self.outputs!r}: one of {AUTO}, {DROPPED}, {HELD}, {KEPT}")
        if self.reserve:
            parse_size(self.reserve, whole_bytes=2**60)
        if self.ranks < 1 or (self.ranks > 1) != (self.data_parallel != "none"):
            raise UsageError(f"ranks={self.ranks} does not go with data_parallel={self.data_parallel!r}: give both")


# Chunks.

CHUNKS = "slices"
"""Where the fingerprint of a plan says how many chunks there are, as schema 1 has it."""

OFF = "off"

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


@dataclass(frozen=True, slots=True, repr=False)
class Runtime(_Group):
    """The runtime that carries a plan out; a word alone names it.

    Parameters
    ----------
    name : str
        What runs the plan (auto, graph, modules, ...). Each can carry out different plans.
    chunk : int or str
        Compute what makes the peak in N chunks. ``"auto"`` tries several, if that makes a plan feasible or cheaper;
        ``"off"`` tries none. Chunks change the last digits of loss and gradients, and need whole graphs.
    maximum_shapes : int
        How many sets of input sizes may have graphs; the next one is refused.
    """

    name: str = _option("auto", flat="runtime", metavar="NAME")
    _: KW_ONLY
    chunk: Chunk = _option(OFF, metavar="auto|off|N")
    maximum_shapes: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", check_chunk(self.chunk))
        if not self.maximum_shapes >= 1:
            raise UsageError(f"maximum_shapes must be at least 1, not {self.maximum_shapes}")


GROUPS: dict[str, type[Any]] = {
    "budget": Budget, "training": Training, "offload": Offload, "runtime": Runtime, "search": Search, "target": Target,
}  # fmt: skip
"""By the keyword of the public functions."""
