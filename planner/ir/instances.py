"""Read problems from JSON files, one object a file, in the format of published rematerialization instances.

Operations are numbered in their base order and make one value each. Sizes are in KiB and costs in
whatever unit the file has; a loaded problem keeps both numbers as they are, so that its bytes are
KiB and its seconds are that unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from planner.common.json_reader import load, parse
from planner.errors import PlanFileError, UsageError
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.problem import Problem

_MOST_OPERATIONS = 1_000_000
_MAY_BE_MISSING = {"older": True}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    """The object of a file."""

    num_operations: int
    loss_operation: int
    output_kib: tuple[int, ...]
    cost: tuple[float, ...]
    edges: tuple[tuple[int, ...], ...]
    budget_kib: int
    name: str = field(default="", metadata=_MAY_BE_MISSING)
    base_cost: float | None = field(default=None, metadata=_MAY_BE_MISSING)
    published_cost: float | None = field(default=None, metadata=_MAY_BE_MISSING)
    best_known_cost: float | None = field(default=None, metadata=_MAY_BE_MISSING)
    lower_bound_cost: float | None = field(default=None, metadata=_MAY_BE_MISSING)


def load_instance(path: str | Path) -> tuple[Problem, Reference]:
    """Read an instance.

    Parameters
    ----------
    path : str or Path
        A JSON object with ``num_operations``, ``loss_operation``, ``output_kib``, ``cost``, ``edges``
        (``[u, v]``: v reads what u makes) and ``budget_kib``; ``name``, ``base_cost``,
        ``published_cost``, ``best_known_cost`` and ``lower_bound_cost`` if they are known. Other keys are
        ignored.

    Returns
    -------
    problem : Problem
    reference : Reference

    Raises
    ------
    UsageError
        If the file cannot be read or anything in it is wrong; says where, in one line.
    """
    return load(path, "instance", partial(_read, Path(path).stem), UsageError)


def _read(file_name: str, text: str) -> tuple[Problem, Reference]:
    data = parse(text, "instance").read(_Instance)
    count, loss, name = data.num_operations, data.loss_operation, data.name or file_name
    _check_integer("num_operations", count, 1, _MOST_OPERATIONS)
    _check_integer("loss_operation", loss, 0, count - 1)
    for key, numbers in (("output_kib", data.output_kib), ("cost", data.cost)):
        if len(numbers) != count:
            raise PlanFileError(f"{key} must have {count} items, one for each operation, not {len(numbers)}")
    inputs = _inputs(data.edges, count)
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
        values=tuple(Value(name=f"value{u}", size_bytes=size) for u, size in enumerate(data.output_kib)),
        name=name,
    )
    costs = tuple(OperationCost(seconds=cost) for cost in data.cost)
    return Problem(graph=graph, costs=costs, budget_bytes=data.budget_kib), _reference(data, name, sum(data.cost))


def _inputs(edges: Sequence[Sequence[int]], count: int) -> list[dict[int, None]]:
    """Return what each operation reads, in the order of the edges."""
    inputs: list[dict[int, None]] = [{} for _ in range(count)]
    for number, edge in enumerate(edges):
        where = f"edges[{number}]"
        if len(edge) != 2:
            raise PlanFileError(f"{where} must be two operations, [from, to]")
        for end, index in enumerate(edge):
            _check_integer(f"{where}[{end}]", index, 0, count - 1)
        source, reader = edge
        if source >= reader:
            raise PlanFileError(f"{where} goes from operation {source} to {reader}, against the base order")
        inputs[reader][source] = None
    return inputs


def _check_integer(where: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise PlanFileError(f"{where} must be an integer from {least} to {most}, not {value}")


def _reference(data: _Instance, name: str, base_cost: float) -> Reference:
    known = {key: getattr(data, key) for key in ("published_cost", "best_known_cost", "lower_bound_cost")}
    if data.base_cost is not None and not math.isclose(data.base_cost, base_cost, rel_tol=1e-9):
        raise PlanFileError(f"base_cost is {data.base_cost:g}, but the costs sum up to {base_cost:g}")
    for key, cost in known.items():
        if cost is not None and cost < base_cost * (1 - 1e-9):
            raise PlanFileError(f"{key} is {cost:g}, less than {base_cost:g} for every operation once")
    return Reference(name=name, base_cost=base_cost, **known)
