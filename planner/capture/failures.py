"""What torch raises while it captures, said in one line: what is wrong, and at which line of the user's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from planner.capture.provenance import is_library, short_path
from planner.capture.torch_internals import TorchDynamoException, Unsupported, depends_on_data
from planner.errors import CaptureError, PlannerError

_RAISED = re.compile(r"(?:got|raised exception) (?P<kind>\w+)\((?P<quote>['\"])(?P<message>.*?)(?P=quote)\)")


@contextmanager
def explain_failures(model: nn.Module) -> Iterator[None]:
    """Turn what Dynamo and AOTAutograd raise into a :class:`CaptureError` of one line."""
    try:
        yield
    except TorchDynamoException as error:
        cause = error.__cause__ or getattr(error, "inner_exception", None)
        if isinstance(cause, PlannerError):
            raise cause from error
        name, where = type(model).__name__, _user_line(error)
        if raised := _RAISED.search(f"{error} {cause}"):
            raise CaptureError(f"the forward of {name} fails: {raised['kind']}: {raised['message']}{where}") from error
        raised_by = getattr(error, "inner_exception", None)
        reason = _first_line(error) if raised_by is None else in_one_line(raised_by)
        if depends_on_data(error):
            raise CaptureError(
                f"{name} cannot be captured as one graph: what it runs depends on data{where}"
            ) from error
        if isinstance(error, Unsupported):
            raise CaptureError(f"{name} cannot be captured as one graph: {reason}{where}") from error
        raise CaptureError(f"the forward of {name} fails: {reason}{where}") from error


@contextmanager
def explain_forward(model: nn.Module) -> Iterator[None]:
    """Turn whatever a forward raises while it is captured into a :class:`CaptureError` of one line."""
    try:
        with explain_failures(model):
            yield
    except PlannerError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the forward of {type(model).__name__} fails: {in_one_line(error)}{raised_at(error)}"
        ) from error


def in_one_line(error: BaseException) -> str:
    """Name an error and give the first line of what it says."""
    first = _first_line(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _user_line(error: BaseException) -> str:
    stack = getattr(error, "real_stack", None)
    frames = [f for f in stack or () if not is_library(f.filename)]
    return f" (at {short_path(frames[-1].filename)}:{frames[-1].lineno})" if frames else raised_at(error)


def raised_at(error: BaseException) -> str:
    """Name the user's line that an error came from, or nothing."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f" (at {short_path(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
