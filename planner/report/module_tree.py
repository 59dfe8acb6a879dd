"""The modules of a plan as a tree, by their paths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.plans.plan import LayerPlacement


@dataclass
class Module:
    """A module, and what it is made of."""

    own: LayerPlacement | None = None
    """What the plan does with what it computes itself, outside of its parts."""
    parts: dict[str, Module] = field(default_factory=dict)

    def all(self) -> list[LayerPlacement]:
        """Return what the plan does with it and its parts."""
        inside = [layer for part in self.parts.values() for layer in part.all()]
        return inside if self.own is None else [self.own, *inside]

    def signature(self) -> object:
        """Return what two modules that are shown as one have in common."""
        own = self.own and (self.own.saved_bytes, self.own.freed_bytes, tuple(self.own.targets.items()))
        return own, tuple((name, part.signature()) for name, part in self.parts.items())


def module_tree(layers: Iterable[LayerPlacement]) -> Module:
    """Return the whole model, with every module in its place."""
    root = Module()
    for layer in layers:
        at = root
        for name in filter(None, layer.module.split(".")):
            at = at.parts.setdefault(name, Module())
        at.own = layer
    return root
