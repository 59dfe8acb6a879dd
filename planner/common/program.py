"""The words that start the command line as this process was started, so that printed hints can be copied."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath

NAME = "checkpoint-planner"
"""The console script; hints have it wherever the command line was not started."""


def program() -> str:
    """Return how the command line of this process was started, ``"checkpoint-planner"`` if it was not."""
    return called_as(sys.orig_argv, sys.argv)


def called_as(typed: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the part of a command before its arguments, if it is one of ours.

    >>> called_as([".venv/bin/python", "cli.py", "plan", "gpt2"], ["cli.py", "plan", "gpt2"])
    '.venv/bin/python cli.py'
    >>> called_as(["python", "-m", "planner", "plan"], ["/some/where/planner/__main__.py", "plan"])
    'python -m planner'
    >>> called_as(["/bin/python", "/bin/checkpoint-planner", "plan"], ["/bin/checkpoint-planner", "plan"])
    'checkpoint-planner'
    >>> called_as(["python", "train.py"], ["train.py"])
    'checkpoint-planner'
    """
    script = PurePath(arguments[0] if arguments else "")
    if script.name != "cli.py" and script.parts[-2:] != ("planner", "__main__.py"):
        return NAME
    return shlex.join(typed[: len(typed) - len(arguments) + 1])
