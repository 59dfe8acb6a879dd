"""One call's arguments, and what is resident around it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture.parallel import check_not_distributed
from planner.capture.torch_internals import has_full_backward_hooks, storage_id
from planner.common.units import round_up
from planner.errors import RuntimeUnsupportedError, UsageError

LossFunction = Callable[[Any], torch.Tensor]
"""From a model's output to a scalar."""


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None) -> Inputs:
        """Read example inputs as people write them: a tensor, a tuple or list of arguments, a dict of keywords.

        Raises
        ------
        UsageError
            If they are nothing of the kind, or hold no tensor.
        """
        kwargs = dict(example_kwargs or {})
        if isinstance(example_inputs, Inputs):
            return example_inputs
        if isinstance(example_inputs, torch.Tensor):
            args: tuple[Any, ...] = (example_inputs,)
        elif isinstance(example_inputs, Mapping):
            args, kwargs = (), {**example_inputs, **kwargs}
        elif isinstance(example_inputs, (tuple, list)):
            args = tuple(example_inputs)
        elif example_inputs is None and kwargs:
            args = ()
        else:
            raise UsageError(
                f"example inputs must be a tensor, a tuple of arguments or a dict of keywords, "
                f"not {type(example_inputs).__name__}"
            )
        inputs = cls(args, kwargs)
        if not inputs.tensors():
            raise UsageError("the example inputs hold no tensor: pass what one training step passes to the model")
        return inputs

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, nested ones too."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Return the same arguments with every tensor replaced."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, function, (self.args, self.kwargs))
        return Inputs(args, kwargs)


def check_model(model: Any) -> None:
    """Refuse what cannot be planned whatever it is called with: no module, scripted, or distributed already.

    Raises
    ------
    UsageError
    """
    check_module(model)
    check_not_distributed(model)


def check_module(model: Any) -> None:
    """Refuse what is no module, or is scripted.

    Raises
    ------
    UsageError
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a scripted model cannot be captured: pass the module that it was made from")


def check_capturable(model: nn.Module, inputs: Inputs) -> None:
    """Refuse at once what would fail deep inside torch's compiler.

    Raises
    ------
    UsageError
        If the inputs are not on the model's device.
    RuntimeUnsupportedError
        If a module has full backward hooks.
    """
    check_device(model, inputs)
    for name, module in model.named_modules():
        if has_full_backward_hooks(module):
            raise RuntimeUnsupportedError(
                f"module {name or type(model).__name__!r} has full backward hooks, which a captured graph cannot call: "
                "remove them, or use tensor hooks on the output"
            )


def check_plannable(model: nn.Module, inputs: Inputs) -> None:
    """Refuse what cannot be captured, and a model that Hugging Face's switch tells to checkpoint itself.

    Raises
    ------
    UsageError, RuntimeUnsupportedError
        See :func:`check_capturable`.
    """
    check_capturable(model, inputs)
    check_own_checkpointing(model)


def check_own_checkpointing(model: nn.Module) -> None:
    """Refuse a model that Hugging Face's switch tells to checkpoint itself.

    Raises
    ------
    UsageError
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True and module.training:
            raise UsageError(
                f"the model checkpoints its activations itself, in {name or type(model).__name__!r}; the plan decides "
                "that now: call model.gradient_checkpointing_disable(), "
                "and pass no gradient_checkpointing=True to a trainer"
            )


def check_device(model: nn.Module, inputs: Inputs) -> None:
    """Refuse inputs that are not on the model's device.

    Raises
    ------
    UsageError
        Naming both.
    """
    devices = {p.device for p in itertools.chain(model.parameters(), model.buffers())}
    for tensor in inputs.tensors():
        if len(devices) == 1 and tensor.device not in devices:
            raise UsageError(
                f"an example input is on {tensor.device} and the model on {next(iter(devices))}: move one of them"
            )


def run_backward(outputs: Any, loss_fn: LossFunction | None) -> None:
    """Differentiate what a model returned: its loss, the given loss of it, or all its outputs."""
    if loss_fn is not None:
        loss_fn(outputs).backward()
        return
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    losses = [t for t in tensors if t.dim() == 0]
    if losses:
        torch.autograd.backward(losses)
    elif tensors:
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
    else:
        raise UsageError("no output of the model requires gradients: there is no backward to run")


def static_bytes(model: nn.Module, inputs: Sequence[torch.Tensor], *, alignment_bytes: int) -> dict[str, int]:
    """Count what is resident before the step, each storage once.

    Parameters
    ----------
    inputs : sequence of torch.Tensor
        What the step is given; parameters and buffers among them are not counted again.

    Returns
    -------
    dict of str to int
        Bytes of ``parameters``, ``buffers`` and ``inputs``.
    """
    seen: set[int] = set()
    groups = {"parameters": model.parameters(), "buffers": model.buffers(), "inputs": inputs}
    return {kind: new_bytes(tensors, seen, alignment_bytes) for kind, tensors in groups.items()}


def new_bytes(tensors: Iterable[torch.Tensor], seen: set[int], alignment_bytes: int) -> int:
    """Count the storages of tensors that are not among those seen, each once, and add them to those."""
    total = 0
    for tensor in tensors:
        if (storage := storage_id(tensor)) not in seen:
            seen.add(storage)
            total += round_up(tensor.untyped_storage().nbytes(), alignment_bytes)
    return total
