"""Runs one eager step to record it, without data where the program allows that, and undoes what it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from planner.capture.inputs import Inputs, OutsideLoss, run_backward, state_of, tensors_in
from planner.capture.joint_capture import is_fake, mode_of
from planner.capture.operands import is_opaque
from planner.capture.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    call_implementation,
    calling,
    installed_call,
    other_state,
)
from planner.errors import CaptureError, PlannerError


def record(model: nn.Module, inputs: Inputs, *, has_loss: bool, attention: Attention | None = None) -> Trace:
    """Record one training step: without data where the program allows that, else for real.

    The model is left as it was, its gradients, buffers, attributes and the random state included. Without a loss
    outside the model what that returns is differentiated. ``attention`` stands in for
    ``scaled_dot_product_attention`` where the step is recorded without data. A CaptureError says that the step fails,
    or that nothing in it requires gradients; a UsageError that the model calls ``torch.utils.checkpoint`` itself.
    """
    follow = partial(_record, model, inputs, has_loss=has_loss)
    try:
        misses = FakeTensorMode.cache_info().misses
        trace = follow(attention=attention)
        if FakeTensorMode.cache_info().misses > misses:
            # What fake tensors compute for the first time they hold on to, and autograd copies it for that.
            trace = follow(attention=attention)
        if is_fake(model) or not any(is_opaque(run.node.target) for run in trace.runs):
            return trace
    except PlannerError:
        raise
    except Exception as error:
        if is_fake(model):
            raise _failed(model, error, "; if it depends on data, build the model for real") from error
    try:
        return follow(real=True)
    except PlannerError:
        raise
    except Exception as error:
        raise _failed(model, error) from error


def _failed(model: nn.Module, error: Exception, hint: str = "") -> CaptureError:
    return CaptureError(f"a step of {type(model).__name__} fails: {in_one_line(error)}{raised_at(error)}{hint}")


def _record(
    model: nn.Module, inputs: Inputs, *, has_loss: bool, real: bool = False, attention: Attention | None = None
) -> Trace:
    state = state_of(model)
    known = [*state.values(), *inputs.tensors()]
    mode = mode_of(known)
    with nullcontext() if real else mode:
        recorder = Recorder(mode, EngineSums(known[0].device))
    masking = masking_of(model, inputs)
    with _put_back(model), ExitStack() as following:
        for name, module in model.named_modules():
            if name and installed_call(module) is None:  # one that is compiled already stays whole
                following.enter_context(calling(module, partial(recorder.call, name, module)))
        recorder.resident((list(state.values()), inputs.args, inputs.kwargs))
        if real:
            _step(recorder, model, list(model.parameters()), inputs, has_loss)
        else:
            twins = {id(t): t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in state.values()}
            parameters = [twins[id(p)] for p in model.parameters()]
            inputs = inputs.map_tensors(lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t))
            recorder.resident((list(twins.values()), inputs.args, inputs.kwargs))
            in_their_place = other_state(model, {name: twins[id(tensor)] for name, tensor in state.items()})
            with as_with_data(masking), InPlaceOfAttention(attention), mode, in_their_place:
                _step(recorder, model, parameters, inputs, has_loss)
    recorder.trace.is_real = real
    return recorder.trace


def _step(
    recorder: Recorder, model: nn.Module, parameters: Sequence[torch.Tensor], inputs: Inputs, has_loss: bool
) -> None:
    with torch.enable_grad(), recorder, saved_tensors_hooks(recorder.pack, recorder.unpack):
        outputs = call_implementation(model)(*inputs.args, **inputs.kwargs)
        recorder.trace.backward = recorder.trace.tangents = recorder.now
        recorder.trace.returned_cache = getattr(outputs, "past_key_values", None) is not None
        _backward(recorder, outputs, has_loss)
        recorder.mark(outputs, "output")
        recorder.finish()
        recorder.mark([p.grad for p in [*parameters, *inputs.tensors()]], "gradient")


def _backward(recorder: Recorder, outputs: Any, has_loss: bool) -> None:
    tensors = [t for t in tensors_in(outputs) if t.requires_grad]
    recorder.sums.watch(tensors)
    if not tensors:
        raise CaptureError("nothing of the model needs a backward: no output requires gradients")
    if all(t.dim() for t in tensors):
        recorder.trace.outside_bytes = sum(t.numel() * t.element_size() for t in tensors)
    if has_loss:
        floats = [t for t in tensors if t.is_floating_point()]
        like = [(t.shape, t.dtype, t.device) for t in floats]

        def tangents() -> list[torch.Tensor]:
            made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            recorder.trace.tangents = recorder.now
            return made

        value = recorder.stand_in(OutsideLoss.apply(tangents, *floats))  # type: ignore[no-untyped-call]
        torch.autograd.backward([value], [recorder.stand_in(torch.ones_like(value))])
    else:
        run_backward(outputs, None)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Undo what a step does to a model: gradients, values of buffers, attributes, random state."""
    registries = [d for m in model.modules() for d in (vars(m), *vars(m).values()) if isinstance(d, dict)]
    kept = [(registry, dict(registry)) for registry in registries]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for registry, entries in kept:
            registry.clear()
            registry.update(entries)
        with torch.no_grad():
            for buffer, before in buffers:
                if not isinstance(buffer, FakeTensor) and not torch.equal(buffer, before):
                    buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
