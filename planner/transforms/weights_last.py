"""The backward of a stage in two parts: first what the gradients of its inputs need, then the rest, for its weights."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from planner.capture.joint import JointGraph, ancestors, mutates, needed_by_forward

REST = "gradients of weights"
"""Where a node's metadata say that it is of the second part, and the output's which of its gradients are of weights."""


def is_rest(node: fx.Node | None) -> bool:
    """Whether a node is of the second part of a backward."""
    return node is not None and REST in node.meta


def weights_last(joint: JointGraph, parameters: Collection[int]) -> None:
    """Move what only gradients of ``parameters``, given by their identity, need behind all else of the backward.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023: other stages wait for gradients of inputs alone. What
    reads the gradient of an input is of the first part too: that is sent away when the first part is over. O(nodes).
    """
    forward, nodes = needed_by_forward(joint), list(joint.graph.nodes)
    gradients = list(zip(joint.inputs, joint.outputs[1], strict=True))
    sent = [node for tensor, node in gradients if isinstance(node, fx.Node) and id(tensor) not in parameters]
    first = {*forward, *ancestors(sent, nodes)}
    end = joint.graph.output_node()
    reads_sent = {reader for node in sent for reader in node.users if reader is not end}
    first.update(ancestors([node for node in nodes if node in reads_sent or mutates(node)], nodes))
    for node in nodes:
        if node.op == "call_function" and node not in first:
            node.meta[REST] = True
            end.prepend(node)
    end.meta[REST] = tuple(
        at for at, (tensor, node) in enumerate(gradients) if isinstance(node, fx.Node) and id(tensor) in parameters
    )
