"""Keep measured operation times on disk, so that planning a similar model again measures little or nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from cost_models.measured import Measurement
from planner.common import cache_folder
from planner.common.json_reader import parse, to_data
from planner.errors import UsageError

KIND = "measurements"

MOST = 50_000
"""How many operations are kept of a place; then those go that were measured longest ago."""

LIMIT_BYTES = 64 << 20
"""How large the measurements of all places together may become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    place: str
    took: dict[str, Measurement]
    """By a digest of the signature."""


def find(place: str) -> dict[str, Measurement]:
    """Return what is kept for a place, by :func:`digest`."""
    return cache_folder.find(KIND, digest(place), partial(_read, place), LIMIT_BYTES) or {}


def keep(place: str, found: Mapping[str, Measurement]) -> None:
    """Add measurements, by :func:`digest`, to those of a place: machine, device, threads and version of torch."""
    if found:
        both = {**find(place), **found}
        file = _File(place=place, took=dict([*both.items()][-MOST:]))
        cache_folder.keep(KIND, digest(place), json.dumps(to_data(file), allow_nan=False), LIMIT_BYTES)


def digest(name: str) -> str:
    """Return a short name for a signature, or a place."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _read(place: str, text: str) -> dict[str, Measurement]:
    file = parse(text, "file of measurements").read(_File)
    if file.place != place:
        raise UsageError("not what was written")
    return file.took
