"""What packages define that grow by one file: solvers, runtimes, exporters, strategies, commands."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from planner.errors import UsageError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def files(path: Iterable[str]) -> list[str]:
    """Return the names of a package's public modules by its ``__path__``; nothing is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))


def defined(package: str, path: Iterable[str], attribute: str, kind: type[T]) -> dict[str, T]:
    """Return by name, sorted, what the public modules of a package define, by its ``__name__`` and ``__path__``.

    Each module gives its ``attribute`` one object of a kind, a class or a protocol that can be checked, or a tuple of
    several. A TypeError says that one has none, or that two have one name.
    """
    found: dict[str, T] = {}
    for module in [importlib.import_module(f"{package}.{file}") for file in files(path)]:
        given = getattr(module, attribute, None)
        for one in given if isinstance(given, tuple) and given else (given,):
            if not isinstance(one, kind):
                place = f"{module.__name__.replace('.', '/')}.py"
                raise TypeError(f"{place} defines no {attribute} with the attributes of {kind.__name__}")
            if one.name in found:
                raise TypeError(f"two of {package} are called {one.name!r}")
            found[one.name] = one
    return dict(sorted(found.items()))


def unknown(what: str, name: str, known: Iterable[str], near: Iterable[str] = ()) -> UsageError:
    """Return the error for a name that is not known: near ones, and all.

    >>> print(unknown("solver", "ipl", ["auto", "ilp"]))
    there is no solver 'ipl'; did you mean 'ilp'? there are auto, ilp
    """
    known = list(known)
    hint = did_you_mean(name.lower(), (*known, *near))
    return UsageError(f"there is no {what} {name!r}; {hint}there are {', '.join(known)}")


def did_you_mean(
    name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6, write: Callable[[str], str] = repr
) -> str:
    """Ask for the names that are near one, with a space after the question; nothing if there are none."""
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(write, near))}? " if near else ""
