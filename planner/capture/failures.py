"""Explain in one line, with the line of user code, why torch could not capture a model."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from planner.capture.fake_internals import without_logs_of_errors
from planner.capture.model_facts import sharded_inside
from planner.capture.provenance import is_library, short_path
from planner.capture.torch_internals import TorchDynamoException, Unsupported, depends_on_data
from planner.errors import CaptureError, ForwardError, PlannerError

# Torch 2.11 gives the message as a constant of Dynamo's.
_RAISED = re.compile(r"(got|raised exception) (?P<kind>\w+)\((\[\w+\(str: )?(?P<quote>['\"])(?P<text>.*?)(?P=quote)\)")

_CULPRIT = re.compile(
    r"Developer debug context: (?:module: .*?, qualname: |builtin )?(?P<name>[\w.]+)(?:$| \[|,)", re.MULTILINE
)
"""What Dynamo could not follow, where it names that by one word."""

_NOT_BOUND = "failed to bind arguments"
"""What Dynamo says of a call that the function called does not take."""

_MEETS_TRANSFORM = re.compile("TensorWrapper|_fw_primal|functorch transform")
"""What torch says where its transforms meet a capture; it asks for a bug report, too."""
_IN_FORWARD_MODE = "forward-mode differentiation inside it (torch.func.jvp) cannot be planned: leave that unwrapped"

_FAILS = "the forward of {} fails: {}{}"
_FAILS_IN_DYNAMO = "the forward of {} fails as Dynamo follows it: {}{}"
"""Python is Dynamo's own there, and may fail where Python does not."""
_NOT_ONE_GRAPH = "{} cannot be captured as one graph: {}{}"
_ON_DATA = "what it runs depends on data"


@contextmanager
def explain_failures(model: nn.Module) -> Iterator[None]:
    """Turn what Dynamo and AOTAutograd raise into a :class:`CaptureError` of one line."""
    try:
        with without_logs_of_errors():
            yield
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None)
        cause = error.__cause__ or inner
        if isinstance(cause, PlannerError):
            raise cause from error
        reason = first_line(error) if inner is None else in_one_line(inner)
        problem = _FAILS
        if depends_on_data(error):
            problem, reason = _NOT_ONE_GRAPH, _ON_DATA
        elif raised := _RAISED.search(f"{error} {cause}"):
            reason = f"{raised['kind']}: {raised['text']}"
            reason = _IN_FORWARD_MODE if _MEETS_TRANSFORM.search(reason) else reason
            problem = _FAILS if raised[1] == "got" else _FAILS_IN_DYNAMO
        elif isinstance(error, Unsupported) and isinstance(cause, TypeError) and _NOT_BOUND in reason:
            reason = in_one_line(cause)
        elif isinstance(error, Unsupported):
            problem = _NOT_ONE_GRAPH
            if unit := sharded_inside(model):
                reason = f"{unit} is sharded by itself, inside of a block: runtime='modules' plans such a model"
            elif (culprit := _CULPRIT.search(str(error))) and culprit["name"].startswith("Random."):
                # Dynamo would draw it in another precision, so it may not: see dynamo_settings.
                reason = f"it computes with a number that it draws from Python's random state ({culprit['name']})"
            elif "Tensor.requires_grad_()" in reason:
                reason += " on an input: call it before the model, or on a copy, x.detach().requires_grad_()"
            elif culprit:
                reason += f": {culprit['name']}"
        raise _explained(problem, model, reason, error) from error


@contextmanager
def explain_forward(model: nn.Module) -> Iterator[None]:
    """Turn whatever a forward raises while it is captured into a :class:`CaptureError` of one line."""

    def explained(error: Exception) -> CaptureError:
        problem, reason = _FAILS, in_one_line(error)
        if depends_on_data(error):
            problem, reason = _NOT_ONE_GRAPH, _ON_DATA
        return _explained(problem, model, reason, error)

    with failing_as(explained), explain_failures(model):
        yield


@contextmanager
def failing_as(explained: Callable[[Exception], PlannerError]) -> Iterator[None]:
    """Turn whatever is raised, but for errors of ours, into one of these."""
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        raise explained(error) from error


def _explained(problem: str, model: nn.Module, reason: str, error: BaseException) -> CaptureError:
    kind = ForwardError if problem in (_FAILS, _FAILS_IN_DYNAMO) else CaptureError
    return kind(problem.format(type(model).__name__, reason, raised_at(error)))


def raised_at(error: BaseException) -> str:
    """Name the user's line that an error came from, or nothing."""
    # Dynamo keeps the lines that it was tracing.
    for stack in (getattr(error, "real_stack", None), traceback.extract_tb(error.__traceback__)):
        if frames := [frame for frame in stack or () if not is_library(frame.filename)]:
            return f" (at {short_path(frames[-1].filename)}:{frames[-1].lineno})"
    return ""


def first_line(error: BaseException | str) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """Name an error and give the first line of what it says."""
    first = first_line(error)
    if _MEETS_TRANSFORM.search(first):
        return _IN_FORWARD_MODE
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
