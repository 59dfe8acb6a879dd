"""A model as a table of its layers: what one sample takes on one device that holds all of each layer.

Every figure is for one sample of full length. What a device has of it under a split follows from that: the samples of
its micro-batch, and a share of each weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from planner.errors import UsageError

KEEP, FULL = "keep all", "full"
"""Names of the choices that every layer has: nothing runs again, or all of its forward does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An operation, as far as its time depends on it: what a cost model reads."""

    target: str
    flops: int
    moved_bytes: int
    """Of tokens, read and written."""
    weight_bytes: int = 0
    """Of parameters and of their gradients, beside those: they move whatever the number of tokens is."""
    dtype: str = "float32"
    name: str = ""
    signature: str = ""
    times: int = 1
    """How many operations are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a layer keeps between forward and backward, and what that costs."""

    name: str
    saved_bytes: int
    """While a sample waits for its backward."""
    working_bytes: int
    """Most that is there beside that, in its forward or in its backward; gradients of parameters are left out."""
    reruns: tuple[Work, ...] = ()
    summed_bytes: int = 0
    """Results that are summed once more where layers are shared by several devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer, or what stands before or after all layers."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    choices: tuple[Choice, ...] = (Choice(name=KEEP, saved_bytes=0, working_bytes=0),)
    """From the one that keeps most to the one that keeps least; those of all layers are alike by name."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    """State of the optimizer, and master weights."""
    boundary_bytes: int = 0
    """What it hands to the next layer."""
    summed_forward_bytes: int = 0
    """Results that are summed where the layer is shared by several devices."""
    summed_backward_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """A model, as a search over splits needs to know it."""

    name: str
    first: Layer
    last: Layer
    kinds: tuple[Layer, ...]
    """Different layers of the row."""
    row: tuple[int, ...]
    """For each layer of the model, its kind."""
    tokens: int = 1
    """Of one sample; 1 where it is no sequence."""
    tensor_degrees: tuple[int, ...] = (1,)
    """By how many devices a layer can be shared."""
    tied_bytes: int = 0
    """Parameters that the first and the last stage both hold: counted once on a device that has both."""
    assumed: tuple[str, ...] = ()
    """What was taken for granted when it was made, in words."""

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike but for the first, which may be spared a gradient."""
        return len(set(self.row[1:])) <= 1

    def deeper(self, layers: int) -> ModelTable:
        """Return the table of a model that has more layers, all like the second; LayersDifferError if they differ."""
        if not self.is_uniform:
            raise LayersDifferError(
                f"the layers of {self.name} are not alike: capture all of them, and leave out layers"
            )
        note = f"{layers} layers are like the second of the {len(self.row)} that were captured"
        return replace(self, row=(self.row[-1],) * layers, assumed=(*self.assumed, note))


class LayersDifferError(UsageError):
    """Few layers cannot stand for all: they are not alike."""


def merged(works: Iterable[Work]) -> tuple[Work, ...]:
    """Count operations that are alike, in the order of their first.

    >>> [work.times for work in merged([Work(target="a", flops=1, moved_bytes=2)] * 3)]
    [3]
    """
    return tuple(replace(work, times=count) for work, count in Counter(works).items())


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
