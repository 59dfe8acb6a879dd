"""Install a planned step as a module's call, also inside code that others compile.

Dynamo follows a module's ``forward``, whatever was installed in place of its call. An attribute ``forward`` of the
module's own changes that: Dynamo has guards on it, so what was compiled before is compiled anew, and then goes through
the call. The attribute is there between calls, and away during them: in a call the model is captured as it is.
"""

from __future__ import annotations

import functools
import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from planner.capture import torch_internals as internals
from planner.capture.model_facts import compiled_parts, has_several_ranks
from planner.capture.state_restore import put_back, written_back
from planner.capture.trees import tensors_in
from planner.errors import ForwardError, UsageError

_OWN_GRAPHS = (
    "a model wrapped by planner.auto_wrap runs its own graphs, which torch.compile cannot trace: leave out "
    "fullgraph=True for a graph break there, or do not wrap, and compile with planner.backend(...)"
)


def install_planned_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make ``module(...)`` run ``call``, never traced by an outer compilation.

    A compiled function that calls the module has a graph break there, and is refused under ``fullgraph=True``. Without
    gradients it takes the module in as it is. Threads that call the module take turns.
    """
    remove_planned_call(module)
    lock = threading.RLock()

    @functools.partial(torch.compiler.disable, reason=_OWN_GRAPHS)
    def untraced(*args: Any, **kwargs: Any) -> Any:
        if _here.wholes:
            return internals.call_implementation(module)(*args, **kwargs)
        with lock, as_its_class(module), parts_run_as_they_are():
            try:
                with internals.dispatch_keys_kept(), _frames_let_go():
                    return call(*args, **kwargs)
            except ForwardError as failure:
                _raise_own_error(module, args, kwargs, failure)
                raise

    def planned(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled():
            return internals.call_implementation(module)(*args, **kwargs)
        return untraced(*args, **kwargs)

    planned.call = call  # type: ignore[attr-defined]
    internals.install_call(module, internals.not_compiled_alone(planned))
    _mark(module)


class _Here(threading.local):
    wholes = 0
    """How many models are at work, each with all its parts."""


_here = _Here()


def parts_run_as_they_are() -> AbstractContextManager[Any]:
    """Run wrapped parts without their own plans within the context: they belong to the plan of the whole."""
    return patch.object(_here, "wholes", _here.wholes + 1)


@contextmanager
def parts_as_written(model: nn.Module) -> Iterator[None]:
    """Run the parts of a model without their own plans and uncompiled within the context.

    Code that a part's own ``compile()`` makes reads memory, and where that is fake there is none.
    """
    with calling(dict.fromkeys(map(model.get_submodule, compiled_parts(model)))), parts_run_as_they_are():
        yield


@contextmanager
def _frames_let_go() -> Iterator[None]:
    """Free at once what the frames below an error hold: guards that set torch's state when they go."""
    try:
        yield
    except ForwardError as error:
        failure: BaseException | None = error
        while failure is not None:
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__cause__ or failure.__context__
        gc.collect()
        raise


def _raise_own_error(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], failure: ForwardError) -> None:
    """Raise the module's own error, if its own call fails: a training loop may catch that.

    It is called without gradients first, which takes little memory, and is undone if nothing is raised. With several
    ranks it is not called: it might wait for others that are elsewhere.
    """
    if has_several_ranks():
        return
    own_call = functools.partial(internals.call_implementation(module), *args, **kwargs)
    given = (args, kwargs)
    with suppress(Exception):
        with put_back(module, given), written_back([*module.parameters(), *tensors_in(given)]), torch.no_grad():
            own_call()
        return
    try:
        own_call()  # which leaves what it did before it failed, as without a plan
    except Exception as error:
        error.add_note(f"planner: {failure}")
        raise error from None


def planned_call(module: nn.Module) -> Any:
    """Return what :func:`install_planned_call` was given, or None."""
    return getattr(internals.installed_call(module), "call", None)


def remove_planned_call(module: nn.Module) -> None:
    """Restore the module's own call, unless something else was installed meanwhile."""
    if _is_marked(module):
        del vars(module)["forward"]
        _marked.discard(module)
    if planned_call(module) is not None:
        internals.install_call(module, None)


_marked: WeakSet[nn.Module] = WeakSet()
"""Modules with an attribute ``forward`` of ours."""


@contextmanager
def as_its_class(model: nn.Module) -> Iterator[None]:
    """Trace a model and its wrapped parts unplanned within the context."""
    parts = model.modules() if len(_marked) > 1 else [model]
    marks = [(vars(part), vars(part).pop("forward")) for part in parts if part in _marked and _is_marked(part)]
    try:
        yield
    finally:
        for attributes, mark in marks:
            attributes.setdefault("forward", mark)


def _mark(module: nn.Module) -> None:
    if "forward" in vars(module):
        return  # one of the user's own does as well

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._compiled_call_impl  # a copy has none
        # While the model is captured, code that others put around this may run it: accelerate's does for autocast.
        if call is not None and torch.is_grad_enabled():
            if not hasattr(call, "call"):
                _check_not_compiled(self)
            elif not torch.compiler.is_dynamo_compiling() and not _here.wholes:
                _warn_of_forward(self)
        return type(self).forward(self, *args, **kwargs)

    forward.is_mark = True  # type: ignore[attr-defined]
    vars(module)["forward"] = MethodType(forward, module)
    _marked.add(module)


def _is_marked(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "is_mark", False)


@functools.partial(torch.compiler.disable, reason=_OWN_GRAPHS)
def _check_not_compiled(module: nn.Module) -> None:
    """Refuse a call that does not come through the planned one, because ``compile()`` took its place."""
    if planned_call(module) is None:
        raise UsageError(
            f"{type(module).__name__} was wrapped by planner.auto_wrap, and then compiled by its compile(), which runs "
            "no plan: leave compile() out, or unwrap, and call it with backend=planner.backend(budget=...)"
        )


def _warn_of_forward(module: nn.Module) -> None:
    """Warn of a ``forward`` that is called by itself: a call of the module runs it from torch's own file."""
    if traceback.extract_stack(limit=3)[0].filename != all_modules.__file__ and not internals.is_transformed():
        warnings.warn(
            f"{type(module).__name__}.forward() is called directly, which runs neither hooks nor the plan, and keeps "
            "no budget: call the model",
            stacklevel=3,
        )


@contextmanager
def forwards(replacing: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the ``forward`` of modules within the context; their hooks stay.

    Code that a module's own ``compile()`` made is of its ``forward``, and does not run meanwhile.
    """
    planned = dict.fromkeys(module for module in replacing if internals.installed_call(module) is not None)
    with calling(planned), ExitStack() as stack:
        for module, forward in replacing.items():
            held = vars(module)
            if "forward" in held:
                stack.callback(held.update, forward=held["forward"])
            else:
                stack.callback(held.pop, "forward")
            held["forward"] = forward
        yield


@contextmanager
def calling(calls: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """Let calls of modules run something else for as long as the context lasts: their own call where that is None."""
    with ExitStack() as stack:
        for module, call in calls.items():
            stack.callback(internals.install_call, module, internals.installed_call(module))
            internals.install_call(module, call)
        yield
