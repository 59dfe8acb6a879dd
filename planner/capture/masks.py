"""Replace attention masks in a captured program by the flags that eager passes to the kernel.

Whether a mask is needed at all can depend on data: Hugging Face decoders look for padding and for
packed sequences, and pass a causal flag where there are none. A traced program cannot look, so it
carries the mask, and every attention call computes with it. Here the mask's few operations are run
once while the program is captured. A mask that turns out to be causal, or to hide nothing, is
replaced by the flag; what it was computed from is remembered, and compared in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from planner.capture.joint import sources
from planner.capture.state_restore import RandomStates, random_states_kept
from planner.capture.torch_internals import FakeTensor, hint_of
from planner.errors import PlannerError

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LARGEST_GROUPED_HEAD = 256
"""Up to which head size Hugging Face leaves grouped keys and values to the kernel."""

_MASK_TO_SOURCE = 8
"""A mask's sources are small beside it: otherwise it was made outside, and eager computes with it too."""


class AssumptionBrokenError(PlannerError):
    """An input does not hold what the captured program was simplified for: never seen outside the runtime."""


@dataclass(frozen=True)
class _Mask:
    """A mask that was left out."""

    program: fx.GraphModule
    """Computes it."""
    positions: tuple[int, ...]
    """Of what it is computed from, among the program's inputs."""
    flag: bool
    """What it amounts to."""

    def is_flag(self, inputs: Sequence[Any]) -> bool:
        """Whether it amounts to the same for these inputs."""
        return _flag(_evaluate(self.program, [inputs[at] for at in self.positions])) is self.flag


@dataclass(frozen=True)
class Assumption:
    """What a captured program takes for granted: values of inputs, for which its masks are flags."""

    masks: tuple[_Mask, ...]
    positions: tuple[int, ...]
    """Of the tensors whose values are compared, among the program's inputs."""
    names: tuple[str, ...]
    """What those inputs are called."""
    expected: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = field(default_factory=dict)
    """The values, on the CPU, by the sizes of these tensors."""

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise an AssumptionBrokenError for inputs with other values, before anything has been run.

        Of sizes that come for the first time the masks are computed, and the values are remembered.
        """
        tensors = [inputs[at] for at in self.positions]
        sizes = tuple(tensor.shape for tensor in tensors)
        expected = self.expected.get(sizes)
        if expected is None and all(mask.is_flag(inputs) for mask in self.masks):
            self.expected[sizes] = tuple(tensor.detach().cpu().clone() for tensor in tensors)
            return
        if expected is None or not all(map(torch.equal, (t.detach().cpu() for t in tensors), expected)):
            raise AssumptionBrokenError(f"{', '.join(self.names)}: other values than in the captured step")


def simplify_masks(graph_module: fx.GraphModule, inputs: Sequence[Any], *, assume: bool = True) -> Assumption | None:
    """Replace masks by flags in a program as Dynamo captured it, where their values allow it; evaluate each mask once.

    ``inputs`` is what it is captured with, symbolic sizes as numbers. Values of fake tensors are not known, so masks
    that are computed from them stay; without ``assume`` all stay that an input has a part in. Return what holds no
    longer if an input changes; None if no input is involved.
    """
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, inputs, strict=False))
    known = given if assume else dict.fromkeys(given)
    found: dict[fx.Node, _Mask | None] = {}
    for call in graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention):
        mask = _argument(call, "attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in found:
            origin = _computed_from(mask, known)
            found[mask] = _left_out(graph_module, origin, given) if origin else None
        if (flagged := found[mask]) is not None:
            _pass_flag(call, flagged.flag)
    left_out = {mask: flagged for mask, flagged in found.items() if flagged is not None}
    _erase_unused(graph, list(left_out))
    graph_module.recompile()
    relied_on = sorted({at for mask in left_out.values() for at in mask.positions if isinstance(inputs[at], Tensor)})
    if not relied_on:
        return None
    names = (named(placeholders[at]) for at in relied_on)
    assumption = Assumption(tuple(left_out.values()), tuple(relied_on), tuple(sorted(names)))
    tensors = [inputs[at] for at in relied_on]
    assumption.expected[tuple(t.shape for t in tensors)] = tuple(t.detach().cpu().clone() for t in tensors)
    return assumption


def named(placeholder: fx.Node) -> str:
    """Return what people call an input of a captured program."""
    return str(placeholder.target).strip("_").removeprefix("L_").removeprefix("kwargs_")


def _left_out(graph_module: fx.GraphModule, origin: Sequence[fx.Node], given: Mapping[fx.Node, Any]) -> _Mask | None:
    """Return what stands for a mask that comes last of the nodes, or None if it is no flag."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in origin:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[origin[-1]])
    program = fx.GraphModule(graph_module, graph)
    flag = _flag(_evaluate(program, [given[node] for node in origin if node in given]))
    positions = tuple(list(given).index(node) for node in origin if node in given)
    return None if flag is None else _Mask(program, positions, flag)


