"""Runs one eager step to record it, without data where the program allows that, and undoes what it did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.cuda_attention import Attention, InPlaceOfAttention
from planner.capture.eager.trace import Recorder, Trace
from planner.capture.failures import in_one_line, raised_at
from planner.capture.hugging_face import as_with_data, masking_of
from planner.capture.inputs import Inputs, run_backward
from planner.capture.joint_capture import fake_mode, is_fake
from planner.capture.operands import is_opaque
from planner.capture.storages import tensors_in
from planner.capture.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    call_implementation,
    call_with,
    calling,
    installed_call,
)
from planner.errors import CaptureError, PlannerError


def record(model: nn.Module, inputs: Inputs, *, has_loss: bool, attention: Attention | None = None) -> Trace:
    """Record one training step: without data where the program allows that, else for real.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it was, its gradients, buffers, attributes and the random state included.
    has_loss : bool
        Whether a loss outside the model follows; otherwise what the model returns is differentiated.
    attention : callable, optional
        Stands in for ``scaled_dot_product_attention``, where the step is recorded without data.

    Raises
    ------
    CaptureError
        If the step fails, or nothing in it requires gradients.
    UsageError
        If the model calls ``torch.utils.checkpoint`` itself.
    """
    try:
        misses = FakeTensorMode.cache_info().misses
        trace = _record(model, inputs, has_loss=has_loss, real=False, attention=attention)
        if FakeTensorMode.cache_info().misses > misses:
            # What fake tensors compute for the first time they hold on to, and autograd copies it for that.
            trace = _record(model, inputs, has_loss=has_loss, real=False, attention=attention)
        if is_fake(model) or not any(is_opaque(run.node.target) for run in trace.runs):
            return trace
    except PlannerError:
        raise
    except Exception as error:
        if is_fake(model):
            raise _failed(model, error, "; if it depends on data, build the model for real") from error
    try:
        return _record(model, inputs, has_loss=has_loss, real=True)
    except PlannerError:
        raise
    except Exception as error:
        raise _failed(model, error) from error


def _failed(model: nn.Module, error: Exception, hint: str = "") -> CaptureError:
    return CaptureError(f"a step of {type(model).__name__} fails: {in_one_line(error)}{raised_at(error)}{hint}")


def _record(
    model: nn.Module, inputs: Inputs, *, has_loss: bool, real: bool, attention: Attention | None = None
) -> Trace:
    state: dict[str, torch.Tensor] = dict(
        itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )
    known = [t for t in [*state.values(), *inputs.tensors()] if isinstance(t, FakeTensor)]
    mode = known[0].fake_mode if known else fake_mode()
    device = next((t.device for t in [*state.values(), *inputs.tensors()]), torch.device("cpu"))
    with nullcontext() if real else mode:
        recorder = Recorder(mode, EngineSums(device))
    masking = masking_of(model, inputs)
    with _put_back(model), _followed(model, recorder):
        if real:
            call: Callable[..., Any] = call_implementation(model)
            parameters: Sequence[torch.Tensor] = list(model.parameters())
        else:
            twins = {id(t): t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in state.values()}
            named = {name: twins[id(tensor)] for name, tensor in state.items()}
            inputs = inputs.map_tensors(lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t))
            call = partial(call_with, model, named)
            parameters = [twins[id(p)] for p in model.parameters()]
            recorder.resident(list(twins.values()))
        recorder.resident((list(state.values()), inputs.args, inputs.kwargs))
        if real:
            _step(recorder, call, parameters, inputs, has_loss)
        else:
            with as_with_data(masking), InPlaceOfAttention(attention), mode:
                _step(recorder, call, parameters, inputs, has_loss)
    return Trace(
        runs=recorder.events,
        storages=recorder.storages,
        saves=recorder.saves,
        calls=recorder.calls,
        backward=recorder.backward,
        tangents=max(recorder.backward, recorder.tangents),
        is_real=real,
        outside_bytes=recorder.outside_bytes,
        returned_cache=recorder.returned_cache,
    )


def _step(
    recorder: Recorder, call: Callable[..., Any], parameters: Sequence[torch.Tensor], inputs: Inputs, has_loss: bool
) -> None:
    with torch.enable_grad(), recorder, saved_tensors_hooks(recorder.pack, recorder.unpack):
        outputs = call(*inputs.args, **inputs.kwargs)
        recorder.backward = recorder.now
        recorder.returned_cache = getattr(outputs, "past_key_values", None) is not None
        _backward(recorder, outputs, has_loss)
        recorder.mark(outputs, "output")
        recorder.finish()
        recorder.mark([p.grad for p in [*parameters, *inputs.tensors()]], "gradient")


class _OutsideLoss(torch.autograd.Function):
    """Stands for a loss that is not seen: it gives each output a gradient, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.recorder = recorder
        ctx.like = [(t.shape, t.dtype, t.device) for t in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Any) -> Any:
        gradients = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.recorder.tangents = ctx.recorder.now
        return (None, *gradients)


def _backward(recorder: Recorder, outputs: Any, has_loss: bool) -> None:
    tensors = [t for t in tensors_in(outputs) if t.requires_grad]
    recorder.sums.watch(tensors)
    if not tensors:
        raise CaptureError("nothing of the model needs a backward: no output requires gradients")
    if all(t.dim() for t in tensors):
        recorder.outside_bytes = sum(t.numel() * t.element_size() for t in tensors)
    if has_loss:
        floats = (t for t in tensors if t.is_floating_point())
        value = recorder.stand_in(_OutsideLoss.apply(recorder, *floats))  # type: ignore[no-untyped-call]
        torch.autograd.backward([value], [recorder.stand_in(torch.ones_like(value))])
    else:
        run_backward(outputs, None)


@contextmanager
def _followed(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the recorder see the calls of all modules; one that is compiled already stays whole."""
    with ExitStack() as stack:
        stack.enter_context(calling(model, call_implementation(model)))
        for name, module in model.named_modules():
            if name and installed_call(module) is None:
                stack.enter_context(calling(module, partial(recorder.call, name, module)))
        yield


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Undo what a step does to a model: gradients, values of buffers, attributes, random state."""
    modules = [(m, dict(m.__dict__), [(d, dict(d)) for d in _registries(m)]) for m in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, attributes, registries in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for registry, entries in registries:
                registry.clear()
                registry.update(entries)
        with torch.no_grad():
            for buffer, before in buffers:
                if not isinstance(buffer, FakeTensor) and not torch.equal(buffer, before):
                    buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [value for value in module.__dict__.values() if isinstance(value, dict)]
