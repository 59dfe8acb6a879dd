"""Record one eager step, on fake tensors where the program allows it, and restore the program afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.autograd_accumulation import EngineSums
from planner.capture.eager.trace import Recorder, Trace
from planner.capture.failures import failing_as, in_one_line, raised_at
from planner.capture.fake_internals import is_without_data, mode_of, without_logs_of_errors
from planner.capture.hugging_face import as_with_data, masking_of
from planner.capture.inputs import Inputs, OutsideLoss, are_dropped, differentiated, run_backward, state_of
from planner.capture.model_facts import has_distributed_tensors, is_fake, units_of
from planner.capture.operands import is_opaque
from planner.capture.parallel_events import Gradients, UnitCalls
from planner.capture.planned_call import calling, forwards, parts_run_as_they_are
from planner.capture.state_restore import put_back, warn_of_what_is_kept, written_back
from planner.capture.target_device import TargetDevice, calls_of
from planner.capture.torch_internals import FakeTensor, call_implementation, installed_call, other_state
from planner.capture.trees import tensors_in
from planner.common.options import HELD, KEPT
from planner.errors import CaptureError, ForwardError, NoBackwardError, PlannerError
from planner.ir.static_memory import LossMemory


def record(model: nn.Module, inputs: Inputs, *, may_run: bool = True, **around: Any) -> Trace:
    """Record one training step: without data where the program allows that, else for real if it may run.

    The model is left as it was, its gradients, buffers, attributes and the random state included. ``around`` it are a
    ``loss`` outside the model (without one what that returns is differentiated), ``gradients`` that are there, and
    ``outputs``, which says whether all else that it returns is dropped before the backward; see
    :class:`planner.common.options.Training`. ``elsewhere`` is the device that the step is for, where that is not here
    and the step is recorded without data. A CaptureError says that the step fails, that it cannot be recorded without
    data, or that nothing in it requires gradients; a UsageError that the model calls ``torch.utils.checkpoint`` itself.
    """
    # The backward of a recording ends where the model begins, whatever inputs and parameters were computed from.
    inputs = inputs.map_tensors(_as_leaf)
    computed = {path: _as_leaf(tensor) for path, tensor in state_of(model).items() if not tensor.is_leaf}
    with other_state(model, computed):
        return _Recording(model, inputs, **around).trace(may_run=may_run)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


@dataclass(frozen=True)
class _Recording:
    """Records a step, without data if possible, else with data."""

    model: nn.Module
    inputs: Inputs
    loss: LossMemory | None = None
    gradients: Gradients = field(default_factory=Gradients)
    elsewhere: TargetDevice | None = None
    outputs: str = HELD

    def trace(self, *, may_run: bool) -> Trace:
        """Record without data where the program allows that, else for real if it may run."""
        model, depends_on_data = self.model, False
        try:
            trace = self._without_data()
            if trace.repeats or has_distributed_tensors(model):
                # Fake kernels do that the first time only, and autograd copies such a result. DTensors find out the
                # first time how results are spread, by operators on tensors that do not exist.
                trace = self._without_data()
            if is_fake(model) or not any(is_opaque(run.node.target) for run in trace.runs):
                return trace
        except PlannerError:
            raise
        except Exception as error:
            depends_on_data = True
            if is_fake(model) or not may_run:
                hint = ""
                if units_of(model):
                    hint = "; a sharded model is recorded without data, so what it runs may not depend on data"
                elif is_fake(model):
                    hint = "; if it depends on data, build the model for real"
                raise CaptureError(self._failed(error) + hint) from error
        if not may_run:
            raise CaptureError(f"how much the kernels of {type(model).__name__} save is known only when they run")
        with failing_as(lambda error: ForwardError(self._failed(error))):
            return replace(self._recorded(real=True).trace, depends_on_data=depends_on_data)

    def _failed(self, error: Exception) -> str:
        return f"a step of {type(self.model).__name__} fails: {in_one_line(error)}{raised_at(error)}"

    def _without_data(self) -> Trace:
        recorder = self._recorded(real=False)  # whose own names for tensors are gone by now
        warn_of_what_is_kept(recorder.still_there, type(self.model).__name__)
        return recorder.trace

    def _recorded(self, *, real: bool) -> Recorder:
        model, inputs, state = self.model, self.inputs, state_of(self.model)
        known = [*state.values(), *inputs.tensors()]
        mode = mode_of(known)
        with nullcontext() if real else mode:
            recorder = Recorder(mode, EngineSums(known[0].device))
        masking = masking_of(model, inputs)
        with put_back(model, inputs), without_logs_of_errors(), parts_run_as_they_are(), ExitStack() as following:
            self._follow_calls(recorder, following)
            recorder.resident((list(state.values()), inputs.args, inputs.kwargs))
            if real:
                with written_back(known):
                    self._step(recorder, state, inputs)
            else:
                twins = {id(t): t if is_without_data(t) else mode.from_tensor(t) for t in state.values()}
                inputs = inputs.map_tensors(lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t))
                recorder.resident((list(twins.values()), inputs.args, inputs.kwargs))
                state = {name: twins[id(tensor)] for name, tensor in state.items()}
                with as_with_data(masking), calls_of(self.elsewhere), mode, other_state(model, state):
                    self._step(recorder, state, inputs)
        recorder.trace.is_real = real
        return recorder

    def _follow_calls(self, recorder: Recorder, following: ExitStack) -> None:
        units = {module: UnitCalls(unit.path, unit.modules) for unit in units_of(self.model) for module in unit.modules}
        for name, module in self.model.named_modules():
            if module in units:
                # Hooks gather its parameters around its forward, and that is what can run again.
                run = partial(recorder.call, name, module.forward) if name else module.forward
                gathered = partial(units[module].followed, recorder.turn, module, run)
                following.enter_context(forwards({module: gathered}))
            elif name and installed_call(module) is None:  # one that is compiled already stays whole
                following.enter_context(calling({module: partial(recorder.call, name, call_implementation(module))}))

    def _step(self, recorder: Recorder, state: Mapping[str, torch.Tensor], inputs: Inputs) -> None:
        model, trace = self.model, recorder.trace
        found, saving = self.gradients.followed(recorder, state), saved_tensors_hooks(recorder.pack, recorder.unpack)
        with torch.enable_grad(), recorder, found as trace.found, saving:
            outputs = call_implementation(model)(*inputs.args, **inputs.kwargs)
            torch.clear_autocast_cache()  # as the runtime does: see planner.runtimes.modules
            trace.backward = trace.tangents = recorder.now
            trace.returned_cache = getattr(outputs, "past_key_values", None) is not None
            outputs = tensors_in(outputs)
            recorder.mark(outputs, "output")
            losses = self._losses(recorder, outputs)
            if self.outputs == KEPT:
                trace.returned = list(recorder.numbers(outputs))
            if are_dropped(self.outputs, losses, self.loss):
                trace.returned = list(recorder.numbers([tensor for tensor in outputs if tensor.dim()]))
                outputs = [tensor for tensor in outputs if not tensor.dim()]
            _backward(recorder, losses, self.loss)
            recorder.finish()
            recorder.mark([t.grad for t in [*state.values(), *inputs.tensors()]], "gradient")
            trace.gradients = recorder.gradients_of(model.named_parameters())

    def _losses(self, recorder: Recorder, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs that the backward starts from."""
        tensors = [t for t in outputs if t.requires_grad]
        recorder.sums.watch(tensors)
        if not tensors:
            raise NoBackwardError("nothing of the model needs a backward: no output requires gradients")
        losses = differentiated(outputs, self.loss)
        if any(t.dim() for t in losses):
            recorder.trace.outside_bytes = sum(t.numel() * t.element_size() for t in losses)
        return losses


def _backward(recorder: Recorder, losses: list[torch.Tensor], loss: LossMemory | None) -> None:
    if loss is not None:
        like = [(t.shape, t.dtype, t.device) for t in losses]

        def tangents() -> list[torch.Tensor]:
            made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            recorder.trace.tangents = recorder.now
            losses.clear()  # the loss reads them, and nobody else may hold them
            return made

        value = recorder.stand_in(OutsideLoss.apply(tangents, *losses))  # type: ignore[no-untyped-call]
        torch.autograd.backward([value], [recorder.stand_in(torch.ones_like(value))])
    else:
        run_backward(losses)
