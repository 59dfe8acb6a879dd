"""Which products of a step tensor parallelism spreads over devices, found in the captured graph and not by names.

A product with a parameter whose input is whole may be *column-parallel*: each device has some of its
outputs. It is, if all that its output passes works on each part alone until another product with a
parameter sums over the parts; that one is *row-parallel*, and its output is summed over the devices
(Shoeybi et al., "Megatron-LM", 2019). So every such product is tried, in the order of the graph, and the rules
of ``planner.transforms.shard_rules`` follow its output through forward and backward. Where one says that parts are
mixed, the products that the parts come from are tried again divided in other blocks, or are left whole.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.capture.joint import JointGraph, needed_by_forward, parameter_nodes, tensors_of
from planner.transforms.operators import shape_of
from planner.transforms.shard_rules import state_after
from planner.transforms.shard_views import PASSES_SUMS
from planner.transforms.shards import Call, NeedsRedistribute, Partial, Shard, State, origins_of

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Products with a parameter, and at which position their left factor stands."""

_CASTS = frozenset({aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default})
_TURNS = frozenset({aten.t.default, aten.transpose.int})


@dataclass(frozen=True)
class Sharding:
    """What each of several devices has of a step; without columns if there is nothing to spread."""

    devices: int
    states: dict[fx.Node, Any]
    """Of each node's output; a list where it has several."""
    columns: tuple[fx.Node, ...]
    """Products that are column-parallel."""
    rows: tuple[fx.Node, ...]
    """Products that are row-parallel."""
    whole: tuple[fx.Node, ...]
    """Products with a parameter that each device computes whole."""
    summed: frozenset[fx.Node]
    """Nodes whose output is summed over the devices, in place."""


def find_sharding(joint: JointGraph, devices: int) -> Sharding:
    """Find what tensor parallelism over so many devices spreads; each further try begins at the product that failed."""
    return _ShardSearch(joint, devices).run()


