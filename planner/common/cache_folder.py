"""Where what was found before is kept on this machine, so that nobody waits for it twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "CHECKPOINT_PLANNER_CACHE"
"""Names the folder to use in place of the usual one; ``off``: none."""


def folder(kind: str) -> Path | None:
    """Return the folder of what is kept of a kind, which need not exist; None if nothing is to be kept."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == "off":
        return None
    return (Path(chosen) if chosen else _usual_folder()) / kind


def turn_off() -> None:
    """Keep nothing, and find nothing, in this process and those that it starts."""
    os.environ[VARIABLE] = "off"


def _usual_folder() -> Path:
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "checkpoint-planner" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "checkpoint-planner"
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else home / ".cache") / "checkpoint-planner"
