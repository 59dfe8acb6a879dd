"""What an optimizer keeps between steps, and what its ``step()`` needs for a moment.

There are no formulas for torch's own optimizers: the real ``step()`` runs, on tensors that have sizes
but no data, and what it makes is counted. So the figures are those of the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from planner.capture.storages import PeakRecorder
from planner.common.options import check_optimizer

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer holds on the device of the model.

    Parameters
    ----------
    state_bytes : int
        Kept from step to step: moments, and on a CPU the step counters.
    master_bytes : int
        Kept from step to step: float32 copies of the parameters of 16 bits.
    step_bytes : int
        Most that ``step()`` holds for a moment beyond parameters, gradients and the two above.
    """

    state_bytes: int
    master_bytes: int
    step_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchOptimizer:
    make: Callable[..., Optimizer]
    is_foreach_on_cuda: bool = True


_OF_TORCH = {
    "sgd": _TorchOptimizer(make=torch.optim.SGD),
    "momentum": _TorchOptimizer(make=partial(torch.optim.SGD, momentum=0.9)),
    "adam": _TorchOptimizer(make=torch.optim.Adam),
    "adamw": _TorchOptimizer(make=torch.optim.AdamW),
    "nadam": _TorchOptimizer(make=torch.optim.NAdam),
    "radam": _TorchOptimizer(make=torch.optim.RAdam),
    "adagrad": _TorchOptimizer(make=torch.optim.Adagrad),
    "rmsprop": _TorchOptimizer(make=torch.optim.RMSprop),
    # Who picks it is short of memory: torch takes one parameter after the other unless told otherwise.
    "adafactor": _TorchOptimizer(make=torch.optim.Adafactor, is_foreach_on_cuda=False),
}

_OF_BITSANDBYTES = ("adam8bit", "adamw8bit")

_LATE_STEP = 1000.0
"""What a step reads wherever it reads a number off a tensor: RAdam does less in its first five steps."""


def optimizer_memory(
    model: nn.Module, name: str, *, alignment_bytes: int, device_kind: DeviceKind, master_weights: bool = False
) -> OptimizerMemory:
    """Find out what an optimizer of a model's trainable parameters needs; nothing of their size is allocated.

    Parameters
    ----------
    model : torch.nn.Module
        Real or built under :func:`planner.capture.fake_mode`, on any device. Parameters that require no
        gradient have no state, tied ones have it once.
    name : str
        One of :data:`planner.common.options.OPTIMIZERS`, with its default options; ``"momentum"`` is SGD with it.
    alignment_bytes : int
        What the device's allocator rounds each tensor up to.
    device_kind : {"cpu", "cuda"}
        Where the parameters will be. It decides which implementation torch takes by default: on CUDA
        one for all parameters at once, whose temporaries are as large as all of them.
    master_weights : bool
        Whether parameters of 16 bits are updated through float32 copies: their state is float32, and
        ``step_bytes`` includes float32 copies of all their gradients.

    Raises
    ------
    UsageError
        If there is no optimizer of that name; the message lists all.

    Notes
    -----
    Other options can need more: :func:`memory_of_step` takes any optimizer. Gradients are taken to be
    dense and of their parameters' types.

    Takes 0.3 to 2 s for 436 parameters, nothing that depends on how large they are.

    Examples
    --------
    >>> optimizer_memory(nn.Linear(10, 10), "adamw", alignment_bytes=512, device_kind="cuda")
    OptimizerMemory(state_bytes=2048, master_bytes=0, step_bytes=1024)
    """
    check_optimizer(name)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "none" or not trainable:
        return OptimizerMemory(state_bytes=0, master_bytes=0, step_bytes=0)
    copied = [p for p in trainable if master_weights and p.is_floating_point() and p.element_size() == 2]
    master_bytes = sum(_aligned(4 * p.numel(), alignment_bytes) for p in copied)
    if name in _OF_BITSANDBYTES:
        state_bytes, temporary_bytes = _state_of_8_bits([p.numel() for p in trainable], alignment_bytes), 0
    else:
        known = _OF_TORCH[name]
        is_copied = {id(p) for p in copied}
        updated = [_without_data(p, torch.float32 if id(p) in is_copied else p.dtype) for p in trainable]
        make = partial(known.make, foreach=device_kind == "cuda" and known.is_foreach_on_cuda)
        state_bytes, temporary_bytes = memory_of_step(
            make, updated, alignment_bytes=alignment_bytes, device_kind=device_kind
        )
    return OptimizerMemory(
        state_bytes=state_bytes, master_bytes=master_bytes, step_bytes=master_bytes + temporary_bytes
    )


