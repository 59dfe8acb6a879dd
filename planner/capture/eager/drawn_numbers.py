"""Single numbers that a forward draws from torch's random state, and then looks at: which layers it drops, say.

Without data nobody could look at them. So they are drawn for real, as they would be: a step is then recorded without
data although they decide what runs, and other steps can be recorded with other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planner.capture.fake_internals import with_its_number
from planner.capture.joint import draws
from planner.capture.torch_internals import FakeTensor
from planner.capture.trees import tensors_in


class DrawnNumbers:
    """Follows them through a step that is recorded."""

    def __init__(self) -> None:
        self.decide = False
        """Whether the program looked at one."""
        self._storages: set[int] = set()

    def drawn(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the result of a call, with its number if the call draws one on the host."""
        if isinstance(result, FakeTensor) and _is_number(result) and draws(function, args, kwargs):
            return result if tensors_in((args, kwargs)) else with_its_number(result, function, args, kwargs)
        return result

    def follow(
        self, is_random: bool, reads: Sequence[int], makes: Sequence[int], results: Sequence[torch.Tensor]
    ) -> None:
        """Note what a call made of drawn numbers, given the storages that it read and made."""
        if not (self._storages.issuperset(reads) if reads else is_random):
            return
        self.decide |= not results
        if all(map(_is_number, results)):
            self._storages.update(makes)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.device.type == "cpu"
