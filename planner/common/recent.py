"""A small cache of recent results, for functions of large plain data that is compared and not hashed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_MOST = 4
"""Answers of each function: those of a step, of another order of it, and of both with what waits on the host."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def recent(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Cache a function's last few results by equal arguments.

    It must depend on nothing else, and nobody may change what it is given or gives.

    >>> asked = []
    >>> total = recent(lambda numbers: asked.append(numbers) or sum(numbers))
    >>> [total([1, 2]), total([1, 2]), total([3])], asked
    ([3, 3, 3], [[1, 2], [3]])
    """
    known: list[tuple[tuple[object, ...], Answer]] = []

    @wraps(function)
    def answered(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        arguments = (args, kwargs)
        for entry in tuple(known):  # another thread may add one
            if entry[0] == arguments:
                return entry[1]
        answer = function(*args, **kwargs)
        known.append((arguments, answer))
        del known[:-_MOST]
        return answer

    return answered
