"""What is asked of a search over splits, what a split is, and what an estimate says; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cost_models.devices import DeviceSpec
from planner.analysis.splits.links import Links
from planner.common.options import ENGINES
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError, UsageError

REPLICATED, OPTIMIZER, FSDP2, FSDP2_KEPT = "replicated", "optimizer", "fsdp2", "fsdp2-kept"
"""Each data-parallel rank holds all; a share of the optimizer's state (ZeRO 1); a share of everything, gathered for
each pass; or gathered once for a step (``reshard_after_forward=False``)."""

SHARDINGS: Mapping[str, tuple[str, ...]] = {
    "torchtitan": (REPLICATED, FSDP2, FSDP2_KEPT),
    "megatron": (REPLICATED, OPTIMIZER),
}
"""What each engine runs."""

Shape = tuple[int, int, int, int, int]
"""Degrees: data, tensor, pipeline, context, expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: UsageError if it is no question that has an answer."""

    gpus: int
    global_batch: int
    """Samples of one step."""
    device: DeviceSpec
    links: Links
    memory_bytes: int
    """What each device may hold of the step."""
    engines: tuple[str, ...] = ENGINES
    attention_efficiency: float | None = None
    """What fused attention reaches of the peak rate; by default what is known of its kernel on this device."""
    overlap: bool = True
    """Whether the engine hides behind arithmetic what replicas send each other."""
    most: int = 10
    """How many of the best are wanted."""

    def __post_init__(self) -> None:
        for what, count in (("GPUs", self.gpus), ("samples of a step", self.global_batch), ("answers", self.most)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(f"the number of {what} must be a whole number above 0, not {count!r}")
        if self.memory_bytes < 1:
            raise UsageError("nothing of the device is left for the step: keep a smaller reserve")
        if unknown := [name for name in self.engines if name not in ENGINES]:
            raise UsageError(f"unknown engine {unknown[0]!r}: there are {', '.join(ENGINES)}")
        nodes = self.links.node_devices
        if self.gpus > nodes and self.gpus % nodes:
            raise UsageError(f"{self.gpus} GPUs do not fill nodes of {nodes}: ask for a multiple, or give --node-gpus")


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """One way to train a model on many devices."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    micro_batch: int
    """Samples."""
    chunks: int
    """Groups of layers on each device of a pipeline; above 1 they are interleaved."""
    sharding: str
    engine: str

    @property
    def shape(self) -> Shape:
        """The degrees alone, which name its class."""
        return (self.data, self.tensor, self.pipeline, self.context, self.expert)

    @property
    def shards(self) -> int:
        """Over how many devices parameters that all of them share can be spread."""
        return self.data * self.context

    def micro_batches(self, global_batch: int) -> int:
        """Return how many micro-batches a step has."""
        return global_batch // (self.data * self.micro_batch)


DIGITS = 6
"""Times are the same that agree in so many: sums in another order are no difference."""

