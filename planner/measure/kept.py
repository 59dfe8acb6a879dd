"""What operations took on this machine, kept on disk: planning a like model again measures nothing."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cost_models.measured import Measurement
from planner.common import atomic, cache_folder
from planner.common.json_reader import load, parse, to_data
from planner.errors import PlannerError, UsageError

KIND = "measurements"

MOST = 50_000
"""How many operations are kept of a device; then those go that were measured longest ago."""

_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    place: str
    took: dict[str, Measurement]
    """By a digest of the signature."""


def place_of(device: torch.device) -> str:
    """Name what times hold for: machine, device, threads and version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{platform.node()}, {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.__version__}"


def find(place: str) -> dict[str, Measurement]:
    """Return what is kept for a place, by :func:`digest`; nothing if the file is damaged."""
    path = _path(place)
    if path is None or not path.exists():
        return {}
    try:
        return load(path, "file of measurements", partial(_read, place), UsageError, _LARGEST_BYTES)
    except (OSError, PlannerError):
        with suppress(OSError):
            path.unlink()
        return {}


def keep(place: str, found: Mapping[str, Measurement]) -> None:
    """Add measurements, by :func:`digest`, to those of a place; where that cannot be written, nothing is kept."""
    path = _path(place)
    if path is None or not found:
        return
    both = {**find(place), **found}
    file = _File(place=place, took=dict([*both.items()][-MOST:]))
    with suppress(OSError, UsageError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(to_data(file), allow_nan=False))


def size_bytes() -> int:
    """Say how large the files are together."""
    return sum(path.stat().st_size for path in _files())


def clear() -> None:
    """Remove all measurements."""
    for path in _files():
        with suppress(OSError):
            path.unlink()


def digest(signature: str) -> str:
    """Return a short name for a signature."""
    return hashlib.sha256(signature.encode()).hexdigest()[:24]


def _path(place: str) -> Path | None:
    folder = cache_folder.folder(KIND)
    return None if folder is None else folder / f"{digest(place)}.json"


def _files() -> list[Path]:
    folder = cache_folder.folder(KIND)
    return [] if folder is None else sorted(folder.glob("*.json"))


def _read(place: str, text: str) -> dict[str, Measurement]:
    file = parse(text, "file of measurements").read(_File)
    if file.place != place:
        raise UsageError("not what was written")
    return file.took