def _argument(call: fx.Node, name: str) -> Any:
    position = _ARGUMENTS.index(name)
    return call.args[position] if len(call.args) > position else call.kwargs.get(name)


def _computed_from(mask: fx.Node, given: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return a mask's nodes in order, the mask last; none where its values are not known or not worth remembering."""
    origin = sources([mask])
    source_elements = 0
    for node in origin:
        if any(writes(user) for user in (node, *node.users)):
            return []
        if node in given and not isinstance(given[node], int):
            source = given[node]
            if not isinstance(source, Tensor) or isinstance(source, (FakeTensor, nn.Parameter)) or source.requires_grad:
                return []
            source_elements += source.numel()
    if source_elements * _MASK_TO_SOURCE > hint_of(mask.meta["example_value"].numel()):
        return []
    return [node for node in mask.graph.nodes if node in origin]


_WRITING_OPERATORS = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.iand, operator.ior)


def writes(node: fx.Node) -> bool:
    """Whether a node writes into what it is given: torch's names for that end with an underscore."""
    if getattr(node.target, "__module__", "") == "_operator":
        return node.target in _WRITING_OPERATORS
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
    return in_place or "out" in node.kwargs


def _evaluate(program: fx.GraphModule, arguments: Sequence[Any]) -> Tensor | None:
    """Compute a mask, on the CPU where that can be, or give None if random numbers are drawn on the way."""
    with random_states_kept(), torch.no_grad():
        before = RandomStates()
        try:
            with _OnHost():
                value: Tensor = program(*tree_map_only(Tensor, Tensor.cpu, list(arguments)))
        except RuntimeError:  # the program has tensors of its own on a device
            value = program(*arguments)
        return value if before == RandomStates() else None


class _OnHost(TorchFunctionMode):
    """While entered, lets what a program makes be made on the CPU: a GPU would be waited for once for each mask."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs or {}))
        return function(*args, **kwargs)


def _flag(mask: Tensor | None) -> bool | None:
    """Tell what a mask amounts to: True for causal, False for none at all, None for anything else."""
    if mask is None or mask.dim() < 2:
        return None
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((allowed | (mask == -torch.inf)).all()):
        return None
    if bool(allowed.all()):
        return False
    rows, columns = mask.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return True if rows == columns and bool((allowed == causal).all()) else None


def _pass_flag(call: fx.Node, causal: bool) -> None:
    """Let an attention call take a flag in place of its mask, and grouped keys and values as they were."""
    key, value = _argument(call, "key"), _argument(call, "value")
    given = {name: call.args[i] for i, name in enumerate(_ARGUMENTS[: len(call.args)])} | dict(call.kwargs)
    given |= {"attn_mask": None, "is_causal": causal}
    groups = [_before_repeating(node) for node in (key, value)]
    if all(groups) and key.meta["example_value"].shape[-1] <= _LARGEST_GROUPED_HEAD:
        given |= {"key": groups[0], "value": groups[1], "enable_gqa": True}
    call.args = tuple(given.pop(name) for name in ("query", "key", "value"))
    call.kwargs = given
    _erase_unused(call.graph, [key, value])


def _before_repeating(node: fx.Node) -> fx.Node | None:
    """Return the keys or values of shape (batch, groups, length, size) that were repeated for every head of a group."""
    if node.target != "reshape":
        return None
    expanded: Any = node.args[0]
    spread: Any = expanded.args[0] if expanded.target == "expand" else None
    if spread is None or spread.target is not operator.getitem:
        return None
    every = slice(None, None, None)
    source, index = spread.args
    if not isinstance(index, tuple) or index not in ((every, every, None), (every, every, None, every, every)):
        return None
    batch, groups, repeats, length, size = expanded.meta["example_value"].shape
    same = tuple(node.meta["example_value"].shape) == (batch, groups * repeats, length, size)
    return source if same and tuple(source.meta["example_value"].shape) == (batch, groups, length, size) else None


def _erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase nodes that nothing reads, and what only they read."""
    among = sources(nodes)
    for node in reversed(graph.nodes):
        if node in among and not node.users and node.op != "placeholder":
            graph.erase_node(node)
