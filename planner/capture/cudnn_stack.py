"""Run stacks of recurrent layers on CUDA as one cuDNN operation, dropout between layers included.

Torch's operator says of fake tensors that nothing is kept for the backward, writes into what is kept while it
differentiates, and draws dropout from a state of cuDNN's own, which it seeds from the device's generator. So a captured
program calls operators of ours, and these call torch's. What draws dropout never runs twice: nothing outside cuDNN can
let it draw the same again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.target_device import is_for_target_device
from planner.capture.torch_internals import _get_current_graph_task_keep_graph as keeps_graph
from planner.capture.torch_internals import hint_of, outside_tracing, run_composite

aten = torch.ops.aten

_KINDS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""What cuDNN calls them: ``cudnnRNNMode_t``."""
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_KEPT_BESIDE_GATES = 2
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LAID_OUT = {torch.float16, torch.float32, torch.float64}


def takes_cudnn(x: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether eager gives a stack to cuDNN, as ``cudnn_is_acceptable`` of torch decides it on CUDA.

    Not so under autocast, where cuDNN gets weights in 16 bits that are packed anew in every call.
    """
    on_cuda = is_for_target_device() or all(t.device.type == "cuda" for t in (x, *parameters))
    plain = x.numel() != 0 and x.dtype in _TYPES and all(p.dtype == x.dtype for p in parameters)
    return on_cuda and plain and torch.backends.cudnn.enabled and not torch.is_autocast_enabled("cuda")


def run_stack(
    kind: str, x: Tensor, state: Any, parameters: Sequence[Tensor], layers: int, dropout: float, train: bool, both: bool
) -> tuple[Tensor, ...]:
    """Run a stack on ``x`` of shape (length, batch, features); give outputs and last states, as torch does."""
    hidden, cell = (state, None) if isinstance(state, Tensor) else state
    chance = dropout if train else 0.0
    output, last, last_cell, _ = cudnn_rnn(x, list(parameters), hidden, cell, kind, layers, chance, train, both)
    return (output, last) if cell is None else (output, last, last_cell)


@torch.library.custom_op("checkpoint_planner::cudnn_rnn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def cudnn_rnn(
    x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None,
    kind: str, layers: int, dropout: float, train: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a stack by cuDNN, as eager does; give outputs, last states, and what the backward needs."""
    has_biases = _each(parameters, layers, both) >= 4
    packed = _packed(x, parameters, hidden, cell, kind, layers, both)[0]
    state = hidden if cell is None else [hidden, cell]
    with _Kept() as call:  # type: ignore[no-untyped-call]
        settings = has_biases, layers, dropout, train, both, False
        output, *last = run_composite(getattr(aten, kind).input, x, state, packed, *settings)
    if dropout > 0.0 and call.dropout_state is not None:
        _dropout_states[x.device] = call.dropout_state
    assert call.kept is not None
    return output, last[0], last[1] if cell is not None else hidden.new_empty(0), call.kept


_DROPOUT_STATE_BYTES = 2 << 20
"""Where there is no cuDNN to ask."""


def dropout_state_bytes(model: nn.Module) -> int:
    """Return what the random state of cuDNN takes, which stays from the first stack with dropout on."""
    stacks = (m for m in model.modules() if isinstance(m, nn.RNNBase) and m.training and m.dropout > 0.0)
    if (stack := next(stacks, None)) is None:
        return 0
    device = next(stack.parameters()).device
    return _DROPOUT_STATE_BYTES if device.type != "cuda" or not torch.cuda.is_available() else _state_bytes(device)


def weight_pieces(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Return, for each parameter that CUDA has in one piece with others, by its identity, the piece and its bytes.

    ``nn.LSTM`` and its kin lay out the weights of a stack as cuDNN has them; those in bfloat16 they leave as they are.
    """
    found: dict[int, tuple[int, int]] = {}
    for number, stack in enumerate(m for m in model.modules() if isinstance(m, nn.RNNBase)):
        parameters = list(stack.parameters())
        if {p.dtype for p in parameters} <= _LAID_OUT and len({p.dtype for p in parameters}) == 1:
            _, count = _places(parameters, stack.num_layers, stack.bidirectional)
            found |= {id(p): (number, count * parameters[0].itemsize) for p in parameters}
    return found


@cache
def _state_bytes(device: torch.device) -> int:
    with outside_tracing():
        return int(aten._cudnn_init_dropout_state(0.5, True, 0, dtype=torch.uint8, device=device).nbytes)


class _Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch's operator keeps for the backward, and which state its dropout comes from."""

    kept: Tensor | None = None
    dropout_state: Tensor | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is aten._cudnn_rnn.default:
            self.kept, self.dropout_state = made[3], args[-1]
        return made


_dropout_states: dict[torch.device, Tensor] = {}
"""Torch's own, by device: a backward names it again, though its masks are in what was kept."""


@cudnn_rnn.register_fake
def _(
    x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None,
    kind: str, layers: int, dropout: float, train: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    output = x.new_empty((*x.shape[:2], hidden.shape[2] * (2 if both else 1)))
    kept_bytes = _kept_bytes(x, parameters, hidden, cell, kind, layers, dropout, both) if train else 0
    last_cell = hidden.new_empty(0) if cell is None else torch.empty_like(cell)
    return output, torch.empty_like(hidden), last_cell, x.new_empty(kept_bytes, dtype=torch.uint8)


def _kept_bytes(
    x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None,
    kind: str, layers: int, dropout: float, both: bool,
) -> int:  # fmt: skip
    """Ask cuDNN how much it keeps; where it is not, say gates, a state and an output for each step of each layer."""
    if x.device.type != "cuda" or not torch.cuda.is_available():
        size = (hidden if cell is None else cell).shape[2]
        return math.prod(x.shape[:2]) * hidden.shape[0] * (_GATES[kind] + _KEPT_BESIDE_GATES) * size * x.itemsize
    shapes = tuple(None if t is None else tuple(map(hint_of, t.shape)) for t in (x, hidden, cell, *parameters))
    return _asked(shapes, x.dtype, x.device, kind, layers, dropout, both)


@cache
def _asked(
    shapes: tuple[tuple[int, ...] | None, ...], dtype: torch.dtype, device: torch.device,
    kind: str, layers: int, dropout: float, both: bool,
) -> int:  # fmt: skip
    with outside_tracing():
        x, hidden, cell, *parameters = (
            None if s is None else torch.zeros(s, dtype=dtype, device=device) for s in shapes
        )
        return int(cudnn_rnn(x, parameters, hidden, cell, kind, layers, dropout, True, both)[3].numel())


@torch.library.custom_op("checkpoint_planner::cudnn_rnn_backward", mutates_args=())
def cudnn_rnn_backward(
    x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None, output: Tensor, kept: Tensor,
    of_output: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None,
    kind: str, layers: int, dropout: float, train: bool, both: bool, of_parameters: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input and states, and those of all parameters in one tensor, where cuDNN has them."""
    sizes = [(hidden if cell is None else cell).shape[2], hidden.shape[2] if _projects(hidden, cell) else 0]
    each = _each(parameters, layers, both)
    packed, space = _packed(x, parameters, hidden, cell, kind, layers, both)
    kept = kept.clone() if keeps_graph() else kept  # cuDNN writes into it
    state = _dropout_states[x.device] if dropout > 0.0 else None
    of_x, of_state, of_cells, found = aten._cudnn_rnn_backward(
        x, packed, each, space, hidden, cell, output, of_output, of_hidden, of_cell, _KINDS[kind], *sizes, layers,
        False, dropout, train, both, [], state, kept, [True, True, cell is not None, of_parameters],
    )  # fmt: skip
    together = x.new_empty(0)
    if of_parameters:
        places, count = _places(parameters, layers, both)
        together = found[0].new_empty(0).set_(found[0].untyped_storage())
        if together.numel() != count or not _lie(found, places):
            together = x.new_zeros(count)
            for gradient, place in zip(found, places, strict=True):
                together[place : place + gradient.numel()] = gradient.flatten()
    return of_x, of_state, x.new_empty(0) if cell is None else of_cells, together


@cudnn_rnn_backward.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, layers, _dropout, _train, both, of_parameters = rest
    count = _places(parameters, layers, both)[1] if of_parameters else 0
    of_cell = x.new_empty(0) if cell is None else torch.empty_like(cell, memory_format=torch.contiguous_format)
    of_x, of_hidden = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, hidden))
    return of_x, of_hidden, of_cell, x.new_empty(count)


def _projects(hidden: Tensor, cell: Tensor | None) -> bool:
    return cell is not None and cell.shape[2] != hidden.shape[2]


def _each(parameters: Sequence[Tensor], layers: int, both: bool) -> int:
    """Return how many parameters a layer has in one direction: two weights, two biases, and one for a projection."""
    return len(parameters) // (layers * (2 if both else 1))


def _packed(
    x: Tensor, parameters: Sequence[Tensor], hidden: Tensor, cell: Tensor | None, kind: str, layers: int, both: bool
) -> tuple[list[Tensor], Tensor]:
    """Return parameters that lie in one piece of memory as cuDNN wants it, and this; copies where they do not."""
    places, count = _places(parameters, layers, both)
    whole = parameters[0].new_empty(0).set_(parameters[0].untyped_storage())
    if whole.numel() >= count and _lie(parameters, places):
        return list(parameters), whole[:count]
    # Torch moves the tensors that it is given into one piece.
    moved = [torch.empty_like(p, memory_format=torch.contiguous_format).copy_(p) for p in parameters]
    sizes = [(hidden if cell is None else cell).shape[2], hidden.shape[2] if _projects(hidden, cell) else 0]
    each = _each(parameters, layers, both)
    space = aten._cudnn_rnn_flatten_weight(moved, each, x.shape[2], _KINDS[kind], *sizes, layers, False, both)
    return moved, space


def _places(parameters: Sequence[Tensor], layers: int, both: bool) -> tuple[list[int], int]:
    """Return where cuDNN has each parameter, and how many elements it has in all.

    All weights come before all biases, and biases have their place where there are none.
    """
    each = _each(parameters, layers, both)
    has_biases = each >= 4
    rows = parameters[0].shape[0]
    sizes = [p.numel() for p in parameters]
    is_bias = [has_biases and position % each in (2, 3) for position in range(len(sizes))]
    weights = sum(size for size, bias in zip(sizes, is_bias, strict=True) if not bias)
    ends = {False: 0, True: weights}
    places = []
    for size, bias in zip(sizes, is_bias, strict=True):
        places.append(ends[bias])
        ends[bias] += size
    return places, weights + 2 * rows * layers * (2 if both else 1)


def _lie(tensors: Sequence[Tensor], places: Sequence[int]) -> bool:
    first = tensors[0].untyped_storage().data_ptr()
    at = zip(tensors, places, strict=True)
    return all(t.is_contiguous() and t.data_ptr() == first + place * t.itemsize for t, place in at)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, parameters, hidden, cell, *ctx.settings = inputs
    ctx.save_for_backward(x, hidden, cell, output[0], output[3], *parameters)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    x, hidden, cell, output, kept, *parameters = ctx.saved_tensors
    _kind, layers, _dropout, _train, both = ctx.settings
    wanted = any(ctx.needs_input_grad[1])
    *of_inputs, together = cudnn_rnn_backward(
        x, parameters, hidden, cell, output, kept, *gradients[:3], *ctx.settings, wanted
    )
    of_parameters: list[Tensor | None] = [None] * len(parameters)
    if wanted:
        places, _ = _places(parameters, layers, both)
        pairs = zip(parameters, places, strict=True)
        of_parameters = [together[place : place + p.numel()].view(p.shape) for p, place in pairs]
    of_x, of_hidden, of_cell = of_inputs
    return of_x, of_parameters, of_hidden, of_cell if cell is not None else None, *[None] * 5


cudnn_rnn.register_autograd(_differentiate, setup_context=_remember)
