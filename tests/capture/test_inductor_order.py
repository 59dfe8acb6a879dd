"""What Inductor computes later than planned must hold no more memory until then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from planner.capture.inductor_order_internals import Placement, must_stay_apart

aten = torch.ops.aten
SIZES = {"large": (64, 64), "small": (1, 64)}


def graph_of(function: Callable[..., object], **inputs: str) -> fx.Graph:
    """Write a graph of ATen calls, with what each node makes beside it."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in inputs]
    for node, size in zip(nodes, inputs.values(), strict=True):
        node.meta["val"] = torch.ones(SIZES[size])

    def call(target: torch._ops.OpOverload, *arguments: object, name: str = "") -> fx.Node:
        node = graph.create_node("call_function", target, arguments, name=name or None)
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments))
        return node

    graph.output(function(call, *nodes))
    return graph


def placed(graph: fx.Graph) -> tuple[set[str], set[str]]:
    found = Placement(graph)
    return {node.name for node in found.stored}, {node.name for node in found.inlined}


def test_a_sum_of_two_is_made_where_the_plan_has_it_if_both_would_wait():
    def stays(call, a, b):
        total = call(aten.add.Tensor, a, b, name="total")
        product = call(aten.mm.default, b, b)
        return call(aten.sub.Tensor, call(aten.mul.Tensor, product, total), b)

    assert placed(graph_of(stays, a="large", b="large")) == (set(), set())  # one of the two is read later anyway

    def waits(call, a, b, c):
        total = call(aten.add.Tensor, a, b, name="total")
        product = call(aten.mm.default, c, c)
        return call(aten.mul.Tensor, product, total)

    assert placed(graph_of(waits, a="large", b="large", c="large")) == ({"total"}, set())
    # The caller has parameters all along: to hold the sum would be to hold more.
    assert placed(graph_of(waits, primals_1="large", b="large", c="large")) == (set(), set())

    def at_once(call, a, b, c):
        return call(aten.mm.default, c, call(aten.mul.Tensor, call(aten.add.Tensor, a, b), c))

    assert placed(graph_of(at_once, a="large", b="large", c="large")) == (set(), set())


def test_what_is_computed_from_something_stored_does_not_keep_what_that_was_made_of():
    def twice(call, a, b, c):
        total = call(aten.add.Tensor, a, b, name="total")
        product = call(aten.mm.default, c, c)
        root = call(aten.sqrt.default, total, name="root")
        return call(aten.mul.Tensor, call(aten.mm.default, product, product), root)

    assert placed(graph_of(twice, a="large", b="large", c="large")) == ({"total"}, set())


def test_what_is_made_of_little_is_never_stored():
    def one_hot(call, where, x):
        wide = call(aten.expand.default, where, (64, 64))
        hot = call(aten.mul.Tensor, wide, 2.0, name="hot")
        return call(aten.sub.Tensor, hot, call(aten.mul.Tensor, x, call(aten.sum.dim_IntList, hot, [1], True)))

    assert placed(graph_of(one_hot, where="small", x="large")) == (set(), {"hot"})


def test_a_product_is_made_where_the_plan_has_it_if_what_it_reads_would_wait():
    def tied(call, a, b, c):
        product = call(aten.mm.default, a, b, name="product")
        other = call(aten.mm.default, c, c)
        return call(aten.add.Tensor, product, call(aten.mm.default, other, other), name="total")

    def apart(**inputs: str) -> bool:
        nodes = {node.name: node for node in graph_of(tied, **inputs).nodes}
        return must_stay_apart(nodes["product"], nodes["total"])

    assert apart(a="large", b="large", c="large")
    assert not apart(a="large", primals_2="large", c="large")  # as large as the product, and nothing more
