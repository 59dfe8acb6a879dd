"""Plain data of a search over splits: the question, a split, and the estimate of one.

How fast devices reach each other: within a node, and between nodes.

Rings as NCCL builds them: of a collective, each of n devices sends and receives (n - 1)/n of all bytes. Devices of one
node reach each other at the node's rate. Where a group spans nodes, each of its members in a node has a network card of
its own, and together they cross at most as fast as the node's own links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cost_models.devices import DeviceSpec
from planner.common.json_reader import attributes
from planner.common.options import ENGINES
from planner.common.units import Size, format_bytes, parse_size
from planner.errors import InfeasibleBudgetError, UsageError

# Bytes a second of one device in one direction, and of its network card. NVLink: half of the total that the data sheet
# names. Networks: one card for each device as in the vendor's own machines (DGX A100 and H100, and their successors).
# fmt: off
_KNOWN = {
    "a100-40": (300e9, 25e9, "NVIDIA DGX A100: NVLink 3, a 200 Gb/s card for each GPU"),
    "a100-80": (300e9, 25e9, "NVIDIA DGX A100: NVLink 3, a 200 Gb/s card for each GPU"),
    "h100":    (450e9, 50e9, "NVIDIA DGX H100: NVLink 4, a 400 Gb/s card for each GPU"),
    "h200":    (450e9, 50e9, "NVIDIA DGX H200: NVLink 4, a 400 Gb/s card for each GPU"),
    "b200":    (900e9, 50e9, "NVIDIA DGX B200: NVLink 5, a 400 Gb/s card for each GPU"),
    "mi300x":  (448e9, 50e9, "AMD Instinct MI300X platform: 7 links of 64 GB/s; a 400 Gb/s card assumed for each"),
}
# fmt: on
_HUNDRED_GBIT = 12.5e9

EFFICIENCY = 0.8
"""What large collectives reach of a link's rate: NCCL's own tests show three quarters to nine tenths."""

# What each further device of a node adds to a collective, and each further node.
_NODE_HOP_SECONDS = 2e-6
_NETWORK_HOP_SECONDS = 8e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster whose nodes are alike; rates of one device, in one direction."""

    node_devices: int
    """Devices of one node."""
    node_bytes_per_second: float
    network_bytes_per_second: float
    source: str = ""

    def __post_init__(self) -> None:
        if self.node_devices < 1:
            raise UsageError(f"a node has at least 1 device, not {self.node_devices}")

    def pass_seconds(self, size_bytes: Any, members: int, stride: int = 1) -> Any:
        """Return the time in which a group gathers so many bytes (or arrays of them), or sums and scatters them.

        Members are so many devices apart. A sum that all are to have takes twice that.

        >>> links = Links(node_devices=8, node_bytes_per_second=100.0, network_bytes_per_second=10.0)
        >>> [round(links.pass_seconds(*group), 3) for group in ((64, 8), (128, 16), (128, 2, 8))]
        [0.7, 1.875, 8.0]
        """
        local = max(1, min(members, self.node_devices // stride))  # so many of a group are in one node
        nodes = -(-members // local)
        rate = self.node_bytes_per_second
        if nodes > 1:
            rate = min(rate, local * self.network_bytes_per_second)
        hops = (local - 1) * _NODE_HOP_SECONDS + (nodes - 1) * _NETWORK_HOP_SECONDS
        return size_bytes * (members - 1) / members / (rate * EFFICIENCY) + hops

    def send_seconds(self, size_bytes: float, distance: int) -> float:
        """Return the time in which a device sends bytes to one that far away; a row of them crosses nodes somewhere."""
        rate, hop_seconds = self.network_bytes_per_second, _NETWORK_HOP_SECONDS
        if distance < self.node_devices:
            rate, hop_seconds = self.node_bytes_per_second, _NODE_HOP_SECONDS
        return size_bytes / (rate * EFFICIENCY) + hop_seconds


def links_of(
    device: DeviceSpec, *, node_devices: int = 8, node_link: Size | None = None, network: Size | None = None
) -> Links:
    """Return the links between devices of one kind, a second's bytes of which may be given.

    Cards that no such machine is known for reach each other over the host, at the rate of the link to it, and other
    nodes through one card of 100 Gb/s for all.
    """
    over_the_host = device.host_link_bytes_per_second, _HUNDRED_GBIT / node_devices, "over the host; 100 Gb/s a node"
    node_rate, network_rate, source = _KNOWN.get(device.name, over_the_host)
    if node_link is not None:
        node_rate, source = float(parse_size(node_link)), "given"
    if network is not None:
        network_rate, source = float(parse_size(network)), "given"
    if not node_rate:
        raise UsageError(f"nothing is known of links between devices {device.name!r}: give --node-link and --network")
    return Links(
        node_devices=node_devices,
        node_bytes_per_second=node_rate,
        network_bytes_per_second=network_rate,
        source=source,
    )


REPLICATED, OPTIMIZER, FSDP2, FSDP2_KEPT = "replicated", "optimizer", "fsdp2", "fsdp2-kept"
"""Each data-parallel rank holds all; a share of the optimizer's state (ZeRO 1); a share of everything, gathered for
each pass; or gathered once for a step (``reshard_after_forward=False``)."""

SHARDINGS: Mapping[str, tuple[str, ...]] = {
    "torchtitan": (REPLICATED, FSDP2, FSDP2_KEPT),
    "megatron": (REPLICATED, OPTIMIZER),
}
"""What each engine runs."""


class Shape(NamedTuple):
    """Degrees, which name a class of splits."""

    data: int
    tensor: int
    pipeline: int

    @property
    def named(self) -> dict[str, int]:
        """By their names."""
        return self._asdict()


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
    """One way to train a model on many devices.

    >>> print(Split(4, 2, 1, 2, 1, "fsdp2", "torchtitan"))
    data 4 (fsdp2), tensor 2, micro-batch 2
    """

    data: int
    tensor: int
    pipeline: int
    micro_batch: int
    """Samples."""
    chunks: int
    """Groups of layers on each device of a pipeline; above 1 they are interleaved."""
    sharding: str
    engine: str

    @property
    def shape(self) -> Shape:
        """The degrees alone."""
        return Shape(self.data, self.tensor, self.pipeline)

    def micro_batches(self, global_batch: int) -> int:
        """Return how many micro-batches a step has."""
        return global_batch // (self.data * self.micro_batch)

    def __str__(self) -> str:
        """Say what it is."""
        parts = [f"data {self.data} ({self.sharding})"]
        parts += [f"{name} {degree}" for name, degree in list(self.shape.named.items())[1:] if degree > 1]
        parts += [f"{self.chunks} chunks interleaved"] * (self.chunks > 1)
        return ", ".join([*parts, f"micro-batch {self.micro_batch}"])


PARTS = {
    "compute": "arithmetic on small pieces or an uneven cut",
    "recompute": "recompute",
    "bubble": "the pipeline's bubble",
    "tensor": "sums between devices that share layers",
    "data": "waiting for other replicas",
    "pipeline": "sending between stages",
    "optimizer": "the optimizer's step",
}
"""What a step's time is made of, arithmetic and what each way of splitting adds to it; and why it can be more."""


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
    memory_bytes: Mapping[str, int]
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
    def tokens_per_second_per_gpu(self) -> float:
        """Of each device."""
        return self.tokens_per_second / self.gpus

    @property
    def key(self) -> tuple[Any, ...]:
        """The order of answers: the fastest, to six digits; then what is split least, then the lowest peak."""
        split = self.split
        degrees = (split.pipeline, split.tensor, split.chunks)
        # Sums in another order are no difference.
        return (float(f"{self.step_seconds:.6g}"), *degrees, self.peak_bytes, split)

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        speeds = ("step_seconds", "tokens_per_second", "tokens_per_second_per_gpu")
        return attributes(self, "split", *speeds, "seconds", "peak_bytes", "memory_bytes", "stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Why no split of one shape is among the best."""

    shape: Shape
    reason: str
    slower: float | None = None
    """Than the best, as a share of the best's time. None if none fits."""
    missing_bytes: int | None = None
    """What the smallest peak is above the memory of a device, if none fits."""


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
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0
    """The search took."""

    def report(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "schema": 1,
            "status": "fits",
            "device": self.question.device.name,
            **attributes(self.question, "gpus", "global_batch", "memory_bytes", "links"),
            "best": [estimate.report() for estimate in self.best],
            "best_of_engine": {engine: estimate.report() for engine, estimate in self.of_engine.items()},
            "lost": [one.shape.named | attributes(one, "reason", "slower", "missing_bytes") for one in self.lost],
            **attributes(self, "model", "considered", "assumed"),
            "search_seconds": self.seconds,
        }


class NoSplitFitsError(InfeasibleBudgetError):
    """No split keeps the memory of each device; says the smallest peak found, and of which split it is."""

    def __init__(self, lowest: Estimate, memory_bytes: int) -> None:
        super().__init__(
            f"no split fits {format_bytes(memory_bytes)} on each device: the smallest peak found is "
            f"{format_bytes(lowest.peak_bytes)}, with {lowest.split}; take more GPUs, larger ones, or a "
            "shorter sequence",
            minimum_feasible_peak_bytes=lowest.peak_bytes,
            operation=str(lowest.split),
        )
        self.report = {
            "schema": 1,
            "status": "infeasible",
            "memory_bytes": memory_bytes,
            "minimum_feasible_peak_bytes": lowest.peak_bytes,
            "split": asdict(lowest.split),
            "message": str(self),
        }
