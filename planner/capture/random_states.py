"""The random states of a process, which planning leaves as they are: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostStates:
    """The random states of Python and of numpy, as they are when this is made: torch's checkpoint knows neither."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.plain() == other.plain()

    __hash__ = None  # type: ignore[assignment]

    def plain(self) -> list[Any]:
        """Return them as numbers, which can be compared."""
        return [self.python, *(part.tolist() if hasattr(part, "tolist") else part for part in self.numpy or ())]

    def restore(self) -> None:
        """Let the next random numbers be those that came next then."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class RandomStates(HostStates):
    """All random states as they are when this is made; torch's are bytes, since a tensor would be in measured peaks."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu = _as_bytes(torch.get_rng_state())
        self.cuda = [*map(_as_bytes, torch.cuda.get_rng_state_all())] if torch.cuda.is_available() else []

    def plain(self) -> list[Any]:
        """Return them as numbers, which can be compared."""
        return [*super().plain(), self.cpu, *self.cuda]

    def restore(self) -> None:
        """Let the next random numbers be those that came next then."""
        super().restore()
        torch.set_rng_state(_as_tensor(self.cpu))
        if self.cuda:
            torch.cuda.set_rng_state_all(map(_as_tensor, self.cuda))


def seed_all(number: int) -> None:
    """Let all random states but those of GPUs begin from a seed."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


def _as_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@contextmanager
def random_states_kept(*, if_it_fails: bool = False) -> Iterator[None]:
    """Leave all random states as they are, or only where what runs meanwhile raises."""
    states = RandomStates()
    try:
        yield
    except BaseException:
        states.restore()
        raise
    if not if_it_fails:
        states.restore()