class _Again(Exception):
    """Something decided before was wrong: go on from this node."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.node = node


class _ShardSearch:
    def __init__(self, joint: JointGraph, devices: int) -> None:
        self.joint = joint
        self.devices = devices
        self.nodes = list(joint.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.forward = needed_by_forward(joint)
        self.parameters = parameter_nodes(joint)
        self.states: dict[fx.Node, Any] = {}
        self.decided: dict[fx.Node, int] = {}
        """Parameters that are settled, sharded or whole, and the place of the node that did."""
        self.columns: dict[fx.Node, int] = {}
        self.rows: dict[fx.Node, int] = {}
        self.summed: dict[fx.Node, int] = {}
        """Nodes, and the place of the node that made them what they are."""
        self.to_sum: set[fx.Node] = set()
        self.dropped: set[fx.Node] = set()
        self.cuts: dict[fx.Node, frozenset[int]] = {}

    def run(self) -> Sharding:
        at = 0
        while at < len(self.nodes):
            self.here = at
            node = self.nodes[at]
            try:
                self.states[node] = self._state(node)
                at += 1
            except (NeedsRedistribute, _Again) as wrong:
                at = self._begin_again(wrong) if isinstance(wrong, NeedsRedistribute) else self.order[wrong.node]
                self._forget(at)
        products = [n for n in self.nodes if n in self.forward and self._weight(n) is not None]
        spread = self.columns.keys() | self.rows.keys()
        return Sharding(
            devices=self.devices,
            states=self.states,
            columns=tuple(self.columns),
            rows=tuple(self.rows),
            whole=tuple(n for n in products if n not in spread),
            summed=frozenset(self.summed),
        )

    def _begin_again(self, mixes: NeedsRedistribute) -> int:
        """Divide the products that are to blame in other blocks, or leave them whole."""
        assert mixes.origins, f"{self.nodes[self.here].name} reads nothing that is divided"
        finer = False
        for product in mixes.origins:
            known = self.cuts.get(product, frozenset())
            if shape_of(product)[1] == mixes.length and not mixes.cuts <= known | {0, mixes.length}:
                self.cuts[product] = known | mixes.cuts
                finer = True
        if not finer:
            self.dropped |= mixes.origins
        at = min(self.order[product] for product in mixes.origins)
        self.to_sum = {node for node in self.to_sum if self.order[node] < at}
        return at

    def _forget(self, at: int) -> None:
        self.here = at
        for found in (self.columns, self.rows, self.summed, self.decided):
            for key in [key for key, place in found.items() if place >= at]:
                del found[key]
                if key in self.parameters:
                    self._spread(key, None)

    def _state(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self.states.get(node)
        if node.op == "output":
            return self._finish()
        state = self._passed(node)
        if isinstance(state, Partial) and node in self.to_sum:
            self.summed[node] = self.here
            return None
        return state

    def _passed(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, position = node.args
            return self.states[source][position]  # type: ignore[index]
        sources = [source for source in node.all_input_nodes if tensors_of(source)]
        if node in self.forward and self._weight(node) is not None:
            self._choose(node)
        self._settle_factors(node, sources)
        states = {source: self.states[source] for source in sources}
        for state in states.values():
            if isinstance(state, list) and any(state):
                raise NeedsRedistribute(state)
        if node.target is aten.add.Tensor and len(states) > 1 and all(isinstance(s, Partial) for s in states.values()):
            return Partial(origins_of(states.values()))
        for source, state in states.items():
            if isinstance(state, Partial) and node.target not in PASSES_SUMS:
                self._sum(source)
        return state_after(Call(node, self.devices, states, node not in self.forward))

    def _weight(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return the parameter that a product is with, and which of its dimensions has the product's outputs."""
        left = _PRODUCTS.get(node.target)  # type: ignore[call-overload]
        return None if left is None else self._parameter_of(node.args[left + 1], 1)

    def _parameter_of(self, node: Any, dim: int) -> tuple[fx.Node, int] | None:
        """Go back through casts and transpositions to a parameter, and to where a dimension is there."""
        while isinstance(node, fx.Node) and node not in self.parameters:
            if node.target in _TURNS and len(shape_of(node)) == 2:
                dim = 1 - dim
            elif node.target not in _CASTS:
                return None
            node = node.args[0]
        return (node, dim) if isinstance(node, fx.Node) else None

    def _choose(self, node: fx.Node) -> None:
        """Make a product column-parallel or row-parallel if nothing stands against it."""
        left = _PRODUCTS[node.target]  # type: ignore[index]
        given, weight = self.states[node.args[left]], self._weight(node)  # type: ignore[index]
        assert weight is not None
        parameter, dim = weight
        if isinstance(given, Partial):
            self._sum(node.args[left])  # type: ignore[arg-type]
            given = None
        if isinstance(given, Shard):
            if given.dim == 1 and parameter not in self.decided:
                self._settle(parameter, given.at(1 - dim))
            if given.dim == 1:
                self.rows[node] = self.here
            return
        ends = sorted(self.cuts.get(node, frozenset()) | {0, shape_of(node)[1]})
        blocks = tuple(end - begin for begin, end in itertools.pairwise(ends))  # each is divided
        if node in self.dropped or any(block % self.devices for block in blocks):
            return
        if parameter not in self.decided:
            self._settle(parameter, Shard(dim, blocks, frozenset({node})))
        if isinstance(self.states[parameter], Shard):
            self.columns[node] = self.here

    def _settle_factors(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """Settle the other parameters that a node reads: divided if they go along with what is, else whole."""
        if node.target in _CASTS or node.target in _TURNS:
            return
        dims = len(shape_of(node)) if len(tensors_of(node)) == 1 else 0
        for source in sources:
            found = self._parameter_of(source, 0)
            if found is None or found[0] in self.decided:
                continue
            shared = self._shared_by(node, sources, source, dims)
            dim = shared.dim - dims + len(shape_of(source)) if shared else -1
            if shared and dim >= 0 and shape_of(source)[dim] == sum(shared.blocks):
                place = self._parameter_of(source, dim)
                assert place is not None
                self._settle(found[0], shared.at(place[1]))
            else:
                self._settle(found[0], None)

    def _shared_by(self, node: fx.Node, sources: list[fx.Node], but: fx.Node, dims: int) -> Shard | None:
        """Say how an output is divided that a parameter is added to, or multiplied with."""
        if node.target is aten.addmm.default:
            if node.args[0] is not but:
                return None
            state = self.states[node.args[2]]  # type: ignore[index]
            return state if isinstance(state, Shard) and state.dim == 1 else None
        if not dims or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None
        for source in sources:
            state = self.states[source]
            if isinstance(state, Shard):
                return state.at(state.dim + dims - len(shape_of(source)))
        return None

    def _settle(self, parameter: fx.Node, state: State) -> None:
        self.decided[parameter] = self.here
        self._spread(parameter, state)

    def _spread(self, parameter: fx.Node, state: State) -> None:
        """Say how a parameter is divided, and what that makes of its casts and transpositions so far."""
        self.states[parameter] = state
        waiting = [parameter]
        while waiting:
            source = waiting.pop()
            for user in source.users:
                if self.order[user] < self.here and user.target in _CASTS | _TURNS:
                    self.states[user] = state_after(Call(user, self.devices, {source: self.states[source]}, False))
                    waiting.append(user)

    def _sum(self, node: fx.Node) -> None:
        """Sum a partial result over the devices where it was made."""
        while node.target in PASSES_SUMS:
            node = node.args[0]  # type: ignore[assignment]
        self.to_sum.add(node)
        raise _Again(node)

    def _finish(self) -> None:
        """Hold the outputs of the step against what they are outputs of."""
        forward, backward = self.joint.outputs
        for node in forward:
            state = self.states.get(node) if isinstance(node, fx.Node) else None
            if isinstance(state, Shard):
                raise NeedsRedistribute([state])
            if isinstance(state, Partial):
                self._sum(node)
        for of, node in zip(self.joint.placeholders, backward, strict=True):
            if not isinstance(node, fx.Node):
                continue
            state, own = self.states[node], self.states[of]
            if isinstance(state, Partial):
                self._sum(node)
            if not (state.is_like(own) if isinstance(state, Shard) else own is None):
                raise NeedsRedistribute([state, own])
