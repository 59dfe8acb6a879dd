"""Reading untrusted JSON: every value is asked for by type, and says where it stands when it is not that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from planner.errors import PlanFileError

_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 1e30
_LONGEST_TEXT = 10_000


def parse(text: str) -> Any:
    """Parse JSON that may be hostile.

    Raises
    ------
    PlanFileError
        If it is not JSON, is nested too deeply, repeats a key, or holds NaN or infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except PlanFileError:
        raise
    except json.JSONDecodeError as error:
        where = f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
        raise PlanFileError(f"not a whole plan, profile or device file: {where}; save it again") from error
    except RecursionError as error:
        raise PlanFileError("not a plan, profile or device file: it is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits, which Python will not convert
        raise PlanFileError("not a plan, profile or device file: it holds a number of absurd length") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanFileError(f"not a plan, profile or device file: key {twice[:80]!r} appears twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise PlanFileError(f"not a plan, profile or device file: it holds {name}, and every number must be finite")


class Node:
    """A parsed JSON value and the path to it.

    Parameters
    ----------
    value : object
    where : str
        Path for messages, for example ``"predicted.peak_at.module"``.
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def _fail(self, wanted: str) -> NoReturn:
        kind = json.dumps(self.value, default=str)[:40]
        if isinstance(self.value, (dict, list)):
            kind = "an object" if isinstance(self.value, dict) else "a list"
        raise PlanFileError(f"{self.where} must be {wanted}, not {kind}")

    def _path(self, key: str) -> str:
        key = key if len(key) <= 120 else key[:117] + "..."
        return key if self.where in ("the plan", "the profile") else f"{self.where}.{key}"

    def __getitem__(self, key: str) -> Node:
        """Give a field of an object; it must be there."""
        if not isinstance(self.value, dict):
            self._fail("an object")
        if key not in self.value:
            raise PlanFileError(f"{self._path(key)} is missing")
        return Node(self.value[key], self._path(key))

    def has(self, key: str) -> bool:
        """Whether an object has a field."""
        return isinstance(self.value, dict) and key in self.value

    def fields(self) -> Iterator[tuple[str, Node]]:
        """Give the names and values of an object whose names are not fixed."""
        if not isinstance(self.value, dict):
            self._fail("an object")
        for key, value in self.value.items():
            yield Node(key, f"a key of {self.where}").text(), Node(value, self._path(key))

    def items(self) -> Iterator[Node]:
        """Give the items of a list."""
        if not isinstance(self.value, list):
            self._fail("a list")
        for index, value in enumerate(self.value):
            yield Node(value, f"{self.where}[{index}]")

    def text(self) -> str:
        """Give a text of sensible length without control characters, which could play with a terminal."""
        if not isinstance(self.value, str):
            self._fail("text")
        if len(self.value) > _LONGEST_TEXT:
            raise PlanFileError(f"{self.where} is longer than {_LONGEST_TEXT} characters")
        if not self.value.isprintable():
            raise PlanFileError(f"{self.where} holds characters that cannot be printed")
        return self.value

    def one_of(self, *allowed: str) -> str:
        """Give a text that is one of a few."""
        if self.value not in allowed:
            self._fail(" or ".join(repr(a) for a in allowed))
        return self.text()

    def integer(self, *, negative: bool = False) -> int:
        """Give an integer that 64 bits hold."""
        wanted = "an integer" if negative else "an integer that is not negative"
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._fail(wanted)
        if abs(self.value) > _LARGEST_INTEGER or (self.value < 0 and not negative):
            self._fail(wanted + " below 2**63")
        return self.value

    def number(self, *, negative: bool = False) -> float:
        """Give a finite number of sensible size."""
        wanted = "a number" if negative else "a number that is not negative"
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            self._fail(wanted)
        if isinstance(self.value, int):
            return float(self.integer(negative=negative))
        if not abs(self.value) <= _LARGEST_NUMBER or (self.value < 0 and not negative):
            self._fail(f"{wanted} below {_LARGEST_NUMBER}")
        return self.value

    def boolean(self) -> bool:
        """Give true or false."""
        if not isinstance(self.value, bool):
            self._fail("true or false")
        return self.value

    def text_or_integer(self) -> str | int:
        """Give a text or an integer."""
        return self.text() if isinstance(self.value, str) else self.integer(negative=True)

    def is_null(self) -> bool:
        """Whether the value is null."""
        return self.value is None
