"""Memory of an optimizer: its state, and the temporaries of ``step()``.

There are no formulas for torch's own optimizers: the real ``step()`` runs, on tensors that have sizes
but no data, and what it makes is counted. So the figures are those of the torch that is installed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from planner.capture.storages import PeakRecorder
from planner.capture.torch_internals import in_memory
from planner.capture.trees import leaf_tensors
from planner.common.options import check_optimizer
from planner.common.units import round_up

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer holds on the device of the model."""

    state_bytes: int
    """Kept from step to step: moments, and on a CPU the step counters."""
    master_bytes: int
    """Kept from step to step: float32 copies of the parameters of 16 bits."""
    step_bytes: int
    """Most that ``step()`` holds for a moment beyond parameters, gradients and the two above."""


_OF_TORCH: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}

_ONE_BY_ONE = "adafactor"
"""Who picks it is short of memory: on CUDA too torch takes one parameter after the other unless told otherwise."""

_OF_BITSANDBYTES = ("adam8bit", "adamw8bit")

_LATE_STEP = 1000.0
"""What a step reads wherever it reads a number off a tensor: RAdam does less in its first five steps."""


def optimizer_memory(
    parameters: Iterable[nn.Parameter],
    name: str,
    *,
    alignment_bytes: int,
    device_kind: DeviceKind,
    master_weights: bool = False,
    one_by_one: bool = False,
) -> OptimizerMemory:
    """Find out what an optimizer needs of a model's parameters that are trainable; nothing of their size is allocated.

    The optimizer is one of :data:`planner.common.options.OPTIMIZERS` with its default options: others can need more,
    :func:`memory_of_step` takes any optimizer. Raises UsageError if there is none of that name. Parameters that require
    no gradient have no state, tied ones have it once; gradients are taken to be dense and of their parameters' types.
    ``device_kind`` decides which implementation torch takes by default: on CUDA one for all parameters at once, whose
    temporaries are as large as all of them, unless it goes ``one_by_one``. With ``master_weights`` parameters of 16
    bits are updated through float32 copies: their state is float32, and ``step_bytes`` includes float32 copies of all
    their gradients.

    Takes 0.3 to 2 s for 436 parameters, nothing that depends on how large they are.

    >>> optimizer_memory(nn.Linear(10, 10).parameters(), "adamw", alignment_bytes=512, device_kind="cuda")
    OptimizerMemory(state_bytes=2048, master_bytes=0, step_bytes=1024)
    """
    check_optimizer(name)
    trainable = [in_memory(p) for p in parameters if p.requires_grad]
    if name == "none" or not trainable:
        return OptimizerMemory(state_bytes=0, master_bytes=0, step_bytes=0)
    copied = [p for p in trainable if master_weights and p.is_floating_point() and p.element_size() == 2]
    master_bytes = sum(round_up(4 * p.numel(), alignment_bytes) for p in copied)
    if name in _OF_BITSANDBYTES:
        state_bytes, extra_bytes = _state_of_8_bits([p.numel() for p in trainable], alignment_bytes), 0
    else:
        is_copied = {id(p) for p in copied}
        given = [_without_data(p, torch.float32 if id(p) in is_copied else p.dtype) for p in trainable]
        make = partial(_OF_TORCH[name], foreach=device_kind == "cuda" and not (one_by_one or name == _ONE_BY_ONE))
        state_bytes, extra_bytes = memory_of_step(make, given, alignment_bytes=alignment_bytes, device_kind=device_kind)
    return OptimizerMemory(state_bytes=state_bytes, master_bytes=master_bytes, step_bytes=master_bytes + extra_bytes)


def memory_of_step(
    make: Callable[[list[nn.Parameter]], Optimizer],
    parameters: Sequence[torch.Tensor],
    *,
    alignment_bytes: int,
    device_kind: DeviceKind,
) -> tuple[int, int]:
    """Run two steps of any optimizer without data; return what it keeps, and the most that a step holds beyond that.

    ``make`` gets parameters and names the implementation (``foreach=True`` or ``False``): they are on the meta device,
    for which torch has a default of its own. Fused implementations refuse it. Of ``parameters`` only shapes and types
    are read.

    What kernels allocate inside is not seen. Known on a CPU: a Python number that a kernel takes as an
    operand becomes a tensor of 8 bytes and is copied in the parameter's type, one at a time; a mean of
    16 bits is taken in float32, which for Adafactor is 4 bytes for each row of one parameter.
    """
    updated = [_without_data(p, p.dtype) for p in parameters]
    recorder = _UpdateRecorder(alignment_bytes, (updated, [p.grad for p in updated]))
    recorder.counts_host = device_kind == "cpu"
    with recorder, torch.device("cpu"):  # in torch 2.11 step counters are on the default device
        optimizer = make(updated)
        optimizer.step()
        state_bytes = recorder.live_bytes
        optimizer.step()
    return state_bytes, recorder.peak_bytes - state_bytes


def kept_for(optimizer: Optimizer, parameters: Iterable[nn.Parameter], alignment_bytes: int) -> int:
    """Return the bytes that an optimizer keeps now for these parameters, where they are."""
    held = ((p.device, t) for p in parameters for t in leaf_tensors(optimizer.state.get(p, {})))  # SOAP's are in lists
    kept = [tensor for device, tensor in held if tensor.device == device]
    return sum(round_up(in_memory(tensor).nbytes, alignment_bytes) for tensor in kept)


def memory_of_existing(
    parameters: Iterable[nn.Parameter], *, alignment_bytes: int, device_kind: DeviceKind
) -> OptimizerMemory | None:
    """Find what the optimizers of this process that hold some of these parameters need; None if there is none.

    What they keep already is counted; for one of torch's that has not stepped yet it is predicted.
    """
    left = {id(p): p for p in parameters if p.requires_grad}
    state_bytes = step_bytes = 0
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        named = getattr(optimizer, "param_groups", ())  # what wraps another may have none yet
        held = [p for group in named for p in group["params"] if id(p) in left]
        kept_bytes, temporary_bytes = kept_for(optimizer, held, alignment_bytes), 0
        if held and type(optimizer).__module__.startswith("torch.optim."):
            defaults, kind = optimizer.defaults, type(optimizer).__name__.lower()
            name = "momentum" if kind == "sgd" and defaults["momentum"] else kind
            if name in _OF_TORCH:
                kinds: dict[str, Any] = {"alignment_bytes": alignment_bytes, "device_kind": device_kind}
                expected = optimizer_memory(held, name, **kinds, one_by_one=bool(defaults.get("fused")))
                kept_bytes, temporary_bytes = kept_bytes or expected.state_bytes, expected.step_bytes
        if kept_bytes or temporary_bytes:  # one that others wrap holds the same parameters
            state_bytes, step_bytes = state_bytes + kept_bytes, max(step_bytes, temporary_bytes)
            for parameter in held:
                left.pop(id(parameter), None)
    if not state_bytes and not step_bytes:
        return None
    return OptimizerMemory(state_bytes=state_bytes, master_bytes=0, step_bytes=step_bytes)


class _UpdateRecorder(PeakRecorder):
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
        state_bytes += 2 * sum(round_up(part, alignment_bytes) for part in moment_bytes)
    has_maps = any(size >= 4096 for size in sizes)
    return state_bytes + 2 * has_maps * round_up(4 * 256, alignment_bytes)


def _without_data(parameter: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    return stand_in
