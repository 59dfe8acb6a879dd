"""Types of tensors that kernels refuse, and fake tensors let pass: a product of doubles and floats, say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.capture.fake_internals import fake_calls_by
from planner.capture.torch_internals import outside_tracing
from planner.capture.trees import tensors_in

aten = torch.ops.aten

_OF_ONE_TYPE = {
    aten.addbmm.default,
    aten.addmm.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.mm.default,
    aten.mv.default,
}
"""They take tensors of one element, whatever the number of dimensions."""


@contextmanager
def types_as_kernels_take() -> Iterator[None]:
    """Let fake tensors refuse what kernels refuse, while a call is captured."""

    def as_kernel(_mode: Any, function: Any, args: Any, kwargs: Any, go_on: Callable[[], Any]) -> Any:
        refuse_types(function, args, kwargs)
        return go_on()

    with fake_calls_by(as_kernel):
        yield


def refuse_types(function: Any, args: Any, kwargs: Any) -> None:
    """Raise what a call's kernel raises where types do not go together: it is asked on one element of each tensor."""
    if function not in _OF_ONE_TYPE:
        return
    if len({tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()}) > 1:
        with outside_tracing(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, _of_one_element, (args, kwargs))
            function(*args, **kwargs)


def _of_one_element(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype)
