"""What a person asks for, in groups: a keyword of the public functions is a field of one of these, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.common.limits import Progress, SolveLimits
from planner.common.units import Size, is_share
from planner.errors import UsageError

if TYPE_CHECKING:
    from cost_models.measured import Profile

LEAST_BYTES = 2**20
"""Smaller values stay on the device: a transfer of less takes about as long to start as to run."""

Group = TypeVar("Group")


def picked(kind: type[Group], asked: Mapping[str, Any]) -> Group:
    """Make a group of options of the keywords that are its own.

    Examples
    --------
    >>> picked(Budget, {"budget": "60%", "solver": "ilp"}).budget
    '60%'
    """
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: asked[name] for name in names if name in asked})


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What memory a step may take.

    Parameters
    ----------
    budget : int, float or str, optional
        What the whole device may hold; ``"60%"`` is of the unplanned peak.
    activation_budget : int, float or str, optional
        In its place, what the step may allocate on top of what is resident; ``"60%"`` is of what the unplanned step
        allocates.
    at_least_bytes : int
        What the whole device may hold even if the budget comes to less; see :meth:`after`.
    """

    budget: Size | None = None
    activation_budget: Size | None = None
    at_least_bytes: int = 0

    @property
    def is_given(self) -> bool:
        """Whether there is one at all."""
        return self.budget is not None or self.activation_budget is not None

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage of the unplanned step."""
        return is_share(self.budget) or is_share(self.activation_budget)

    def check(self, *, or_none: bool = False) -> None:
        """Refuse two budgets, and none where one is needed."""
        both = None not in (self.budget, self.activation_budget)
        if both or not (self.is_given or or_none):
            raise UsageError("give one of budget (the whole device) and activation_budget (on top of what is resident)")

    def after(self, budget_bytes: int) -> Budget:
        """Give the budget for other input sizes: what a percentage came to is not taken back for smaller ones."""
        return replace(self, at_least_bytes=max(self.at_least_bytes, budget_bytes)) if self.is_share else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(SolveLimits):
    """How a plan is looked for.

    Parameters
    ----------
    time_limit_seconds, deterministic, seed, told
        See :class:`~planner.common.limits.SolveLimits`.
    solver : str
        Name of a solver; ``"auto"`` picks.
    compare : bool
        Whether to find what the report shows beside the plan: the usual ways of checkpointing, the smallest peak.
    progress : callable, optional
        Told in short lines how it stands.
    """

    time_limit_seconds: float = 10.0
    solver: str = "auto"
    compare: bool = True
    progress: Progress | None = None

    def tell(self, line: str) -> None:
        """Say how it stands."""
        if self.progress is not None:
            self.progress(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What may wait in the host's memory between forward and backward.

    Parameters
    ----------
    offload : bool
        Whether anything may.
    host_budget : int, float or str, optional
        What it may take there; by default half of what this machine has.
    offload_at_least : int, float or str
        Values below this size stay on the device.
    offload_lossy : bool
        Whether values of float32 wait there rounded to bfloat16.

    Raises
    ------
    UsageError
        If nothing is offloaded that could be rounded.
    """

    offload: bool = False
    host_budget: Size | None = None
    offload_at_least: Size = LEAST_BYTES
    offload_lossy: bool = False

    def __post_init__(self) -> None:
        if self.offload_lossy and not self.offload:
            raise UsageError("offload_lossy rounds what is offloaded: give offload too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a plan is made for, and what says how long operations take there.

    Parameters
    ----------
    device : str, optional
        Name in the table of devices, or a device file; by default the device that the model is on.
    cost_model : str
        Name of a cost model.
    profile : Profile, optional
        Costs that were recorded before.
    """

    device: str | None = None
    cost_model: str = "roofline"
    profile: Profile | None = None
