"""Example inputs of a call, checks of model and inputs before a capture, and the bytes resident around a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture.fake_internals import fake_mode
from planner.capture.model_facts import check_not_distributed, has_distributed_tensors
from planner.capture.module_internals import has_full_backward_hooks
from planner.capture.torch_internals import in_memory, other_state, storage_id
from planner.capture.trees import mapped, tensors_in
from planner.common.options import AUTO, DROPPED, HELD
from planner.common.units import round_up
from planner.errors import RuntimeUnsupportedError, UnsupportedModelError, UsageError
from planner.ir.static_memory import LossMemory

LossFunction = Callable[[Any], torch.Tensor]
"""From a model's output to a scalar."""

Varying = tuple[torch.Tensor, set[int]]
"""An input, and its dimensions that are not always of one size."""


def _is_object(leaf: Any) -> bool:
    """Whether a leaf is an object that may hold tensors, such as a batch of graphs."""
    plain = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)
    return not isinstance(leaf, (*plain, Mapping, tuple, list, type)) and not callable(leaf)


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword arguments of one call of the model.

    Parameters
    ----------
    args : tuple
        Positional arguments.
    kwargs : dict
        Keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None) -> Inputs:
        """Read example inputs as people write them: a tensor, a tuple or list of arguments, a dict, an object.

        A UsageError says that they are none of these, or hold no tensor. What an object holds is its own business.
        """
        kwargs = dict(example_kwargs or {})
        if isinstance(example_inputs, Inputs):
            return example_inputs
        if isinstance(example_inputs, torch.Tensor) or _is_object(example_inputs):
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
        if not any(isinstance(x, torch.Tensor) or _is_object(x) for x in pytree.tree_leaves((args, kwargs))):
            raise UsageError("the example inputs contain no tensor: pass what one training step passes to the model")
        return inputs

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, nested ones too."""
        return tensors_in((self.args, self.kwargs))

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Return the same arguments with every tensor replaced."""
        args, kwargs = mapped(function, (self.args, self.kwargs))
        return Inputs(args, kwargs)

    @property
    def batch_size(self) -> int:
        """The length of the first tensor's first dimension."""
        return self._size_of(0)

    def with_batch(self, size: int) -> Inputs:
        """Return inputs of another batch: of every tensor whose first dimension is as long as the first one's."""
        old = self.batch_size
        return self.map_tensors(lambda t: _resized(t, [0], size) if t.dim() and t.shape[0] == old else t)

    def with_length(self, size: int) -> Inputs:
        """Return inputs of another sequence length: in every dimension but the first that is as long as that."""
        old = self._size_of(1)
        return self.map_tensors(lambda t: _resized(t, [d for d in range(1, t.dim()) if t.shape[d] == old], size))

    def _size_of(self, dimension: int) -> int:
        size = next((tensor.shape[dimension] for tensor in self.tensors() if tensor.dim() > dimension), None)
        if size is None:
            what = "batch" if dimension == 0 else "sequence length"
            raise UsageError(f"the example inputs have no {what}: none of the tensors has {dimension + 1} dimensions")
        return size


