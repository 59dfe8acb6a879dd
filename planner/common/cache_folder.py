"""The cache folder on this machine: solutions and timings of earlier runs, as files.

They are never trusted, and never missed: one that is damaged, a link, or cannot be read is as good as none, and where
none can be written none is kept.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from planner.common import atomic, json_reader
from planner.errors import PlannerError, UsageError

VARIABLE = "CHECKPOINT_PLANNER_CACHE"
"""Names the folder to use in place of the usual one; ``off``: none."""

_ABANDONED_SECONDS = 3600.0

T = TypeVar("T")


def folder(kind: str) -> Path | None:
    """Return the cache folder of a kind, which need not exist; None if caching is off."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == "off":
        return None
    return (Path(chosen) if chosen else _usual_folder()) / kind


def turn_off() -> None:
    """Turn the cache off in this process and those that it starts."""
    os.environ[VARIABLE] = "off"


def find(kind: str, key: str, read: Callable[[str], T], largest_bytes: int) -> T | None:
    """Return a cached text, parsed by ``read``; remove the file if that refuses it."""
    place = folder(kind)
    if place is None:
        return None
    path = place / f"{key}.json"
    if not os.path.lexists(path):
        return None
    try:
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is no file of ours")
        found = json_reader.load(path, kind, read, UsageError, largest_bytes)
    except (OSError, PlannerError):
        _remove(path)
        return None
    with suppress(OSError):
        os.utime(path)  # used last
    return found


def keep(kind: str, key: str, text: str, limit_bytes: int) -> None:
    """Cache a text under a key; beyond the size limit the least recently used ones are removed."""
    place = folder(kind)
    if place is None:
        return
    path = place / f"{key}.json"
    with suppress(OSError, UsageError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()  # nothing elsewhere is ours to write
        atomic.write_text(path, text)
        _make_room(kind, limit_bytes)


def _usual_folder() -> Path:
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "checkpoint-planner" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "checkpoint-planner"
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else home / ".cache") / "checkpoint-planner"


def _files(kind: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Return the files of a kind, and those that a process left half-written when it was killed."""
    place = folder(kind)
    if place is None or not place.is_dir():
        return
    for entry in os.scandir(place):
        ours = entry.name.endswith(".json") or (entry.name.startswith(".") and entry.name.endswith(".tmp"))
        with suppress(OSError):
            if ours and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _make_room(kind: str, limit_bytes: int) -> None:
    """Remove what was used longest ago beyond the limit, and what was never finished."""
    by_use = sorted(_files(kind), key=lambda file: file[1].st_mtime, reverse=True)
    kept_bytes = 0
    for path, status in by_use:
        abandoned = path.suffix == ".tmp" and time.time() - status.st_mtime > _ABANDONED_SECONDS
        kept_bytes += status.st_size
        if abandoned or (kept_bytes > limit_bytes and path.suffix == ".json"):
            _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
