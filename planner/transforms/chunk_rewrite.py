"""The joint graph with a region computed in chunks, one after the other: chunks are ordinary nodes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint import (
    JointGraph,
    ancestors,
    fake_mode_of,
    is_backward,
    is_random,
    mutates,
    run_on_recorded,
    storages_of,
)
from planner.capture.torch_internals import storage_id
from planner.errors import UsageError
from planner.transforms.chunk_region import ChunkRegion
from planner.transforms.chunk_rules import MEANS, SHAPE_ARGUMENT, Form, Lead, lead_of, part_of_shape, shape_of

aten = torch.ops.aten

_LOSS, _REDUCTION_AT, _MEAN, _SUM = aten.nll_loss_forward.default, 3, 1, 2

Block = tuple[int, int]
"""Calls that are emitted chunk by chunk without a break: a connected part, and how many whole values it waits for."""


def in_chunks(joint: JointGraph, region: ChunkRegion, chunks: int) -> JointGraph:
    """Return a joint graph that computes a region in chunks of one size, but for the last, which may be smaller.

    O(nodes x parts + chunks x region). What a chunk gives is either read by other calls of the same chunk, or put
    together for what reads it whole: rows by concatenation, sums by addition, chunk by chunk. Gradients that the
    step gives back are added up in place.
    """
    return dataclasses.replace(joint, graph=_Rewrite(joint, region, chunks).run())


class _Rewrite:
    def __init__(self, joint: JointGraph, region: ChunkRegion, chunks: int) -> None:
        self.joint = joint
        self.region = region
        size = -(-region.rows // chunks)
        self.chunks = [(begin, min(begin + size, region.rows)) for begin in range(0, region.rows, size)]
        self.graph = fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self.parts: list[dict[fx.Node, fx.Node]] = [{} for _ in self.chunks]
        self.sums: dict[fx.Node, fx.Node] = {}
        self.pieces: dict[tuple[fx.Node, Form, int], fx.Node] = {}
        self.flat: dict[fx.Node, fx.Node] = {}
        self.gradients = storages_of(node for node in joint.outputs[1] if isinstance(node, fx.Node))
        self.blocks: dict[Block, list[fx.Node]] = {}
        self.block_of: dict[fx.Node, Block] = {}
        for node, level in self._levels():
            block = self.block_of[node] = (region.parts[node], level)
            self.blocks.setdefault(block, []).append(node)

    def run(self) -> fx.Graph:
        with fake_mode_of(self.joint.graph):
            before: list[fx.Node] = []
            for node in self.joint.graph.nodes:
                if node in self.region.splits:
                    before.append(node)
                    continue
                if mutates(node):  # what stands before it may read what it overwrites
                    for earlier in before:
                        self._emit(self.block_of[earlier])
                self._whole(node)
        self._check_random_order()
        return self.graph

    def _check_random_order(self) -> None:
        """Refuse chunks for which random numbers would be drawn in another order."""
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        drawn = [places[self.whole[node]] for node in self.joint.graph.nodes if is_random(node)]
        if drawn != sorted(drawn):
            raise UsageError(
                "chunks would draw random numbers in another order than the step in one piece: leave out chunk, or "
                "take dropout out of what makes the peak"
            )

    def _levels(self) -> Iterator[tuple[fx.Node, int]]:
        """Count how often something is put together before each call; the backward waits for all of the forward."""
        levels: dict[fx.Node, int] = {}
        backward: set[fx.Node] = set()
        nodes = list(self.joint.graph.nodes)
        for node in nodes:
            if is_backward(node) or not backward.isdisjoint(node.all_input_nodes):
                backward.add(node)
        for wanted, least in ((False, 0), (True, 1)):
            first = least + max(levels.values(), default=0)
            for node in nodes:
                if (node in backward) is wanted:
                    levels[node] = first
                    for source in node.all_input_nodes:
                        put_together = source in self.region.splits and not self.region.passes(source, node)
                        levels[node] = max(levels[node], levels[source] + put_together)
        return ((node, levels[node]) for node in self.region.splits)

    def _whole(self, node: fx.Node) -> fx.Node:
        """Return the node of a call's whole output."""
        if node in self.whole:
            return self.whole[node]
        if node not in self.region.splits:
            new = self.graph.node_copy(node, self._whole)
        else:
            self._emit(self.block_of[node])
            new = self._sum(node) if self.region.forms[node] is Form.SUM else self._concatenation(node)
        self.whole[node] = new
        return new

    def _emit(self, block: Block) -> None:
        members = self.blocks.pop(block, [])
        outside = [n for node in members for n in node.all_input_nodes if n not in self.region.splits]
        for node in ancestors(outside, list(self.joint.graph.nodes)):  # in order, so that nothing nests deeply
            if node not in self.region.splits:
                self._whole(node)
        for source in (n for node in members for n in node.all_input_nodes if self.region.passes(n, node)):
            if self.block_of[source] != block:
                self._emit(self.block_of[source])
        for number in range(len(self.chunks)):
            for node in members:
                self._emit_chunk(node, number)

    def _emit_chunk(self, node: fx.Node, number: int) -> None:
        given, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._part(source, node, number))
        args: list[Any] = list(given)
        target: Any = node.target
        if self.region.forms[node] is Form.SUM:
            target = MEANS.get(target, target)
        if node.target in SHAPE_ARGUMENT:
            begin, end = self.chunks[number]
            shape = shape_of(node)
            args[SHAPE_ARGUMENT[node.target]] = part_of_shape(shape, self._lead(shape), end - begin)
        elif node.target is _LOSS:
            args[_REDUCTION_AT] = _SUM
        if self.region.forms[node] is Form.SUM:
            self.sums[node] = self._added(node, number, target, args, kwargs)
        else:
            self.parts[number][node] = self._call(node, target, *args, **kwargs)

    def _added(self, node: fx.Node, number: int, target: Any, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Compute one chunk's summand, and add it to those before."""
        in_place = self._may_overwrite(node)
        total = self.sums.get(node)
        if total is None:
            new = self._call(node, target, *args, **kwargs)
        elif target is aten.mm.default:
            new = self._call(node, aten.addmm_.default if in_place else aten.addmm.default, total, *args)
        else:
            summand = self._call(node, target, *args, **kwargs)
            new = self._call(node, aten.add_.Tensor if in_place else aten.add.Tensor, total, summand)
        if in_place or (number == len(self.chunks) - 1 and not self._is_divided(node)):
            new.meta["val"] = node.meta["val"]
        return new

    def _may_overwrite(self, node: fx.Node) -> bool:
        """Whether a sum is added up in its own memory: that of a gradient which the step gives back, so it is kept."""
        if self.joint.functional or node.target is operator.getitem or self._is_divided(node):
            return False
        return is_backward(node) and storage_id(node.meta["val"]) in self.gradients

    def _is_divided(self, node: fx.Node) -> bool:
        if node.target in MEANS:
            return True
        if node.target is not operator.getitem:
            return False
        loss, element = node.args
        assert isinstance(loss, fx.Node)
        return bool(loss.target is _LOSS and element == 0 and loss.args[_REDUCTION_AT] == _MEAN)

    def _sum(self, node: fx.Node) -> fx.Node:
        """Return a sum over all chunks, or the mean that is made of it."""
        total = self.sums[node]
        if not self._is_divided(node):
            return total
        if node.target in MEANS:
            (source,) = node.all_input_nodes
            new = self._call(node, aten.div.Scalar, total, source.meta["val"].numel() // node.meta["val"].numel())
        else:
            (weights,) = (n for n in node.args[0].users if n.args[1] == 1)  # type: ignore[union-attr]
            new = self._call(node, aten.div.Tensor, total, self._whole(weights))
        new.meta["val"] = node.meta["val"]
        return new

    def _concatenation(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        lead = self._lead(value.shape)
        new = self._call(node, aten.cat.default, [part[node] for part in self.parts], lead.dims - 1)
        new.meta["val"] = value.view(new.meta["val"].shape)
        if lead.dims > 1:
            new = self._call(node, aten.view.default, new, list(value.shape))
        new.meta["val"] = value
        return new

    def _part(self, source: fx.Node, reader: fx.Node, number: int) -> fx.Node:
        """Return an input for one chunk of a call: a chunk of it, or all."""
        if self.region.passes(source, reader):
            return self.parts[number][source]
        whole = self._whole(source)
        form = self.region.splits[reader].takes.get(source)
        return whole if form is None else self._piece(whole, form, number, reader)

    def _piece(self, whole: fx.Node, form: Form, number: int, reader: fx.Node) -> fx.Node:
        key = (whole, form, number)
        if key in self.pieces:
            return self.pieces[key]
        shape = whole.meta["val"].shape
        begin, end = self.chunks[number]
        if form is Form.COLUMNS:
            dim, each = 1, shape[1] // self.region.rows
        else:
            lead = self._lead(shape)
            dim, each = lead.dims - 1, lead.each
            if lead.dims > 1:
                if whole not in self.flat:
                    flat_shape = part_of_shape(shape, lead, self.region.rows)
                    self.flat[whole] = self._call(reader, aten.view.default, whole, flat_shape)
                whole = self.flat[whole]
        self.pieces[key] = self._call(reader, aten.slice.Tensor, whole, dim, begin * each, end * each)
        return self.pieces[key]

    def _lead(self, shape: Sequence[int]) -> Lead:
        lead = lead_of(shape, self.region.rows)
        assert lead is not None
        return lead

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call that is told from where another comes."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**like.meta, "val": run_on_recorded(new)}
        return new
