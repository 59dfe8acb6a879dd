"""Read problems from JSON files, one object a file, in the format of published rematerialization instances.

Operations are numbered in their base order and make one value each. Sizes are in KiB and costs in
whatever unit the file has; a loaded problem keeps both numbers as they are, so that its bytes are
KiB and its seconds are that unit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from planner.common.json_reader import load, shown
from planner.errors import UsageError
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem

_MOST_OPERATIONS = 1_000_000
_LARGEST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What is known of an instance; all are total costs of the step, recompute included."""

    name: str
    base_cost: float
    """Every operation once."""
    published_cost: float | None = None
    best_known_cost: float | None = None
    """What the publication found, and the best found since."""
    lower_bound_cost: float | None = None
    """Proven for the base order."""


def load_instance(path: str | Path) -> tuple[Problem, Reference]:
    """Read an instance.

    Parameters
    ----------
    path : str or Path
        A JSON object with ``num_operations``, ``loss_operation``, ``output_kib``, ``cost``, ``edges``
        (``[u, v]``: v reads what u makes) and ``budget_kib``; ``name``, ``base_cost``,
        ``published_cost``, ``best_known_cost`` and ``lower_bound_cost`` if they are known. Other keys are
        passed over.

    Returns
    -------
    problem : Problem
    reference : Reference

    Raises
    ------
    UsageError
        If the file cannot be read or anything in it is wrong; says where, in one line.
    """
    data = _Reader(path)
    count = data.integer("num_operations", data.top("num_operations"), 1, _MOST_OPERATIONS)
    loss = data.integer("loss_operation", data.top("loss_operation"), 0, count - 1)
    sizes = [data.integer(f"output_kib[{i}]", x, 0) for i, x in enumerate(data.list("output_kib", count))]
    costs = [data.number(f"cost[{i}]", x) for i, x in enumerate(data.list("cost", count))]
    inputs: list[list[int]] = [[] for _ in range(count)]
    for i, edge in enumerate(data.list("edges")):
        where = f"edges[{i}]"
        if not isinstance(edge, list) or len(edge) != 2:
            data.fail(f"{where} must be two operations, [from, to]")
        source, reader = (data.integer(f"{where}[{end}]", x, 0, count - 1) for end, x in enumerate(edge))
        if source >= reader:
            data.fail(f"{where} goes from operation {source} to {reader}, against the base order")
        if source not in inputs[reader]:
            inputs[reader].append(source)
    name = data.name()
    graph = TrainingGraph(
        operations=tuple(
            Operation(
                name=f"operation{index}",
                key=f"operation{index}",
                target="",
                inputs=tuple(inputs[index]),
                outputs=(index,),
                phase=Phase.FORWARD if index < loss else Phase.LOSS if index == loss else Phase.BACKWARD,
            )
            for index in range(count)
        ),
        values=tuple(Value(name=f"value{u}", size_bytes=size) for u, size in enumerate(sizes)),
        name=name,
    )
    budget = data.integer("budget_kib", data.top("budget_kib"), 0)
    problem = Problem(graph=graph, costs=tuple(OperationCost(seconds=cost) for cost in costs), budget_bytes=budget)
    return problem, _reference(data, name, sum(costs))


def _reference(data: _Reader, name: str, base_cost: float) -> Reference:
    known = {key: data.optional(key) for key in ("published_cost", "best_known_cost", "lower_bound_cost")}
    claimed = data.optional("base_cost")
    if claimed is not None and not math.isclose(claimed, base_cost, rel_tol=1e-9):
        data.fail(f"base_cost is {claimed:g}, but the costs sum up to {base_cost:g}")
    for key, cost in known.items():
        if cost is not None and cost < base_cost * (1 - 1e-9):
            data.fail(f"{key} is {cost:g}, less than {base_cost:g} for every operation once")
    return Reference(name=name, base_cost=base_cost, **known)


class _Reader:
    """One file's object; whatever is wrong with it ends in one line that names the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.data: Any = load(path, "instance", self.parsed, UsageError)
        if not isinstance(self.data, dict):
            self.fail("not an instance: it must be an object")

    def parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
        except RecursionError:
            self.fail("not an instance: it is nested too deeply")
        except ValueError:  # an integer of thousands of digits, which Python will not convert
            self.fail("not an instance: it holds a number of absurd length")

    def fail(self, what: str) -> NoReturn:
        raise UsageError(f"cannot read instance {self.path}: {what}") from None

    def top(self, key: str) -> Any:
        if key not in self.data:
            self.fail(f"{key} is missing")
        return self.data[key]

    def name(self) -> str:
        name = self.data.get("name", Path(self.path).stem)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
            self.fail("name must be a short text")
        return name

    def list(self, key: str, length: int | None = None) -> list[Any]:
        value = self.top(key)
        if not isinstance(value, list):
            self.fail(f"{key} must be a list")
        if length is not None and len(value) != length:
            self.fail(f"{key} must have {length} items, one for each operation, not {len(value)}")
        return value

    def integer(self, where: str, value: Any, least: int, most: int = _LARGEST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(f"{where} must be an integer from {least} to {most}, not {shown(value)}")
        return value

    def number(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            self.fail(f"{where} must be a number from 0 to {_LARGEST}, not {shown(value)}")
        return float(value)

    def optional(self, key: str) -> float | None:
        value = self.data.get(key)
        return None if value is None else self.number(key, value)
