"""Check plans of planning instances: ``python check.py`` checks all that came with the instances in its folder.

``python check.py instances/NAME.json MY_PLANS.json`` checks plans of your own: one JSON object or a list of them, with
"budget_bytes" and "order"; "by", "peak_bytes" and "added_seconds" are up to you. Exit code 1 if something is
wrong. It needs Python 3.9 and nothing else. README.md beside it says what a plan is, and what it may do.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 1e-9
"""Of times, as a share of the step: sums of floating-point numbers depend on their order."""


class Wrong(Exception):
    """An instance or a plan is not what it says, or not what it must be."""


def read(path: str | Path) -> Any:
    """Read a file of JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Wrong(f"{path}: {error}") from error


def field(where: str, record: Any, key: str, kind: type, least: float = 0) -> Any:
    """Return an entry of an object, which must be of a kind and, if it is a number, neither infinite nor too small."""
    found: Any = record.get(key) if isinstance(record, dict) else None
    if type(found) not in ((int, float) if kind is float else (kind,)):
        raise Wrong(f"{where}: {key} is {found!r}, and must be of type {kind.__name__}")
    if kind in (int, float) and not least <= found < math.inf:
        raise Wrong(f"{where}: {key} is {found}, and must be from {least} up, and finite")
    return found


def indices(where: str, record: Any, key: str, count: int) -> list[int]:
    """Return an entry that is a list of whole numbers below a count."""
    found: list[int] = field(where, record, key, list)
    for index in found:
        if type(index) is not int or not 0 <= index < count:
            raise Wrong(f"{where}: {key} has {index!r}, and must have whole numbers from 0 to {count - 1}")
    return found


class Instance:
    """The step of a model: its operations in their base order, and the values that they make."""

    def __init__(self, data: Any) -> None:
        self.name = field("the instance", data, "name", str)
        self.resident = field(self.name, data, "resident_bytes", int)
        values = [(f"{self.name}, value {v}", x) for v, x in enumerate(field(self.name, data, "values", list))]
        self.bytes = [field(where, value, "bytes", int) for where, value in values]
        self.retained = [field(where, value, "retained", bool) for where, value in values]
        self.operations = field(self.name, data, "operations", list)
        made: set[int] = set()
        for index, operation in enumerate(self.operations):
            where = f"{self.name}, operation {index}"
            field(where, operation, "seconds", float)
            field(where, operation, "workspace_bytes", int, -math.inf)
            field(where, operation, "random_state_bytes", int)
            field(where, operation, "recomputable", bool)
            for value in indices(where, operation, "inputs", len(values)):
                if value not in made:
                    raise Wrong(f"{where} reads value {value} before it is made")
            for value in indices(where, operation, "outputs", len(values)):
                if value in made:
                    raise Wrong(f"{where} makes value {value}, which is there already")
                made.add(value)
        if len(made) < len(values):
            raise Wrong(f"{self.name}: no operation makes value {min(set(range(len(values))) - made)}")
        self.seconds = math.fsum(operation["seconds"] for operation in self.operations)
        self.bounds: dict[int, float] = {}
        for row in field(self.name, data, "budgets", list):
            budget = field(f"{self.name}, a budget", row, "budget_bytes", int)
            self.bounds[budget] = field(f"{self.name}, a budget", row, "lower_bound_seconds", float)

    def added(self, where: str, plan: Any) -> float:
        """Return the seconds that a plan adds; Wrong if it cannot be run."""
        first, again = 0, []
        for index in indices(where, plan, "order", len(self.operations)):
            if index > first:
                raise Wrong(f"{where}: operation {index} runs before operation {first} has run")
            if index == first:
                first += 1
                continue
            if not self.operations[index]["recomputable"]:
                raise Wrong(f"{where}: operation {index} runs twice and is not recomputable")
            again.append(self.operations[index]["seconds"])
        if first < len(self.operations):
            raise Wrong(f"{where}: operation {first} never runs")
        return math.fsum(again)

    def peak(self, order: Sequence[int]) -> int:
        """Return the most bytes that are held while any operation of an order runs."""
        frees: list[list[int]] = [[] for _ in order]
        needed: set[int] = set()
        for position in range(len(order) - 1, -1, -1):  # backwards, the first read that is met is the last one
            operation = self.operations[order[position]]
            for value in operation["outputs"]:
                if not self.retained[value] and value not in needed:
                    frees[position].append(value)
                needed.discard(value)
            for value in operation["inputs"]:
                if not self.retained[value] and value not in needed:
                    frees[position].append(value)
                    needed.add(value)
        last = {index: position for position, index in enumerate(order)}
        ran: set[int] = set()
        held, most = self.resident, 0
        for position, index in enumerate(order):
            operation, is_first = self.operations[index], index not in ran
            ran.add(index)
            state = operation["random_state_bytes"]
            held += sum(self.bytes[value] for value in operation["outputs"])
            held += state if is_first and last[index] > position else 0
            most = max(most, held + operation["workspace_bytes"])
            held -= sum(self.bytes[value] for value in frees[position])
            if not is_first:
                held -= sum(self.bytes[value] for value in operation["outputs"] if self.retained[value])
                held -= state if last[index] == position else 0
        return most

    def check(self, plan: Any) -> tuple[int, int, float]:
        """Return the peak of a plan, its budget and the seconds that it adds; Wrong if it claims something else."""
        budget = field(f"{self.name}, a plan", plan, "budget_bytes", int)
        where = f"{self.name}, {plan.get('by', 'a plan')} for {budget} bytes"
        if budget not in self.bounds:
            raise Wrong(f"{where}: the budgets of the instance are {sorted(self.bounds)}")
        added = self.added(where, plan)
        peak, near = self.peak(plan["order"]), TOLERANCE * max(self.seconds, added)
        if peak > budget:
            raise Wrong(f"{where}: its peak is {peak} bytes, {peak - budget} above the budget")
        if field(where, {"peak_bytes": peak, **plan}, "peak_bytes", int) != peak:
            raise Wrong(f"{where}: it claims a peak of {plan['peak_bytes']} bytes, and has {peak}")
        if abs(field(where, {"added_seconds": added, **plan}, "added_seconds", float) - added) > near:
            raise Wrong(f"{where}: it claims to add {plan['added_seconds']} s, and adds {added}")
        if added < self.bounds[budget] - near:
            raise Wrong(f"{where}: it adds {added} s, and so refutes the bound of {self.bounds[budget]} s: tell us")
        return peak, budget, added


