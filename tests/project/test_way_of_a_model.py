"""How many files a model that is handed to ``auto_wrap`` passes as an argument, and how often it climbs back up."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import planner
from tests.models import Stack, rows

ROOT = Path(__file__).parent.parent.parent
FILES_AT_MOST, CLIMBS_AT_MOST = 20, 5


def rooms_from_above() -> list[str]:
    """Return the rooms in the order in which they may import each other; those beside each other are one."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = settings["importlinter:contract:rooms"]["layers"].split("\n")
    return [layer.strip() for layer in layers if layer.strip()]


def height(module: str, rooms: list[str]) -> int:
    ours = ".".join(module.split(".")[:2])
    return next(level for level, layer in enumerate(rooms) if ours in layer.split(" : "))


def test_a_model_goes_down_and_passes_few_files() -> None:
    model, x = Stack(2), rows(64)
    passes: list[tuple[str, str]] = []

    def seen(frame: FrameType, event: str, _: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or not module.startswith("planner.") or code.co_name.startswith("<"):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals.get(name) is model for name in arguments):
            caller = frame.f_back
            while caller is not None and not caller.f_globals.get("__name__", "").startswith("planner."):
                caller = caller.f_back
            passes.append((module if caller is None else caller.f_globals["__name__"], module))

    sys.setprofile(seen)
    try:
        planner.auto_wrap(model, x, budget="70%", search=planner.Search(deterministic=True))
        model(x).backward()
    finally:
        sys.setprofile(None)
    rooms = rooms_from_above()
    files = {module for _, module in passes}
    climbs = {(above, below) for below, above in passes if height(above, rooms) < height(below, rooms)}
    assert 10 < len(files) <= FILES_AT_MOST, sorted(files)
    assert len(climbs) <= CLIMBS_AT_MOST, sorted(climbs)
