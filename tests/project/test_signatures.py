"""What people call keeps its names, kinds and defaults: a snapshot of every public signature.

Set ``UPDATE_GOLDEN=1`` to write it anew, and read the difference before committing: a parameter that is
renamed, removed or moved breaks somebody's code.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cost_models
import planner
from planner import commands, errors, exporters, runtimes, solvers, strategies
from planner.capture import fake_mode
from planner.extras import pipelines

GOLDEN = Path(__file__).parent.parent / "golden" / "signatures.txt"
PLUG_INS = (
    solvers.Solver, runtimes.RuntimePlugin, runtimes.PlannedModel, exporters.Exporter, strategies.Strategy,
    strategies.Chosen, cost_models.CostModel, commands.Command,
)  # fmt: skip


def signature(name: str, function: Any) -> str:
    """Return names, kinds and defaults; annotations may be said in other words."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return f"{name}{inspect.Signature(parameters)}"


def members(owner: type) -> Iterator[str]:
    """Return the public fields, properties and methods of a class, its own and those that it inherits."""
    defaults = {f.name for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    annotated = {name for base in owner.__mro__ for name in vars(base).get("__annotations__", {})}
    for name in sorted({n for n in dir(owner) if not n.startswith("_")} | {n for n in annotated if n[0] != "_"}):
        static = inspect.getattr_static(owner, name, None)
        if isinstance(static, classmethod | staticmethod) or inspect.isfunction(static):
            yield signature(f"  {owner.__name__}.{name}", getattr(owner, name))
        elif name not in defaults:  # fields of a dataclass stand in its signature
            yield f"  {owner.__name__}.{name}"


def public() -> Iterator[str]:
    for package in (planner, pipelines):
        for name in sorted(package.__all__):
            thing = getattr(package, name)
            if inspect.isclass(thing) and issubclass(thing, errors.PlannerError):
                yield f"{package.__name__}.{name}"  # with the other errors, below
                continue
            if callable(thing):
                yield signature(f"{package.__name__}.{name}", thing)
            if inspect.isclass(thing):
                yield from members(thing)
    yield signature("planner.capture.fake_mode", fake_mode)
    for name, error in sorted(vars(errors).items()):
        if inspect.isclass(error) and error.__module__ == errors.__name__:
            yield signature(f"planner.errors.{name}", error.__init__)
    for protocol in PLUG_INS:
        fields = dataclasses.is_dataclass(protocol)
        yield "plug-in: " + (signature(protocol.__name__, protocol) if fields else protocol.__name__)
        yield from members(protocol)


def test_public_signatures_stay() -> None:
    now = "\n".join(public()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(now, encoding="utf-8")
    lines = (text.splitlines() for text in (GOLDEN.read_text(encoding="utf-8"), now))
    changed = "\n".join(difflib.unified_diff(*lines, "before", "now", lineterm="", n=0))
    assert not changed, f"public signatures changed; if that is meant, run this test with UPDATE_GOLDEN=1:\n{changed}"
