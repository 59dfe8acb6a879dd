"""Kinds of operators that the rules of several systems speak of."""

from __future__ import annotations

import re
from collections.abc import Callable

from planner.ir.graph import Operation, operator_name

_NORM_MODULE = re.compile(r"norm(_?\d+)?$|(^|_)ln(_?\w)?$", re.IGNORECASE)


def operator(operation: Operation) -> str:
    """Return an operator's own name: ``mm`` of ``aten.mm.default``."""
    return operator_name(operation.target)


def _is_one_of(*names: str) -> Callable[[Operation], bool]:
    return lambda operation: operator(operation) in names


is_linear = _is_one_of("mm", "addmm", "_scaled_mm", "linear")
"""Whether it is a matrix product without batch dimensions, as of a linear layer."""

is_batched_product = _is_one_of("bmm", "baddbmm")
"""Whether it is a matrix product for each entry of a batch, as in attention that is not fused."""

is_softmax = _is_one_of("_softmax", "_safe_softmax", "softmax")
"""Whether it is a softmax, not its logarithm."""

is_activation = _is_one_of(
    "elu", "gelu", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "sigmoid", "silu", "softplus", "tanh"
)
"""Whether it is an activation function."""


def is_product(operation: Operation) -> bool:
    """Whether it is a matrix product or a convolution."""
    return is_linear(operation) or is_batched_product(operation) or "convolution" in operator(operation)


def is_fused_attention(operation: Operation) -> bool:
    """Whether it is an attention kernel that makes no matrix of scores."""
    return "scaled_dot_product" in operator(operation) or "flex_attention" in operation.target


def is_product_or_attention(operation: Operation) -> bool:
    """Whether it is what selective checkpointing usually keeps."""
    return is_product(operation) or is_fused_attention(operation)


def is_batch_norm(operation: Operation) -> bool:
    """Whether it is a batch norm."""
    return "batch_norm" in operator(operation)


def is_layer_norm(operation: Operation) -> bool:
    """Whether it is a layer norm or an RMS norm, or a part of one: then its module is called so."""
    name = operator(operation)
    if "layer_norm" in name or "rms_norm" in name:
        return True
    module = operation.module.rpartition(".")[2]
    return _NORM_MODULE.search(module) is not None and not is_product(operation) and not is_batch_norm(operation)
