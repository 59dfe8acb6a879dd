"""Lets modules run something else in place of their ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from planner.capture.torch_internals import install_call, installed_call


@contextmanager
def forwards(replacing: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run something else in place of their ``forward``; their hooks stay around it.

    Code that a module's own ``compile()`` made is of its ``forward``, and does not run meanwhile.
    """
    before = {module: vars(module).get("forward") for module in replacing}
    compiled = {module: call for module in replacing if (call := installed_call(module)) is not None}
    for module in compiled:
        install_call(module, None)
    for module, forward in replacing.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, call in compiled.items():
            install_call(module, call)
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