def memory_of_step(
    make: Callable[[list[nn.Parameter]], Optimizer],
    parameters: Sequence[torch.Tensor],
    *,
    alignment_bytes: int,
    device_kind: DeviceKind,
) -> tuple[int, int]:
    """Run two steps of any optimizer without data and give what it keeps, and what a step needs.

    Parameters
    ----------
    make : callable
        From parameters to the optimizer. Name the implementation (``foreach=True`` or ``False``): the
        parameters are on the meta device, for which torch has a default of its own. Fused
        implementations refuse it.
    parameters : sequence of torch.Tensor
        What is to be updated; only shapes and types are read.
    alignment_bytes : int
        What the device's allocator rounds each tensor up to.
    device_kind : {"cpu", "cuda"}
        Where the parameters will be.

    Returns
    -------
    tuple of int
        Bytes kept from step to step, and the most that a step, the first or a later one, holds beyond them.

    Notes
    -----
    What kernels allocate inside is not seen. Known on a CPU: a Python number that a kernel takes as an
    operand becomes a tensor of 8 bytes and is copied in the parameter's type, one at a time; a mean of
    16 bits is taken in float32, which for Adafactor is 4 bytes for each row of one parameter.
    """
    updated = [_without_data(p, p.dtype) for p in parameters]
    recorder = _StepRecorder(alignment_bytes, (updated, [p.grad for p in updated]))
    recorder.counts_host = device_kind == "cpu"
    with recorder:
        optimizer = make(updated)
        optimizer.step()
        state_bytes = recorder.live_bytes
        optimizer.step()
    return state_bytes, recorder.peak_bytes - state_bytes


class _StepRecorder(PeakRecorder):
    """Follows what a step makes where its parameters are, and lets it read numbers that are not there.

    Parameters are on the meta device, not fake ones on a CPU or on CUDA: step counters are on the CPU
    wherever the parameters are, and on a fake CPU the two could not be told apart; a fake CUDA tensor
    makes torch start CUDA where there is one. So the counters are real, a few bytes each.
    """

    counts_host = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensor.item(), of a counter or of a norm that Adafactor scales by. Numbers read so are factors:
        # no size depends on them.
        if function is torch.ops.aten._local_scalar_dense.default:
            return _LATE_STEP
        return super().__torch_dispatch__(function, types, args, kwargs)

    def counts(self, tensor: torch.Tensor) -> bool:
        """Ask the tensor: if the caller is under a fake mode, every storage is a meta one."""
        return self.counts_host or tensor.device.type == "meta"


def _state_of_8_bits(sizes: Sequence[int], alignment_bytes: int) -> int:
    """Return the bytes that bitsandbytes' Adam8bit and AdamW8bit keep for parameters of so many elements.

    For a parameter of 4096 elements or more: two moments of a byte for each element, and for each of
    them a float32 for each block of 256 elements. For a smaller one: two float32 moments. Two maps of
    256 float32 values are shared by all parameters; step counters are Python numbers. The update is one
    kernel in place.

    Source: bitsandbytes 0.49.2, ``Optimizer2State.init_state`` and ``fill_qmap`` in ``optim/optimizer.py``
    (older releases had blocks of 2048 elements), with default options. Parameters that a caller excludes
    (``GlobalOptimManager``; Hugging Face's Trainer does so for embeddings) keep 8 bytes for each element.
    """
    state_bytes = 0
    for size in sizes:
        moment_bytes = (size, 4 * -(-size // 256)) if size >= 4096 else (4 * size,)
        state_bytes += 2 * sum(_aligned(part, alignment_bytes) for part in moment_bytes)
    has_maps = any(size >= 4096 for size in sizes)
    return state_bytes + 2 * has_maps * _aligned(4 * 256, alignment_bytes)


def _without_data(parameter: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _aligned(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes
