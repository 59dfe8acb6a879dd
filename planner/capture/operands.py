"""Run single operations alone: their signatures, calls as fx nodes, and real tensors like their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from cost_models.flops import read_whole
from planner.capture import torch_internals as internals
from planner.capture.joint import is_collective, mutates, tensors_of, values_of
from planner.capture.trees import sparse_in

aten = torch.ops.aten


def _indexed_alike(args: Sequence[Any]) -> int:
    """Return how far all dimensions go that are indexed."""
    return min(int(args[0].shape[d]) for d, index in enumerate(args[1]) if index is not None)


_ALONG_A_DIMENSION = (
    aten.gather.default, aten.index_add.default, aten.index_select.default,
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
)  # fmt: skip
_BY_INDICES = (
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default,
)  # fmt: skip

_INDEX_BOUND: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten.embedding.default: lambda args: args[0].shape[0],
    aten.embedding_dense_backward.default: lambda args: args[2],
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), lambda args: args[0].shape[1]),
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), lambda args: args[1].shape[1]),
    **dict.fromkeys(_ALONG_A_DIMENSION, lambda args: args[0].shape[args[1]]),
    **dict.fromkeys(_BY_INDICES, _indexed_alike),
}
"""What whole numbers among the arguments must stay below, so that they spread as real ones do; others are zeros."""


def _end_of_groups(operator: Any, args: Sequence[Any]) -> int | None:
    """Return what the groups of a grouped product divide: rows, columns, or what both sides are summed over.

    So does an argument ``offs`` of another library's operator: with groups of no rows the one that transformers uses on
    a CPU took a hundredth of its time. Groups end as if the first had everything, for then a kernel that copies group
    by group needs most memory.
    """
    if not isinstance(operator, internals.OpOverload) or all(
        name != "offs" for name, _ in internals.declared_arguments(operator)
    ):
        return None
    left, right = args[:2]
    if left.dim() == 3:
        return int(right.shape[-1])
    return int(left.shape[1 if operator.namespace == "aten" and right.dim() == 2 else 0])


_OPAQUE = ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn")
"""Kernels whose forward hands their backward memory that only they can read: made up, it crashes the process."""

_LOSSES = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
_SHRUNK = {getattr(aten, name).default for name in _LOSSES}
"""Losses that are made element by element and then shrunk to one, their memory not. Fake tensors do not know that."""

_SCATTERING = ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
_COPIES = {aten.copy.default, *(getattr(aten, name).default for name in _SCATTERING)}
"""What copies all the memory behind its first argument, of which that may be a part. Fake tensors know it only the
first time that they are asked: what they remember of a call has no size of the memory."""


def storage_bytes(operator: Any, read: Sequence[torch.Tensor], tensor: torch.Tensor) -> int:
    """Count the memory behind an output of an operator that reads some tensors: the kernel's, not the fake one."""
    traced_bytes = tensor.untyped_storage().nbytes()
    if operator in _COPIES and read:
        return max(traced_bytes, read[0].untyped_storage().nbytes())
    if operator not in _SHRUNK:
        return traced_bytes
    return max(traced_bytes, max(t.numel() for t in read) * tensor.element_size())


def runs_alone(node: fx.Node | None, *, in_place: bool = False) -> bool:
    """Whether an operation is one that can be called with made-up arguments, which it may overwrite if ``in_place``."""
    if node is None or not isinstance(node.target, internals.OpOverload) or is_opaque(node.target):
        return False
    if is_collective(node):
        return False  # the other ranks would have to run it too
    if any(isinstance(argument.meta.get("val"), list) for argument in node.all_input_nodes):
        return False  # the parts of a sparse tensor
    return in_place or not mutates(node)


def described(node: fx.Node, *, in_place: bool = False) -> dict[str, str]:
    """Return the element type that an operation computes in, and its signature if it can run alone."""
    tensors = tensors_of(node)
    return {
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "signature": signature(node) if runs_alone(node, in_place=in_place) else "",
    }


def is_opaque(operator: Any) -> bool:
    """Whether an operator makes memory for its own backward whose size and contents no fake tensor knows."""
    return any(name in str(operator) for name in _OPAQUE)


@contextmanager
def running_alone(device: torch.device) -> Iterator[None]:
    """Let operations run as in a captured step, whatever surrounds this: a plan may be made while a model is traced.

    Then tensors have data, and neither autograd nor autocast steps in; the random state is put back at the end, and
    what CUDA's allocator took from the device for them is given back.
    """
    generators = [device] if device.type == "cuda" else []
    without_autocast = torch.autocast(device.type, enabled=False)
    with internals.outside_tracing(), torch.random.fork_rng(generators), torch.no_grad(), without_autocast:
        settle(device)
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Let the libraries for matrix products take the memory that they keep, of forward and backward, before others do.

    It would lie in the middle of whatever is cached when a step first needs it, and hold that for good. So nothing is
    cached when they take it. What has a bias is computed by a library of its own in older versions of torch; the
    backward computes such products when it runs parts of the forward again.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    with torch.enable_grad():
        one = torch.ones(16, 16, device=device, requires_grad=True)
        made = torch.addmm(one[0], one, one)
        made.register_hook(lambda _: (torch.addmm(one[0], one, one), None)[1])  # type: ignore[no-untyped-call]
        torch.autograd.backward((made @ one).sum())


