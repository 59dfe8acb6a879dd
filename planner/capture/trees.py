"""Find and replace the tensors in nested containers and dataclasses.

``torch.utils._pytree`` takes a dataclass that nobody registered for a leaf, so its tensors would go unseen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.capture.torch_internals import strided_parts


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree; of a sparse one those that hold its indices and values."""
    return [part for tensor in leaf_tensors(tree) for part in strided_parts(tensor)]


def sparse_in(tree: Any) -> list[torch.Tensor]:
    """Return the sparse tensors in a tree."""
    return [tensor for tensor in leaf_tensors(tree) if tensor.layout is not torch.strided]


def leaf_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, sparse ones as they are."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):  # by far the most are, or are in a tuple: recorders ask at every operator
        return [tree]
    if kind is tuple or kind is list:
        return [tensor for part in tree for tensor in leaf_tensors(part)]
    if tree is None or kind in (int, float, bool, str) or (kind is dict and not tree):
        return []
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def leaves_of(tree: Any, within: tuple[Any, ...] = ()) -> list[Any]:
    """Return all leaves of a tree; ``within`` are dataclasses that lead to it, which may hold each other."""
    found = []
    for leaf in pytree.tree_leaves(tree):
        names = _fields_of(leaf, within)
        found += leaves_of([getattr(leaf, name) for name in names], (*within, leaf)) if names else [leaf]
    return found


def mapped(function: Callable[[torch.Tensor], Any], tree: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return a tree with what a function makes of each tensor in its place; what holds none is not copied."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        before = {name: getattr(leaf, name) for name in _fields_of(leaf, within)}
        after = {name: mapped(function, part, (*within, leaf)) for name, part in before.items() if leaf_tensors(part)}
        if not after:
            return leaf
        other = copy.copy(leaf)
        for name, value in after.items():
            object.__setattr__(other, name, value)  # as a frozen one sets its own
        return other

    return pytree.tree_map(of, tree)


def _fields_of(leaf: Any, within: tuple[Any, ...]) -> list[str]:
    if not is_dataclass(leaf) or isinstance(leaf, type) or any(leaf is each for each in within):
        return []
    return [each.name for each in fields(leaf) if hasattr(leaf, each.name)]
