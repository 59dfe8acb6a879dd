"""Every error this project raises on purpose, under one root.

Catch :class:`PlannerError` to catch them all. The message is one line that says what is
wrong, where, and what to do; ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from typing import Any


class PlannerError(Exception):
    """Root of the hierarchy."""

    exit_code = 1


class UsageError(PlannerError, ValueError):
    """What the caller passed is wrong: a size, a name, an option, example inputs."""

    exit_code = 2


class PlanFileError(UsageError):
    """A plan file is damaged, of an unknown schema, or not a plan at all."""


class PlanMismatchError(UsageError):
    """A plan belongs to another model, other shapes or other versions."""


class ProfileFileError(UsageError):
    """A profile is damaged, of an unknown schema, or not a profile at all."""


class ProfileMismatchError(UsageError):
    """A profile belongs to another step, device or version."""


class DeviceFileError(UsageError):
    """A device file is damaged, or describes no device."""


class InfeasibleBudgetError(PlannerError):
    """No plan keeps the budget, or none was found that does."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        minimum_feasible_peak_bytes: int,
        operation: str,
        is_proven: bool = False,
        lower_bound_seconds: float = 0.0,
        lowest: Any = None,
    ) -> None:
        super().__init__(message)
        self.minimum_feasible_peak_bytes = minimum_feasible_peak_bytes
        """Smallest peak for which a plan is known, everything on the device included."""
        self.operation = operation
        """Operation at which that peak occurs."""
        self.is_proven = is_proven
        """Whether it is proven that no plan in the base order keeps the budget."""
        self.lower_bound_seconds = lower_bound_seconds
        """Proven lower bound: a plan that keeps the budget, if there is one, recomputes for at least this long."""
        self.lowest = lowest
        """The :class:`planner.ir.schedule.Schedule` with the lowest known peak, where it is known."""

    def facts(self) -> dict[str, Any]:
        """Return what it says in numbers, as plain data."""
        known = ("minimum_feasible_peak_bytes", "operation", "is_proven", "lower_bound_seconds")
        return {name: getattr(self, name) for name in known}

    def but(self, **changed: Any) -> InfeasibleBudgetError:
        """Return the same error with other facts."""
        return InfeasibleBudgetError(str(self), **{**self.facts(), "lowest": self.lowest, **changed})


class HostBudgetError(InfeasibleBudgetError):
    """No plan keeps the budget with so little of the host's memory."""

    def __init__(self, message: str, *, host_budget_bytes: int, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.host_budget_bytes = host_budget_bytes
        """Smallest budget of the host for which a plan is known."""


class CaptureError(PlannerError):
    """The model cannot be captured as one forward and backward graph."""

    exit_code = 4


class ForwardError(CaptureError):
    """The model's own forward fails while it is captured or recorded; the cause says how."""


class NoBackwardError(CaptureError):
    """Nothing that the model returns requires gradients."""


class UnsupportedModelError(CaptureError):
    """The model was captured, but holds something that cannot be planned without risk."""


class RuntimeUnsupportedError(PlannerError):
    """The wrapped model was asked for something planned graphs cannot do."""


class ScheduleError(PlannerError):
    """A schedule reads a value that is not there: a bug in whatever proposed it."""


class ClaimMismatchError(PlannerError):
    """A solver's claim and the simulation of its schedule differ: a bug in the solver."""


class SolverUnavailableError(UsageError):
    """A solver, or a library that it needs, is not installed."""
