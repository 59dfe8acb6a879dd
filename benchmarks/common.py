"""What all benchmarks share: what ran them, their tables, and where their results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cost_models.devices import available_cores
from planner.capture.memory import keep_freed_memory
from planner.common.atomic import check_writable, write_text
from planner.errors import PlannerError, UsageError

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent

Result = dict[str, Any]


def parser(name: str, description: str | None, *, resumes: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark, and of those that may go on after an interruption."""
    summary = (description or "").split("\n\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=summary)
    made.add_argument(
        "--json",
        metavar="FILE",
        default=str(RESULTS / f"{name}.json"),
        help="where results go, a Markdown table beside them; - is standard output (default: benchmarks/results)",
    )
    if resumes:
        made.add_argument("--resume", action="store_true", help="keep what FILE has of this torch version")
    return made


def keep_memory() -> None:
    """Let times be without page faults where that can be."""
    if not keep_freed_memory():
        progress("this system's allocator cannot be told to keep memory: times include page faults")


def environment(name: str, arguments: Sequence[str]) -> Result:
    """Say what ran a benchmark: versions, threads, date and command; nothing of the machine's names or paths."""
    return {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *_without_destination(arguments)]),
        "is_resumed": "--resume" in arguments, "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__,
        "python": platform.python_version(), "threads": torch.get_num_threads(), "cpus": available_cores(),
        "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }  # fmt: skip


def earlier(name: str, destination: str) -> Result:
    """Read what an earlier run of a benchmark wrote, under the same torch; nothing if there is no such file.

    Raises
    ------
    UsageError
        If results do not go to a file, or that one holds something else.
    """
    if destination == "-":
        raise UsageError("to go on from earlier results they must be in a file: name one with --json, or start anew")
    with suppress(FileNotFoundError):
        try:
            found: Result = json.loads(Path(destination).read_text(encoding="utf-8"))
            return found if (found["benchmark"], found["torch"]) == (name, torch.__version__) else {}
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{destination} holds no results to go on from: name another file, or start anew"
            ) from error
    return {}


def _without_destination(arguments: Sequence[str]) -> list[str]:
    """Leave out of the command what changes where results go, not what they are."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument == "--json":
            next(rest, None)
        elif argument != "--resume" and not argument.startswith("--json="):
            kept.append(argument)
    return kept


def write(destination: str, result: Result, markdown: str) -> None:
    """Write results as JSON and, beside it, as Markdown; each file appears whole or not at all."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    write_text(destination, text)
    write_text(Path(destination).with_suffix(".md"), markdown)


def page(title: str, result: Result, *parts: str) -> str:
    """Put a title over the parts of a page and what ran the benchmark under it."""
    load = f", load average {result['load_average']} at the start" if result["load_average"] is not None else ""
    ran = (
        f"`{result['command']}` on {result['date']}: torch {result['torch']}, Python {result['python']}, "
        f"{result['threads']} threads, {result['cpus']} CPUs{load}."
    )
    if result.get("is_resumed"):
        ran += " It kept what earlier runs had found: that is of their date, their code and their options."
    return "\n\n".join([f"# {title}", *parts, ran]) + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; everything but the first column is aligned to the right.

    Examples
    --------
    >>> print(table(["model", "MiB"], [["gpt2", 12]]))
    | model | MiB |
    | --- | ---: |
    | gpt2 | 12 |
    """
    rules = ["---", *("---:" for _ in headings[1:])]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (headings, rules, *rows))


def percent(ratio: float | None, digits: int = 1) -> str:
    """Show a ratio in per cent.

    Examples
    --------
    >>> percent(0.0834), percent(None)
    ('8.3%', '-')
    """
    return "-" if ratio is None else f"{100 * ratio:.{digits}f}%"


def mebibytes(size_bytes: int | None) -> str:
    """Show bytes in MiB, to a tenth.

    Examples
    --------
    >>> mebibytes(3 * 2**20)
    '3.0'
    """
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """Show a model's sizes.

    Examples
    --------
    >>> sizes_text({"layers": 2, "dtype": "bfloat16"})
    'layers 2, dtype bfloat16'
    """
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sizes.items())


def progress(line: str) -> None:
    """Say on standard error how it stands."""
    print(line, file=sys.stderr, flush=True)


def chosen(wanted: str | None, known: Sequence[str]) -> list[str]:
    """Read a list of names with commas.

    Raises
    ------
    UsageError
        If a name is not known.
    """
    names = known if wanted is None else [name.strip() for name in wanted.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown name {unknown[0]!r}: known are {', '.join(known)}")
    return list(names)


def ratios(text: str, *, are_multiples: bool = False) -> list[float]:
    """Read percentages with commas as ratios: shares of a whole or, if asked for, multiples of it.

    Examples
    --------
    >>> ratios("80,60")
    [0.8, 0.6]
    """
    try:
        found = [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= ratio < 100 if are_multiples else 0 < ratio <= 1 for ratio in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentages such as 80,60")
    return found


def run(main: Callable[[Sequence[str]], int]) -> int:
    """Run a benchmark's main function on the command line; errors of ours are one line each."""
    try:
        return main(sys.argv[1:])
    except PlannerError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code


def check_destination(destination: str) -> None:
    """Refuse at once a place where results could not be written.

    Raises
    ------
    UsageError
    """
    if destination != "-":
        check_writable(destination)
        check_writable(Path(destination).with_suffix(".md"))