def _resized(tensor: torch.Tensor, dimensions: Sequence[int], size: int) -> torch.Tensor:
    """Return a tensor of another size in some dimensions, in the same layout; its values are repeated or left out."""
    if all(tensor.shape[d] == size for d in dimensions):
        return tensor
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    values = tensor.detach()
    for d in dimensions:
        values = values.index_select(d, torch.arange(size, device=tensor.device) % tensor.shape[d])
    made = torch.empty_permuted(values.shape, order, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(values).requires_grad_(tensor.requires_grad)


def varying_dimensions(inputs: Inputs, seen: Iterable[Sequence[Sequence[int]]]) -> list[Varying]:
    """Return the inputs with dimensions that were of another size in a call seen before, of inputs of these sizes."""
    tensors = inputs.tensors()
    alike = [sizes for sizes in seen if [len(size) for size in sizes] == [tensor.dim() for tensor in tensors]]
    found = ((t, {d for s in alike for d, n in enumerate(s[at]) if n != t.shape[d]}) for at, t in enumerate(tensors))
    return [(tensor, dimensions) for tensor, dimensions in found if dimensions]


def check_model(model: Any, *, may_be_sharded: bool = False) -> None:
    """Raise UsageError for a model that no inputs make plannable; see also :func:`check_module`."""
    check_module(model)
    check_not_distributed(model, may_be_sharded=may_be_sharded)
    check_one_device(model)


def check_one_device(model: nn.Module) -> None:
    """Raise a UsageError for a model over several devices; numbers on the CPU may go with tensors on a GPU."""
    places: dict[torch.device, str] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_meta and (tensor.dim() or tensor.device.type != "cpu"):
            places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = [f"{name!r} is on {device}" for device, name in places.items()]
        raise UsageError(
            f"the model is spread over several devices: {', '.join(listed)}. A plan is for one: move the model there, "
            "or plan its parts one by one"
        )


def check_module(model: Any) -> None:
    """Raise a UsageError for what is no module, is scripted, or has parameters without a size (lazy modules)."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a scripted model cannot be captured: pass the module that it was made from")
    state = chain(model.named_parameters(), model.named_buffers())
    unsized = next((name for name, tensor in state if nn.parameter.is_lazy(tensor)), None)
    if unsized is not None:
        raise UsageError(f"{unsized!r} has no size yet, since its module is lazy: call the model once, then plan it")


def check_is_called(model: nn.Module) -> None:
    """Warn of a model that is trained by its ``training_step``; UsageError if nothing else of it can be called."""
    if not callable(getattr(model, "training_step", None)):
        return
    name = type(model).__name__
    parts = [f"{name}.{part}" for part, _ in model.named_children()]
    hint = (
        f"{name} has a training_step, which a trainer calls instead of the model: wrap the module that it calls"
        f"{f', say {parts[0]}' if parts else ''}"
    )
    if type(model).forward.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
        raise UsageError(hint)
    warnings.warn(f"{hint}, unless that is {name} itself", stacklevel=3)


def check_capturable(model: nn.Module, inputs: Inputs) -> None:
    """Refuse inputs on another device and full backward hooks, which would fail deep inside torch's compiler."""
    check_device(model, inputs)
    if has_distributed_tensors(model):
        raise RuntimeUnsupportedError(
            "the model is parallel over ranks (parallelize_module), and its operators run on parts of its parameters: "
            "the runtime 'modules' plans such a model"
        )
    for name, module in model.named_modules():
        if has_full_backward_hooks(module):
            raise RuntimeUnsupportedError(
                f"module {name or type(model).__name__!r} has full backward hooks, which a captured graph cannot call: "
                "remove them, or use tensor hooks on the output"
            )


def check_plannable(model: nn.Module, inputs: Inputs) -> None:
    """Make the checks of :func:`check_capturable` and :func:`check_own_checkpointing`."""
    check_capturable(model, inputs)
    check_own_checkpointing(model)


def check_own_checkpointing(model: nn.Module) -> None:
    """Raise a UsageError for a model that Hugging Face's switch tells to checkpoint itself."""
    for path, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True and module.training:
            kinds = (f"{kind}_checkpointing_disable" for kind in ("activation", "gradient"))  # the latter in older ones
            names = (*kinds, "disable_gradient_checkpointing")  # of transformers, of diffusers
            has = (f"call model.{name}()" for name in names if hasattr(model, name))
            raise UsageError(
                f"the model checkpoints its activations itself, in {path or type(model).__name__!r}; the plan decides "
                f"that now: {next(has, 'set its gradient_checkpointing = False')}, also in the trainer"
            )


def check_device(model: nn.Module, inputs: Inputs) -> None:
    """Raise a UsageError for inputs that are not on the model's device; refuse nested ones, and those of subclasses."""
    devices = {tensor.device for tensor in state_of(model).values()}
    for tensor in inputs.tensors():
        if tensor.is_nested:
            raise UnsupportedModelError(
                "an input is a nested tensor, whose bytes no plan knows: pass its values and offsets, or pad it"
            )
        kind = type(tensor)
        if kind not in (torch.Tensor, nn.Parameter) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise UnsupportedModelError(
                f"an input is of the class {kind.__name__}, which torch does not follow when it captures or records: "
                "pass input.as_subclass(torch.Tensor)"
            )
        if len(devices) == 1 and tensor.device not in devices:
            raise UsageError(f"an example input is on {tensor.device} and the model on {next(iter(devices))}: move one")


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, by all names that they have."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


LATE = "_LateBackward"
"""The node of outputs that a planned call takes for unused: see :class:`planner.runtimes._gradients.LateGradients`."""


def expected_losses(
    shapes: Sequence[Sequence[int]], loss: LossMemory | None = None, outputs: Sequence[torch.Tensor] = ()
) -> list[int]:
    """Return, by the sizes of all outputs with gradients, the positions of those that a backward starts from.

    What a loss outside depends on is known where it was measured. Otherwise they are the scalars if there are any (a
    Hugging Face model with labels gives its loss beside its logits), else all. A scalar that shares nothing with what
    computes other ``outputs`` is no loss of them, but a temperature that CLIP returns beside its features. A captured
    program may give further results, what the forward leaves in attributes, before or after those that it returns.
    """
    seen = [tuple(shape) for shape in shapes]
    if loss is None or loss.outputs is None:
        computes = set[Any]().union(*(_computing(output) for output in outputs if output.dim()))
        scalars = [position for position, shape in enumerate(seen) if not shape]
        of_them = [p for p in scalars if not computes or _is_loss(outputs[p], computes)]
        return of_them or list(range(len(seen)))
    returned = [shape for shape, _ in loss.outputs]
    firsts = [first for first in range(len(seen)) if seen[first : first + len(returned)] == returned]
    if len(firsts) != 1:
        return list(range(len(seen)))
    return [firsts[0] + position for position, (_, reached) in enumerate(loss.outputs) if reached]


def _is_loss(scalar: torch.Tensor, computes: set[Any]) -> bool:
    """Whether what computes other outputs goes into a scalar; of what one compiled function gives, all is expected."""
    return scalar.grad_fn not in computes and not computes.isdisjoint(_computing(scalar))


def _computing(tensor: torch.Tensor) -> set[Any]:
    """Return the nodes of autograd that a tensor comes from, without leaves."""
    found, pending = set[Any](), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found and node.next_functions:
            found.add(node)
            pending += [before for before, _ in node.next_functions]
    return found


def differentiable_in(outputs: Any) -> list[torch.Tensor]:
    """Return the outputs that have gradients, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(outputs) if tensor.requires_grad}.values())


def differentiated(outputs: Any, loss: LossMemory | None = None) -> list[torch.Tensor]:
    """Return the outputs that a backward starts from; see :func:`expected_losses`."""
    tensors = differentiable_in(outputs)
    planned = [t for t in tensors if t.grad_fn is None or t.grad_fn.name() != LATE]
    if len(planned) < len(tensors):
        return planned
    return [tensors[position] for position in expected_losses([t.shape for t in tensors], loss, tensors)]


def are_dropped(outputs: str, losses: Sequence[torch.Tensor], loss: Any) -> bool:
    """Whether a loop drops outputs that are no losses; by default it does where the model returns its own loss."""
    return loss is None and all(not t.dim() for t in losses) if outputs == AUTO else outputs == DROPPED


def run_backward(losses: Sequence[torch.Tensor]) -> None:
    """Differentiate losses, or outputs of any sizes in their place."""
    torch.autograd.backward(losses, [torch.ones_like(t) for t in losses] if any(t.dim() for t in losses) else None)


def run_step(call: Callable[[], Any], loss_fn: LossFunction | None, outputs: str = HELD) -> Any:
    """Call a model, and differentiate its loss, the given loss of it, or all its outputs.

    Returns what the model did, or nothing if the step drops ``outputs`` once there is a loss.
    """
    result = call()
    losses = differentiated(result) if loss_fn is None else [loss_fn(result)]
    if not losses:
        raise UsageError("no output of the model requires gradients: there is no backward to run")
    if are_dropped(outputs, losses, loss_fn):
        result = None
    run_backward(losses)
    return result


class OutsideLoss(torch.autograd.Function):
    """Stands for a loss outside the model: ``tangents`` allocates a gradient for each output."""

    @staticmethod
    def forward(ctx: Any, tangents: Callable[[], list[torch.Tensor]], *outputs: torch.Tensor) -> torch.Tensor:
        """Return a scalar that depends on the outputs."""
        ctx.tangents = tangents
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Any) -> Any:
        """Return the gradients of the outputs."""
        return None, *ctx.tangents()


def static_bytes(model: nn.Module, inputs: Sequence[torch.Tensor], *, alignment_bytes: int) -> dict[str, int]:
    """Return the bytes of ``parameters``, ``buffers`` and ``inputs`` before the step, each storage once."""
    seen: set[int] = set()
    groups = {"parameters": model.parameters(), "buffers": model.buffers(), "inputs": inputs}
    return {kind: new_bytes(tensors, seen, alignment_bytes) for kind, tensors in groups.items()}


def new_bytes(tensors: Iterable[torch.Tensor], seen: set[int], alignment_bytes: int = 1) -> int:
    """Return the bytes of the storages that were not seen before, and note them as seen."""
    total = 0
    for tensor in tensors:
        if (storage := storage_id(tensor)) not in seen:
            seen.add(storage)
            total += round_up(in_memory(tensor).untyped_storage().nbytes(), alignment_bytes)
    return total


@contextmanager
def placed(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Place a model on the meta device where its other inputs are, else on an accelerator, else on the CPU.

    Gives the inputs, those on the meta device placed too. The model has its own tensors back when the context ends.
    Inputs on the meta device for a model that is not there are left alone: they are a mistake, and checked elsewhere.
    """
    if not any(tensor.is_meta for tensor in state_of(model).values()):
        yield inputs
        return
    on_meta = {id(t): t for t in (*state_of(model).values(), *inputs.tensors()) if t.is_meta}
    given = next((t.device for t in inputs.tensors() if not t.is_meta), None)
    device = given or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with fake_mode():
        there = {key: of_its_kind(tensor, device) for key, tensor in on_meta.items()}
    state = {name: there[id(tensor)] for name, tensor in state_of(model).items() if id(tensor) in there}
    with other_state(model, state):
        yield inputs.map_tensors(lambda tensor: there.get(id(tensor), tensor))


def of_its_kind(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return what :func:`alike` does, as a parameter if the tensor is one."""
    made = alike(tensor, device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def alike(tensor: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a leaf that lies in memory as a tensor does, by default on its device, of any numbers."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return made.requires_grad_(tensor.requires_grad)
