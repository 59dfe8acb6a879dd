"""Studies of one model at many input sizes, from one capture with symbolic sizes where possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from planner.analysis.study import Study
from planner.capture.branches import OtherBranchError
from planner.capture.inputs import Inputs, LossFunction, check_plannable, varying_dimensions
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import IsolatedCall, Stopped, loss_outputs
from planner.capture.state_restore import random_states_kept
from planner.capture.symbolic import OtherProgramError, at_sizes
from planner.capture.torch_internals import call_implementation, with_symbolic_sizes
from planner.errors import CaptureError
from planner.session.eager_study import study_eager, with_eager
from planner.session.step import Options, captured, elsewhere_for, lower_as_run, study_lowered, with_loss
from planner.session.step_planning import chunked

Program = tuple[JointGraph, Sequence[Any]]
"""A symbolic joint graph, and its inputs."""


class StudiesBySize:
    """Studies of a model's step at several input sizes.

    If only one size is expected, it is captured as it is. Otherwise one symbolic capture serves all sizes: with numbers
    in place of symbols it is what a capture at that size gives. A size that its guards exclude (often a batch of one)
    is captured by itself.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model, self._options = model, options
        self._sizes: list[list[torch.Size]] = []
        """Sizes of inputs that were or will be asked about."""
        self._call: IsolatedCall | None = None
        """The symbolic capture."""
        self._may_vary = True

    def are_of(self, other: nn.Module) -> bool:
        """Whether another model has equal tensor shapes and plain attributes, so that its step is the same."""
        return _make(self._model) == _make(other)

    def expect(self, others: Iterable[Inputs]) -> None:
        """Announce inputs that will be asked about; one of each varying dimension is enough."""
        self._sizes += map(_sizes_of, others)

    def at(self, inputs: Inputs, loss_fn: LossFunction | None = None, *, beside_eager: bool = False) -> Study:
        """Return the study of the step for these inputs; CaptureError if it cannot be captured.

        Eager's own step is recorded only with ``beside_eager``.
        """
        model = self._model
        options = with_loss(model, self._options, loss_fn, inputs)
        if options.runtime.name == "modules":
            return study_eager(model, inputs, options)
        check_plannable(model, inputs)
        if beside_eager:
            options = with_eager(model, options, inputs)
        program = self._program(inputs, options)
        joint = captured(model, inputs, options) if program is None else at_sizes(*program)
        step = lower_as_run(model, joint, options)
        if isinstance(options.runtime.chunk, int) and options.runtime.chunk != 1:
            step = chunked(model, step, options.runtime.chunk, options)
        return study_lowered(model, step, options)

    def _program(self, inputs: Inputs, options: Options) -> Program | None:
        """Return the symbolic program that serves these inputs, or None."""
        is_first = not self._sizes
        self._sizes.append(_sizes_of(inputs))
        if is_first or not self._may_vary:
            return None
        try:
            return self._of_symbols(inputs, options)
        except CaptureError:
            self._may_vary = False  # it is the symbols that cannot be captured
            return None

    def _of_symbols(self, inputs: Inputs, options: Options) -> Program | None:
        """Capture these inputs with symbols, or reuse that capture; None if its guards exclude them."""
        varying = varying_dimensions(inputs, self._sizes)
        if not varying or min(tensor.shape[d] for tensor, dimensions in varying for d in dimensions) < 2:
            return None  # torch takes a size of one for a number
        try:
            with random_states_kept(), torch.enable_grad(), with_symbolic_sizes(varying):
                if self._call is not None:
                    self._call.known(inputs.args, inputs.kwargs)
                else:
                    self._call = self._new_call(options)
                    self._call(*inputs.args, **inputs.kwargs)
        except Stopped as stopped:
            joint, *given = stopped.args
            return (joint, *given) if given else None
        except (OtherProgramError, OtherBranchError):
            pass
        return None

    def _new_call(self, options: Options) -> IsolatedCall:
        options.search.tell("capturing forward and backward for all sizes")
        return IsolatedCall(
            self._model,
            call_implementation(self._model),
            _stop,
            make_program=_stop,
            elsewhere=elsewhere_for(self._model, options),
            choose_outputs=partial(loss_outputs, loss=options.loss),
        )


def _sizes_of(inputs: Inputs) -> list[torch.Size]:
    return [tensor.shape for tensor in inputs.tensors()]


def _make(model: nn.Module) -> list[Any]:
    plain = (bool, int, float, str, tuple, list)
    return [
        *((name, t.shape, t.dtype) for name, t in (*model.named_parameters(), *model.named_buffers())),
        *(
            (name, [(key, x) for key, x in vars(module).items() if isinstance(x, plain) and not key.startswith("_")])
            for name, module in model.named_modules()
        ),
    ]


def _stop(*captured: Any) -> NoReturn:
    """Stop with what was captured: a joint graph, and its inputs if it is symbolic."""
    raise Stopped(*captured)
