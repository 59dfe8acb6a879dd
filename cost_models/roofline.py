"""Roofline costs from a device's data sheet: no operation is run.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer, plus the
launch. Good for ratios, and for accelerators that are not here; measured costs are better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cost_models.base import CostedOperation, OperationCost
from cost_models.devices import DeviceSpec

# On a CPU some kernels reach neither roof. Rates are elements made per second and core, in
# float32, torch 2.13, tensors of 6 million elements, best of five runs with one thread; with two
# threads all but the random ones ran twice as fast. Left out: what the roofs get right within 30%.
# An operator stands for all its overloads, or one of them is named.
_CPU_ELEMENTS_PER_SECOND_PER_CORE = {
    "aten.tanh": 0.4e9,
    "aten.erf": 0.77e9,
    "aten.sin": 0.8e9,
    "aten.cos": 0.8e9,
    "aten.log": 1.0e9,
    "aten.exp": 1.2e9,
    "aten.pow.Tensor_Tensor": 0.4e9,
    "aten.where": 0.28e9,
    "aten.masked_fill": 0.25e9,
    "aten.native_dropout_backward": 0.97e9,
    "aten.cumsum": 1.05e9,
    "aten.gather": 0.8e9,
    "aten.scatter_add": 0.6e9,
    "aten.sort": 17e6,
    "aten.native_batch_norm": 0.55e9,
    "aten._native_batch_norm_legit": 0.55e9,
    "aten._native_batch_norm_legit_functional": 0.55e9,
    "aten._fused_rms_norm": 1.3e9,
    "aten.max_pool2d_with_indices": 33e6,
}

# The generator is one sequence: more cores do not help.
_CPU_RANDOM_ELEMENTS_PER_SECOND = {
    "aten.native_dropout": 0.15e9,
    "aten.bernoulli": 0.17e9,
    "aten.rand": 0.35e9,
    "aten.rand_like": 0.35e9,
    "aten.randn": 0.29e9,
    "aten.randn_like": 0.29e9,
}

# Fraction of a large matrix product's rate. Attention is counted without the causal mask, of
# which its kernel skips half: 1.2 causal, 0.9 full, less for short sequences.
_CPU_FLOPS_FRACTION = {
    "aten.bmm": 0.45,
    "aten.baddbmm": 0.45,
    "aten.convolution": 0.95,
    "aten.convolution_backward": 0.85,
    "aten._scaled_dot_product_flash_attention_for_cpu": 1.0,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 1.0,
}

# The same on a GPU, for elements of 16 bits, and for float32 that is multiplied in TF32.
#
# Attention, of FLOP/s without a causal mask at 2,048 to 16,384 tokens and heads of 64 and 128, products at 0.7 of the
# peak. On an H100 and later: figures 5 and 6 of Shah et al., "FlashAttention-3" (2024), which has FlashAttention-2,
# torch's flash kernel, at 322 to 370 forward and 280 to 318 backward, and cuDNN's at 408 to 609 and 417 to 518. On an
# A100: Dao, "FlashAttention-2" (2023), with at most 0.73 and 0.63 of the peak, and 0.3 to 0.5 and 0.25 to 0.35 for the
# first FlashAttention, of which the efficient kernel is a kind.
#
# Convolutions reach what is left of the published time of a ResNet-50 of NVIDIA's examples on an A100 (2,470 images a
# second in mixed precision, 938 in TF32), after the memory traffic that the roofline predicts. For an H100 no such time
# of one card was found. The same share gives it 2.06 of an A100's rate, and MLPerf Training, where both ran NVIDIA's
# ResNet-50, has 1.85 (round 3.0, Dell's submissions, 16 cards: 14.4 and 7.8 minutes) to 2.13 (8 cards: 28.7 minutes in
# round 2.0, 13.466 in round 3.0, 3.0-2053): so the share is the same.
_FLASH, _CUDNN, _EFFICIENT = (f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "cudnn", "efficient"))
_CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")
_SHARES_IN_TF32 = dict.fromkeys(_CONVOLUTIONS, 0.33)
_SHARES_IN_16_BITS = {
    **dict.fromkeys(_CONVOLUTIONS, 0.55),
    _FLASH: 1.0,
    f"{_FLASH}_backward": 0.85,
    _EFFICIENT: 0.57,
    f"{_EFFICIENT}_backward": 0.43,
}
_SHARES_SINCE_HOPPER = {
    **_SHARES_IN_16_BITS,
    _FLASH: 0.5,
    f"{_FLASH}_backward": 0.43,
    _CUDNN: 0.73,
    f"{_CUDNN}_backward": 0.67,
}

# cuDNN multiplies float32 in TF32 for these, unless torch.backends.cudnn.allow_tf32 is switched off.
_IN_TF32 = {
    "aten.convolution",
    "aten.convolution_backward",
    "aten._cudnn_rnn",
    "aten._cudnn_rnn_backward",
}
_FIRST_WITH_TF32, _HOPPER = 80, 90
"""Of CUDA's compute capabilities, times ten."""


