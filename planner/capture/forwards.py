"""Lets modules run something else in place of their ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forwards(replacing: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run something else in place of their ``forward``; their hooks stay around it."""
    before = {module: vars(module).get("forward") for module in replacing}
    for module, forward in replacing.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
