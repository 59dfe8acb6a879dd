"""Costs from a device's data sheet: no operation is run.

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
_CPU_ELEMENTS_PER_SECOND_PER_CORE = {
    "aten.tanh.default": 0.4e9,
    "aten.erf.default": 0.77e9,
    "aten.sin.default": 0.8e9,
    "aten.cos.default": 0.8e9,
    "aten.log.default": 1.0e9,
    "aten.exp.default": 1.2e9,
    "aten.pow.Tensor_Tensor": 0.4e9,
    "aten.where.self": 0.28e9,
    "aten.masked_fill.Scalar": 0.25e9,
    "aten.native_dropout_backward.default": 0.97e9,
    "aten.cumsum.default": 1.05e9,
    "aten.gather.default": 0.8e9,
    "aten.scatter_add.default": 0.6e9,
    "aten.sort.default": 17e6,
    "aten.native_batch_norm.default": 0.55e9,
    "aten._native_batch_norm_legit_functional.default": 0.55e9,
    "aten._native_batch_norm_legit.no_stats": 0.55e9,
    "aten._fused_rms_norm.default": 1.3e9,
    "aten.max_pool2d_with_indices.default": 33e6,
}

# The generator is one sequence: more cores do not help.
_CPU_RANDOM_ELEMENTS_PER_SECOND = {
    "aten.native_dropout.default": 0.15e9,
    "aten.bernoulli.p": 0.17e9,
    "aten.bernoulli.default": 0.17e9,
    "aten.rand.default": 0.35e9,
    "aten.rand_like.default": 0.35e9,
    "aten.randn.default": 0.29e9,
    "aten.randn_like.default": 0.29e9,
}

# Fraction of a large matrix product's rate. Attention is counted without the causal mask, of
# which its kernel skips half: 1.2 causal, 0.9 full, less for short sequences.
_CPU_FLOPS_FRACTION = {
    "aten.bmm.default": 0.45,
    "aten.baddbmm.default": 0.45,
    "aten.convolution.default": 0.95,
    "aten.convolution_backward.default": 0.85,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 1.0,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 1.0,
}


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
        flops_per_second = device.peak_flops_per_second(operation.dtype) * device.compute_efficiency
        bytes_per_second = device.bandwidth_bytes_per_second * device.bandwidth_efficiency
        if device.kind == "cpu":
            flops_per_second = _cpu_flops_per_second(operation.target, device.cores, flops_per_second)
        return max(operation.flops / flops_per_second, operation.moved_bytes / bytes_per_second) + device.launch_seconds


def _cpu_flops_per_second(target: str, cores: int, flops_per_second: float) -> float:
    if target in _CPU_RANDOM_ELEMENTS_PER_SECOND:
        return _CPU_RANDOM_ELEMENTS_PER_SECOND[target]
    if target in _CPU_ELEMENTS_PER_SECOND_PER_CORE:
        return _CPU_ELEMENTS_PER_SECOND_PER_CORE[target] * cores
    return _CPU_FLOPS_FRACTION.get(target, 1.0) * flops_per_second


COST_MODEL = RooflineCosts