PARTS = (
    "compute", "recompute", "bubble", "tensor", "context", "expert", "data", "pipeline", "optimizer",
)  # fmt: skip
"""What a step's time is made of: arithmetic, then what each way of splitting adds to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What a stage keeps: its first layers by one choice, the others by another."""

    layers: int
    first: str
    others: str
    count: int
    """How many are the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a split is expected to take."""

    split: Split
    seconds: Mapping[str, float]
    """Of one step, by :data:`PARTS`."""
    peak_bytes: int
    memory: Mapping[str, int]
    """Of the device with the highest peak, by kind."""
    stages: tuple[Mixed, ...]
    tokens: int
    """Of one step."""
    gpus: int
    fits: bool

    @property
    def step_seconds(self) -> float:
        """Time of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens / self.step_seconds

    @property
    def key(self) -> tuple[Any, ...]:
        """The order of answers: the fastest, to six digits; then what is split least, then the lowest peak."""
        split = self.split
        degrees = (split.context, split.pipeline, split.tensor, split.expert, split.chunks)
        return (float(f"{self.step_seconds:.{DIGITS}g}"), *degrees, self.peak_bytes, split)

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "split": asdict(self.split),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.gpus,
            "seconds": dict(self.seconds),
            "peak_bytes": self.peak_bytes,
            "memory_bytes": dict(self.memory),
            "stages": [asdict(stage) for stage in self.stages],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Why no split of one shape is among the best."""

    shape: Shape
    reason: str
    slower: float | None = None
    """Than the best, as a share of the best's time; at least that much if ``is_bound``. None if none fits."""
    is_bound: bool = False
    missing_bytes: int | None = None
    """What the smallest peak found is above the memory of a device, if none fits."""

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("data", "tensor", "pipeline", "context", "expert")
        rest = {"reason": self.reason, "slower": self.slower, "is_bound": self.is_bound}
        return {**dict(zip(names, self.shape, strict=True)), **rest, "missing_bytes": self.missing_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """What the planner itself finds for a split, beside the estimate."""

    split: Split
    peak_bytes: int
    estimated_peak_bytes: int
    recompute_seconds: float
    """Of a micro-batch on the stage that is estimated to be the slowest."""
    estimated_recompute_seconds: float

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best splits, and why others are not among them."""

    model: str
    question: Question
    best: tuple[Estimate, ...]
    """At least one."""
    of_engine: Mapping[str, Estimate]
    """The best that each engine runs, if one fits."""
    lost: tuple[Lost, ...]
    """By shape, the nearest first."""
    considered: int
    """Splits in all."""
    estimated: int
    """Those that no bound ruled out."""
    assumed: tuple[str, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()
    arguments: Mapping[str, str] | None = None
    """By engine, what its command line is given."""
    seconds: float = 0.0
    """The search took."""

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        asked = self.question
        return {
            "schema": 1,
            "status": "fits",
            "model": self.model,
            "gpus": asked.gpus,
            "global_batch": asked.global_batch,
            "device": asked.device.name,
            "memory_bytes": asked.memory_bytes,
            "links": asdict(asked.links),
            "best": [estimate.report() for estimate in self.best],
            "best_of_engine": {engine: estimate.report() for engine, estimate in self.of_engine.items()},
            "arguments": dict(self.arguments or {}),
            "confirmed": [one.report() for one in self.confirmed],
            "lost": [one.report() for one in self.lost],
            "considered": self.considered,
            "estimated": self.estimated,
            "assumed": list(self.assumed),
            "search_seconds": self.seconds,
        }


class NoSplitFitsError(InfeasibleBudgetError):
    """No split keeps the memory of each device; says the smallest peak found, and of which split it is."""

    def __init__(self, lowest: Estimate, memory_bytes: int) -> None:
        super().__init__(
            f"no split fits {format_bytes(memory_bytes)} on each device: the smallest peak found is "
            f"{format_bytes(lowest.peak_bytes)}, with {described(lowest.split)}; take more GPUs, larger ones, or a "
            "shorter sequence",
            minimum_feasible_peak_bytes=lowest.peak_bytes,
            operation=described(lowest.split),
        )
        self.split = lowest.split
        self.report = {
            "schema": 1,
            "status": "infeasible",
            "memory_bytes": memory_bytes,
            "minimum_feasible_peak_bytes": lowest.peak_bytes,
            "split": asdict(lowest.split),
            "message": str(self),
        }


def described(split: Split) -> str:
    """Say what a split is.

    >>> described(Split(4, 2, 1, 1, 1, 2, 1, "fsdp2", "torchtitan"))
    'data 4 (fsdp2), tensor 2, micro-batch 2'
    """
    degrees = {"tensor": split.tensor, "pipeline": split.pipeline, "context": split.context, "expert": split.expert}
    parts = [f"data {split.data} ({split.sharding})"]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if split.chunks > 1:
        parts.append(f"{split.chunks} chunks interleaved")
    return ", ".join([*parts, f"micro-batch {split.micro_batch}"])