# What talks to other devices goes as fast as the link to the host: cards that share a machine are no slower.
_COLLECTIVE = "_c10d_functional."


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """The cost model of this file."""

    device: DeviceSpec
    name: ClassVar[str] = "roofline"

    def costs(self, operations: Sequence[CostedOperation]) -> tuple[OperationCost, ...]:
        """Return the cost of one run of each operation, in their order; workspace is not known, so 0."""
        return tuple(OperationCost(seconds=self._seconds(operation)) for operation in operations)

    def _seconds(self, operation: CostedOperation) -> float:
        device = self.device
        if operation.target.startswith(_COLLECTIVE):
            return operation.moved_bytes / device.host_link_bytes_per_second + device.launch_seconds
        bytes_per_second = device.bandwidth_bytes_per_second * device.bandwidth_efficiency
        flops_per_second = _flops_per_second(operation.target, operation.dtype, device)
        return max(operation.flops / flops_per_second, operation.moved_bytes / bytes_per_second) + device.launch_seconds


def _flops_per_second(target: str, dtype: str, device: DeviceSpec) -> float:
    if dtype == "float32" and target.rpartition(".")[0] in _IN_TF32 and _capability(device) >= _FIRST_WITH_TF32:
        dtype = "tf32"
    rate = device.peak_flops_per_second(dtype) * device.compute_efficiency
    if device.kind == "cpu":
        return _cpu_flops_per_second(target, device.cores, rate)
    return rate * share_of_products(target, dtype, device)


def share_of_products(target: str, dtype: str, device: DeviceSpec) -> float:
    """Return which share of a large matrix product's rate an operator reaches on one of NVIDIA's GPUs; elsewhere 1.

    Examples
    --------
    >>> from cost_models.devices import device
    >>> share_of_products("aten._scaled_dot_product_flash_attention.default", "bfloat16", device("h100"))
    0.5
    """
    capability = _capability(device)
    if not capability or dtype not in ("tf32", "bfloat16", "float16"):
        return 1.0
    in_16_bits = _SHARES_SINCE_HOPPER if capability >= _HOPPER else _SHARES_IN_16_BITS
    return (_SHARES_IN_TF32 if dtype == "tf32" else in_16_bits).get(target.rpartition(".")[0], 1.0)


def _capability(device: DeviceSpec) -> int:
    """Return CUDA's compute capability, times ten; 0 where there is none."""
    number = device.architecture.removeprefix("sm")
    return int(number) if number.isdigit() else 0


def _cpu_flops_per_second(target: str, cores: int, flops_per_second: float) -> float:
    name = target.rpartition(".")[0].removesuffix("_")  # what writes in place takes as long
    for known in (target, name):
        if known in _CPU_RANDOM_ELEMENTS_PER_SECOND:
            return _CPU_RANDOM_ELEMENTS_PER_SECOND[known]
        if known in _CPU_ELEMENTS_PER_SECOND_PER_CORE:
            return _CPU_ELEMENTS_PER_SECOND_PER_CORE[known] * cores
    return _CPU_FLOPS_FRACTION.get(name, 1.0) * flops_per_second


COST_MODEL = RooflineCosts