def checked(data: Any, plans: list[Any] | None = None) -> Iterator[str]:
    """Check an instance with its plans or with others; yield a line on each of these."""
    instance = Instance(data)
    peak, _ = instance.peak(range(len(instance.operations))), field(instance.name, data, "peak_bytes", int)
    if peak != data["peak_bytes"]:
        raise Wrong(
            f"{instance.name}: without recompute it claims a peak of {data['peak_bytes']} bytes, and has {peak}"
        )
    known: dict[int, float] = {}
    for plan in field(instance.name, data, "plans", list):
        _, budget, added = instance.check(plan)
        known[budget] = min(added, known.get(budget, math.inf))
    for plan in data["plans"] if plans is None else plans:
        peak, budget, added = instance.check(plan)
        best = known.get(budget, math.inf)
        shares = [100 * seconds / instance.seconds for seconds in (added, instance.bounds[budget], best)]
        better = ": BETTER than any that is known" if added < best - TOLERANCE * instance.seconds else ""
        yield (
            f"{instance.name}, {plan.get('by', 'a plan')}: {peak} of {budget} bytes, +{shares[0]:.3f}% "
            f"(proven: at least {shares[1]:.3f}%, best known {shares[2]:.3f}%){better}"
        )


def main(arguments: Sequence[str]) -> int:
    """Check what the command line says; see the top of the file."""
    if "--help" in arguments:
        print(__doc__)
        sys.exit(0)
    files = arguments[:1] or sorted(Path(__file__).with_name("instances").glob("*.json"))
    wrong = 0 if files else 1
    for file in files:
        try:
            found = [read(path) for path in arguments[1:]]
            mine = [plan for each in found for plan in (each if isinstance(each, list) else [each])]
            for line in checked(read(file), mine if found else None):
                print(line)
        except Wrong as error:
            print(f"WRONG: {error}", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
