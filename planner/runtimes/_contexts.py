"""What a checkpointed module runs under: in the forward, and when it runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.capture.eager.graph import keeps_statistics

Kept = Mapping[str, Sequence[int]]
"""For an operator, those of its calls within a module whose results are kept."""


def contexts(module: nn.Module, kept: Kept) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for the forward of a module, and one for its further runs."""
    if not kept:
        return nullcontext(), _Again(module, None)
    keeping, giving = create_selective_checkpoint_contexts(_Policy(kept))
    return _Only(kept, keeping), _Again(module, _Only(kept, giving))


class _Policy:
    """Counts the calls of each operator, and says which are kept."""

    def __init__(self, kept: Kept) -> None:
        self.kept = {operator: frozenset(occurrences) for operator, occurrences in kept.items()}
        self.called: Counter[tuple[bool, str]] = Counter()
        """Apart for both runs: up to torch 2.12 the second asks too."""

    def __call__(self, context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        called = (context.is_recompute, str(function))
        occurrence = self.called[called]
        self.called[called] += 1
        kept = occurrence in self.kept[str(function)]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


class _Only(TorchDispatchMode):
    """Lets one of torch's two modes see nothing but the operators of which something is kept.

    They refuse a second run that calls any operator more often than the first, as autocast does where a weight was
    cast before.
    """

    def __init__(self, kept: Kept, mode: Any) -> None:
        super().__init__()
        self.operators = frozenset(kept)
        self.mode = mode

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in self.operators:
            return self.mode.__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


class _Again(AbstractContextManager[None]):
    """Gives the second run what was kept, and lets no further run touch running statistics, but copies of them.

    What was kept is given once: a third run, as for a second backward, computes everything.
    """

    def __init__(self, module: nn.Module, giving: TorchDispatchMode | None) -> None:
        self.module = module
        self.giving = giving
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for part in filter(keeps_statistics, self.module.modules()):
            for name, buffer in part.named_buffers(recurse=False):
                self.stack.callback(setattr, part, name, buffer)
                setattr(part, name, buffer.clone())
        if self.giving is not None:
            self.stack.enter_context(self.giving)
            self.giving = None

    def __exit__(self, *raised: Any) -> None:
        self.stack.__exit__(*raised)
