"""Compare two plan files: settings, layers, and values that are saved in one and recomputed in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from planner.common.json_reader import attributes
from planner.common.options import chunks_of
from planner.errors import UsageError
from planner.ir.graph import named_by
from planner.ir.layers import layer_among
from planner.plans.plan import SCHEMA, LayerPlacement, Plan
from planner.plans.values import ValueRow

_SHARED_AT_LEAST = 0.5
"""Of the operations that the smaller plan names, how many the other must know to be of a similar model."""

KEPT, RECOMPUTED, OFFLOADED, LET_GO = "kept", "recomputed", "offloaded", "let go"
"""What a plan does with a value; what nobody reads in the backward is let go."""

RUN_ONCE, RUN_AGAIN = "run once", "run again"
"""What a plan does with an operation, where it has no table of its values."""

_HEADER: dict[str, Callable[[Plan], Any]] = {
    "model": lambda plan: plan.model,
    "class": lambda plan: plan.fingerprint.get("model", ""),
    "parameters": lambda plan: plan.fingerprint.get("parameters", ""),
    "inputs": lambda plan: plan.fingerprint.get("inputs", ""),
    "graph": lambda plan: plan.fingerprint.get("graph", ""),
    "device": lambda plan: plan.device,
    "runtime": lambda plan: plan.runtime,
    "cost model": lambda plan: plan.cost_model,
    "torch": lambda plan: plan.torch,
    "budget_bytes": lambda plan: plan.budget_bytes,
    "static_bytes": lambda plan: plan.total_static_bytes,
    "host_budget_bytes": lambda plan: plan.offloading.host_budget_bytes if plan.offloading else 0,
    "offload_lossy": lambda plan: plan.offloading is not None and plan.offloading.lossy,
    "slices": lambda plan: chunks_of(plan.fingerprint),
    "solver": lambda plan: plan.solver,
    "status": lambda plan: plan.status,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """What plan A and plan B do with a layer, and the change from A to B."""

    module: str
    block: bool
    """Whether it is one of a numbered row of blocks."""
    a: LayerPlacement
    b: LayerPlacement

    @property
    def saved_bytes(self) -> int:
        """How much more B holds of it into the backward."""
        return self.b.saved_bytes - self.a.saved_bytes

    @property
    def recomputed(self) -> int:
        """How many more of its operations B runs again."""
        return self.b.recomputed - self.a.recomputed

    @property
    def added_seconds(self) -> float:
        """How much more time B spends on that."""
        return self.b.added_seconds - self.a.added_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A value that one plan keeps and the other does not; before and after are the words above."""

    operation: str
    """Key of the operation that makes it."""
    output: int | None
    """Which of that operation's results it is; None for all of them, where a plan has no table of its values."""
    block: str
    """Path of the block that makes it, ``""`` if none does."""
    size_bytes: int | None
    """None if it is not known or not the same in both."""
    before: str
    after: str

    @property
    def module(self) -> str:
        """Path of the module that makes it."""
        return named_by(self.operation)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What plan B does otherwise than plan A."""

    a: Plan
    b: Plan
    header: dict[str, tuple[Any, Any]]
    """What the two were made for and how, as far as it differs."""
    layers: tuple[LayerDifference, ...]
    """The layers that change, in forward order."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    """Blocks that the other plan's model does not have."""
    moves: tuple[Move, ...]
    by_value: bool
    """Whether moves are of values; else of operations, since a plan has no table of its values."""

    @property
    def peak_bytes(self) -> int:
        """How much higher B peaks."""
        return self.b.peak_bytes - self.a.peak_bytes

    @property
    def recompute_seconds(self) -> float:
        """How much longer B recomputes."""
        return self.b.recompute_seconds - self.a.recompute_seconds

    @property
    def added_seconds(self) -> float:
        """How much more time B adds to the step, by recompute and by waiting for transfers."""
        return self.b.added_seconds - self.a.added_seconds

    @property
    def host_bytes(self) -> int:
        """How much more B offloads."""
        return _host_bytes(self.b) - _host_bytes(self.a)

    @property
    def same_inputs(self) -> bool:
        """Whether both are for inputs of the same sizes."""
        return "inputs" not in self.header

    @property
    def same_costs(self) -> bool:
        """Whether both count with the same times, so that overheads can be compared."""
        return self.a.baseline_step_seconds == self.b.baseline_step_seconds

    @property
    def moved_layers(self) -> int:
        """In how many blocks, and modules beside them, something moved."""
        return len({move.block or move.module for move in self.moves})

    def report(self) -> dict[str, Any]:
        """Return the difference as JSON has it; changes are those from A to B."""

        def both(of: Callable[[Plan], float]) -> dict[str, float]:
            a, b = of(self.a), of(self.b)
            return {"a": a, "b": b, "change": b - a}

        return {
            "schema": SCHEMA,
            "model": self.b.model,
            **attributes(self, "same_inputs", "same_costs"),
            **{name: both(attrgetter(name)) for name in ("peak_bytes", "recompute_seconds", "added_seconds")},
            "host_bytes": both(_host_bytes),
            "overhead": both(attrgetter("overhead")),
            "header": {name: {"a": a, "b": b} for name, (a, b) in self.header.items()},
            "layers": [
                {
                    **attributes(layer, "module", "saved_bytes", "recomputed", "added_seconds"),
                    "a": asdict(layer.a),
                    "b": asdict(layer.b),
                }
                for layer in self.layers
            ],
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "moves_are_of": "values" if self.by_value else "operations",
            "moves": [asdict(move) for move in self.moves],
        }


