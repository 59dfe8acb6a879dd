"""Keep recurrent layers as eager runs them: dropout between layers, and oneDNN's LSTM on a CPU.

Torch's decompositions, through which a traced program goes, lack both: a stack of layers comes out
without its dropout, and every LSTM is unrolled over time. So in a captured program each call of a
stack becomes one call for each layer with dropout in between, and a layer that eager gives to oneDNN
stays one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from planner.capture.cudnn_stack import run_stack, takes_cudnn
from planner.capture.target_device import is_for_target_device
from planner.capture.torch_internals import has_onednn, hint_of, outside_tracing

_STACKS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_LSTM_MODE = 2
"""What oneDNN calls an LSTM; in torch's aten/src/ATen/native/mkldnn/RNN.cpp."""
_PARAMETERS_OF_A_CELL = 4
"""Two weights and two biases; a projection would be a fifth."""


def keep_recurrent(graph_module: fx.GraphModule) -> None:
    """Let every stack of recurrent layers in a captured program run as it does in eager mode."""
    for stack in _STACKS:
        for node in graph_module.graph.find_nodes(op="call_function", target=stack, sort=False):
            node.target = partial(_run_stack, stack)
            node.target.__name__ = stack.__name__  # fx asks for it
    graph_module.recompile()


def _run_stack(stack: Callable[..., tuple[Tensor, ...]], x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Run layer after layer, the way eager does."""
    # Packed sequences come with the sizes of their batches, and say nothing of batches that come first.
    sizes, rest = ((), arguments) if isinstance(arguments[2], bool) else (arguments[:1], arguments[1:])
    state, parameters, has_biases, layers, dropout, train, bidirectional, *batch_first = rest
    last = [False] * len(batch_first)

    if not sizes and takes_cudnn(x, parameters):
        x = x.transpose(0, 1) if any(batch_first) else x
        x, *final = run_stack(stack.__name__, x, state, parameters, layers, dropout, train, bidirectional)
        return (x.transpose(0, 1) if any(batch_first) else x, *final)

    def run(layer_state: Any, of_layer: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not sizes and stack is torch.lstm and _is_for_onednn(x, layer_state, of_layer, has_biases):
            return _onednn_layer(x, layer_state, of_layer, bidirectional, train)
        return stack(x, *sizes, layer_state, of_layer, has_biases, 1, 0.0, train, bidirectional, *last)

    directions = 2 if bidirectional else 1
    each = len(parameters) // layers
    finals: list[Sequence[Tensor]] = []
    x = x.transpose(0, 1) if any(batch_first) else x
    for layer in range(layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        layer_state = state[rows] if isinstance(state, Tensor) else tuple(part[rows] for part in state)
        x, *final = run(layer_state, list(parameters[layer * each : (layer + 1) * each]))
        finals.append(final)
        if train and dropout > 0.0 and layer < layers - 1:
            x = functional.dropout(x, dropout)
    x = x.transpose(0, 1) if any(batch_first) else x
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


def _is_for_onednn(x: Tensor, state: Any, parameters: Sequence[Tensor], has_biases: bool) -> bool:
    """Whether eager gives an LSTM layer to oneDNN, as aten/src/ATen/native/RNN.cpp decides it."""
    tensors = [x, *state, *parameters]
    casts = torch.is_autocast_enabled("cpu")
    alike = all(t.device.type == "cpu" and (casts or t.dtype == x.dtype) for t in tensors)
    plain = has_biases and state[0].shape[2] == state[1].shape[2] and x.numel() != 0
    return alike and plain and has_onednn(x.dtype) and not is_for_target_device()


def _onednn_layer(
    x: Tensor, state: tuple[Tensor, Tensor], parameters: Sequence[Tensor], bidirectional: bool, train: bool
) -> tuple[Tensor, ...]:
    outputs, finals = [], []
    for direction in range(2 if bidirectional else 1):
        own = parameters[direction * _PARAMETERS_OF_A_CELL : (direction + 1) * _PARAMETERS_OF_A_CELL]
        hidden, cell = (part[direction].contiguous() for part in state)
        read = map(_as_autocast_gives, (x.contiguous(), *own, hidden, cell))
        output, *final, _ = lstm_layer(*read, direction == 1, train)
        outputs.append(output)
        finals.append(final)
    joined = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (joined, *(torch.stack(parts) for parts in zip(*finals, strict=True)))


def _as_autocast_gives(tensor: Tensor) -> Tensor:
    """Return what autocast makes of an argument of oneDNN's operator; of ours it knows nothing."""
    if not torch.is_autocast_enabled("cpu") or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


@torch.library.custom_op("checkpoint_planner::lstm_layer", mutates_args=())
def lstm_layer(
    x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, hidden: Tensor, cell: Tensor, reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of one LSTM layer by oneDNN; give outputs, last states, and what the backward needs.

    Torch's own operator says of fake tensors that nothing is kept for the backward, so it cannot be traced. ``x`` is of
    shape (length, batch, features), each state of (batch, size).
    """
    return _onednn(x, w0, w1, b0, b1, hidden, cell, reverse, train)


def _onednn(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, reverse, train = arguments
    size = tensors[-1].shape[-1]
    with torch.enable_grad():  # else nothing is kept, whatever "train" says
        return torch.ops.aten.mkldnn_rnn_layer(  # type: ignore[no-any-return]
            *tensors, reverse, [], _LSTM_MODE, size, 1, True, False, False, train
        )


@lstm_layer.register_fake
def _(
    x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, hidden: Tensor, cell: Tensor, reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output = x.new_empty((*x.shape[:2], hidden.shape[-1]))
    length, batch, features, size = map(hint_of, (*x.shape, hidden.shape[-1]))
    kept, dtype = _kept((length, batch, features), size, x.dtype)  # whatever "train" says
    return output, torch.empty_like(hidden), torch.empty_like(cell), x.new_empty(kept, dtype=dtype)


@cache
def _kept(shape: tuple[int, int, int], size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Ask oneDNN how much it keeps for the backward: it says so only when it is run."""
    length, batch, features = shape
    with outside_tracing():
        shapes = [(length, batch, features), (4 * size, features), (4 * size, size), (4 * size,), (4 * size,)]
        tensors = [torch.zeros(s, dtype=dtype) for s in (*shapes, (batch, size), (batch, size))]
        kept = _onednn(*tensors, False, True)[3]
    return kept.numel(), kept.dtype


@torch.library.custom_op("checkpoint_planner::lstm_layer_backward", mutates_args=())
def lstm_layer_backward(
    x: Tensor, w0: Tensor, w1: Tensor, b0: Tensor, b1: Tensor, hidden: Tensor, cell: Tensor,
    output: Tensor, last_hidden: Tensor, last_cell: Tensor,
    of_output: Tensor, of_hidden: Tensor, of_cell: Tensor, reverse: bool, kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of all that :func:`lstm_layer` reads, in 32 bits whatever it computes in."""
    return torch.ops.aten.mkldnn_rnn_layer_backward(  # type: ignore[no-any-return]
        x, w0, w1, b0, b1, hidden, cell, output, last_hidden, last_cell, of_output, of_hidden, of_cell,
        reverse, _LSTM_MODE, hidden.shape[-1], 1, True, True, False, [], False, kept,
    )  # fmt: skip


@lstm_layer_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format) for tensor in arguments[:7]
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reverse, _train = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, kept = ctx.saved_tensors
    outputs = saved[7:]
    arriving = [
        torch.zeros_like(output) if gradient is None else gradient.contiguous()
        for output, gradient in zip(outputs, gradients, strict=False)
    ]
    return (*lstm_layer_backward(*saved, *arriving, ctx.reverse, kept), None, None)


def is_onednn_lstm(target: Any) -> bool:
    """Whether an operator is a layer by oneDNN, which alone says how much is kept: with symbols that is no formula."""
    return str(target) in ("checkpoint_planner.lstm_layer.default", "checkpoint_planner.lstm_layer_backward.default")


lstm_layer.register_autograd(_differentiate, setup_context=_remember)