def signature(node: fx.Node) -> str:
    """Describe a call by what decides which kernels run: operator, layouts, types, shared memory, other arguments."""
    storages: dict[int, int] = {}

    def layout(tensor: torch.Tensor) -> str:
        storage, nbytes = internals.storage_id(tensor), tensor.untyped_storage().nbytes()
        shared = f"@{storages[storage]}" if storage in storages else ""
        storages.setdefault(storage, len(storages))
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{list(tensor.stride())}/{nbytes}{shared}"

    def described(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return "+".join(map(layout, tensors_of(argument)))
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(described, argument))}]"
        return repr(argument)

    others = {name: given for name, given in node.kwargs.items() if name != "device"}  # a profile names its own
    described_arguments = [*map(described, node.args), *(f"{k}={described(v)}" for k, v in others.items())]
    return f"{node.target}({', '.join(described_arguments)})"


def sharing(make: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives tensors others that share memory as they do; ``make`` gives that, flat, of so many elements."""
    flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        key = internals.storage_id(tensor), tensor.dtype
        if key not in flats:
            flats[key] = make(tensor, tensor.untyped_storage().nbytes() // tensor.element_size())
        return flats[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return like


def arguments(node: fx.Node, device: torch.device) -> tuple[Any, Any]:
    """Make real tensors in place of the fake ones that an operation was traced with: numbers, and valid indices.

    On a GPU the numbers are random: so few bits change in products of ones that it runs faster than it can in training.

    What shares memory there shares it here: a kernel may copy one of two arguments that are the same. Memory
    that is not read, or only here and there, stays as it is: of a step on fake tensors it may exceed this machine's.
    """
    fake = values_of((node.args, node.kwargs))
    read = set(map(internals.storage_id, read_whole(node.target, *fake)))
    bound = _INDEX_BOUND.get(node.target)
    below = int(bound(fake[0])) if bound else 1
    end = _end_of_groups(node.target, fake[0])

    def filled(tensor: torch.Tensor, elements: int) -> torch.Tensor:
        where = device if tensor.device.type != "cpu" or device.type == "cpu" else tensor.device
        if internals.storage_id(tensor) not in read:
            return torch.empty(elements, dtype=tensor.dtype, device=where)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            is_drawn = where.type == "cuda" and tensor.dtype.itemsize > 1
            return (torch.randn if is_drawn else torch.ones)(elements, dtype=tensor.dtype, device=where)
        if end is not None:
            return torch.full((elements,), end, dtype=tensor.dtype, device=where)
        if below > 1 and tensor.dtype in (torch.int64, torch.int32):
            # A stride that shares no factor with most bounds visits rows in no order that a cache would like.
            return (torch.arange(elements, dtype=torch.int64, device=where) * 7919 % below).to(tensor.dtype)
        return torch.zeros(elements, dtype=tensor.dtype, device=where)

    args, kwargs = pytree.tree_map_only(internals.FakeTensor, sharing(filled), fake)
    return args, kwargs


class CallNodes:
    """Describes calls in the mode ``fakes``, by tensors that hold no memory of theirs, and share as theirs do."""

    def __init__(self, fakes: Any) -> None:
        self.fakes = fakes
        self._graph = fx.Graph()
        self._stand_ins: dict[Any, torch.Tensor] = {}

    def node(self, function: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Return a node that says what was called with what, and what it gave."""
        numbers: dict[tuple[int, torch.dtype], int] = {}
        parts = {tensor: internals.strided_parts(tensor) for tensor in sparse_in((args, kwargs, result))}

        def like(tensor: torch.Tensor) -> torch.Tensor:
            number = numbers.setdefault((internals.storage_id(tensor), tensor.dtype), len(numbers))
            return self._stand_in(tensor, number)

        def described(tensor: torch.Tensor) -> Any:
            return like(tensor) if tensor.layout is torch.strided else list(map(like, parts[tensor]))

        def operand(tensor: torch.Tensor) -> fx.Node:
            node = self._graph.placeholder("operand")
            node.meta["val"] = described(tensor)
            return node

        with self.fakes, torch.no_grad():
            node = self._graph.call_function(function, *pytree.tree_map_only(torch.Tensor, operand, (args, kwargs)))
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, described, result)
        return node

    def _stand_in(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor laid out like another, in the so-many-th memory of a call; calls alike have it in common."""
        storage_bytes = tensor.untyped_storage().nbytes()
        memory = number, storage_bytes, tensor.dtype, tensor.device
        layout = (*memory, tensor.shape, tensor.stride(), tensor.storage_offset())
        if layout not in self._stand_ins:
            if memory not in self._stand_ins:
                elements = storage_bytes // tensor.element_size()
                self._stand_ins[memory] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
            flat = self._stand_ins[memory]
            self._stand_ins[layout] = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._stand_ins[layout]