def diff(a: Plan, b: Plan) -> Difference:
    """Say what one plan does otherwise than another.

    Parameters
    ----------
    a, b : Plan
        Of one model, or of similar ones: changes are from the first to the second.

    Returns
    -------
    Difference

    Raises
    ------
    UsageError
        If they are plans of different models, which name few operations in common.

    Examples
    --------
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> step = planner.study(model, torch.randn(256, 64))
    >>> difference = planner.diff(step.plan(budget="100%"), step.plan(budget="80%"))
    >>> difference.peak_bytes < 0 < difference.recompute_seconds
    True
    """
    _check_similar(a, b)
    layers_a, layers_b = ({layer.module: layer for layer in plan.placement} for plan in (a, b))
    blocks = {layer.module for layer in (*a.placement, *b.placement) if layer.block}
    only_in_a, only_in_b = (
        tuple(name for name, layer in own.items() if layer.block and name not in other)
        for own, other in ((layers_a, layers_b), (layers_b, layers_a))
    )
    by_value = a.values is not None and b.values is not None
    moves = _moves(_states(a, by_value), _states(b, by_value), LET_GO if by_value else RUN_ONCE, blocks)
    return Difference(
        a=a,
        b=b,
        header={name: (of(a), of(b)) for name, of in _HEADER.items() if of(a) != of(b)},
        layers=_changed(layers_a, layers_b),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        moves=tuple(move for move in moves if move.block not in (*only_in_a, *only_in_b)),
        by_value=by_value,
    )


def _check_similar(a: Plan, b: Plan) -> None:
    kinds = [(plan.fingerprint.get("model"), plan.fingerprint.get("parameters")) for plan in (a, b)]
    if kinds[0] == kinds[1] and None not in kinds[0]:
        return
    named_a, named_b = _named(a), _named(b)
    shared, fewest = len(named_a & named_b), min(len(named_a), len(named_b))
    if fewest and shared >= _SHARED_AT_LEAST * fewest:
        return
    name_a, name_b = (plan.model or "a model without a name" for plan in (a, b))
    raise UsageError(
        f"these are plans of different models, {name_a} and {name_b}: of the operations that they name, {shared} of "
        f"{fewest} are in both; compare plans of one model"
    )


def _host_bytes(plan: Plan) -> int:
    return plan.offloading.host_bytes if plan.offloading else 0


def _named(plan: Plan) -> set[str]:
    """Return the keys of operations that a plan names."""
    keys = {row.operation for row in plan.values.rows} if plan.values is not None else set()
    return keys | {key for before in plan.recomputations.items() for key in (before[0], *before[1])}


def _changed(layers_a: dict[str, LayerPlacement], layers_b: dict[str, LayerPlacement]) -> tuple[LayerDifference, ...]:
    """Return the layers that change; one that is no block and stands in one plan only holds nothing in the other."""
    changed = []
    for module in dict.fromkeys((*layers_a, *layers_b)):
        known = layers_a.get(module) or layers_b[module]
        if known.block and not (module in layers_a and module in layers_b):
            continue
        nothing = LayerPlacement(
            module=module, block=known.block, saved_bytes=0, freed_bytes=0, recomputed=0, added_seconds=0.0,
            forward_seconds=known.forward_seconds,
        )  # fmt: skip
        one, other = layers_a.get(module, nothing), layers_b.get(module, nothing)
        found = LayerDifference(module=module, block=known.block, a=one, b=other)
        moved = one.offloaded_bytes != other.offloaded_bytes or one.targets != other.targets
        if found.saved_bytes or found.recomputed or found.added_seconds or moved:
            changed.append(found)
    return tuple(changed)


_States = dict[tuple[str, int | None], tuple[str, int | None]]
"""For an operation and which of its results, what a plan does with that, and its bytes, as far as they are known."""


def _states(plan: Plan, by_value: bool) -> _States:
    if by_value and plan.values is not None:
        return {(row.operation, row.output): (_state(row), row.size_bytes) for row in plan.values.rows}
    return {(key, None): (RUN_AGAIN, None) for keys in plan.recomputations.values() for key in keys}


def _state(row: ValueRow) -> str:
    if row.offloaded:
        return OFFLOADED
    return KEPT if row.kept else RECOMPUTED


def _moves(states_a: _States, states_b: _States, absent: str, blocks: set[str]) -> Iterator[Move]:
    for place in dict.fromkeys((*states_a, *states_b)):
        sizes = {states[place][1] for states in (states_a, states_b) if place in states}
        before, after = (states.get(place, (absent, None))[0] for states in (states_a, states_b))
        if before != after:
            yield Move(
                operation=place[0],
                output=place[1],
                block=layer_among(named_by(place[0])[0], blocks),
                size_bytes=sizes.pop() if len(sizes) == 1 else None,
                before=before,
                after=after,
            )
