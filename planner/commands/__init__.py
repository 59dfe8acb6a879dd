"""The commands of the command line, found by their files.

Every public module of this package defines a ``COMMAND``, or a tuple of them; dropping a file in is all it takes.
Nothing slow is imported at the top of these files: ``--help`` must answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from planner.commands._options import Parser
from planner.common.registry import defined


@runtime_checkable
class Command(Protocol):
    """Protocol of a command module's ``COMMAND``."""

    name: str
    """The name that users type."""
    summary: str
    """One line on what it does."""
    examples: tuple[str, ...]
    """What to type after the program's name; ``--help`` ends with them."""

    def parents(self) -> Sequence[Parser]:
        """Return the groups of options that it shares with other commands."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that are its own."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, and return the exit code."""


def commands() -> list[Command]:
    """Return all commands, in the order of their names."""
    return list(defined(__name__, __path__, "COMMAND", Command).values())  # type: ignore[type-abstract]
