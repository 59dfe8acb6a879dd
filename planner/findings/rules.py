"""Rules, how they are applied, and the facts that they look at: modules, checkpoint calls and the captured step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.findings.finding import Finding, Severity
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module of the tree, as far as rules ask."""

    path: str
    """As ``named_modules`` has it, ``""`` for the model itself."""
    kind: str
    """Name of its class."""
    updates_statistics: bool = False
    """Whether each call changes running statistics: BatchNorm in training."""
    full_backward_hooks: bool = False
    checkpointing_on: bool = False
    """Whether it checkpoints itself: a wrapper, or a switch of Hugging Face's."""
    fills_cache: bool = False
    """Whether its configuration asks for keys and values to be cached."""
    sharded: bool = False
    """Whether it is a unit of FSDP."""

    @property
    def label(self) -> str:
        """Its path, or its class where it is the model itself."""
        return self.path or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCall:
    """One call of ``torch.utils.checkpoint.checkpoint`` that was seen in the forward."""

    region: str
    """The module that it runs, or the function's name."""
    reentrant: bool = False
    preserves_random_state: bool = True
    nested: bool = False
    """Whether another call was under way."""
    gets_gradient: bool = True
    """Whether a tensor among its arguments requires a gradient."""
    trainable: bool = True
    """Whether anything else that it reads does: a parameter."""
    draws: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    chooses: tuple[str, ...] = ()
    """Operations with their module: those that draw random numbers, write into parameters or buffers, and choose by
    rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured step, and a schedule of it: that of a plan, or the one without recompute."""

    problem: Problem
    schedule: Schedule
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """All that rules may look at; what is not known is left out."""

    modules: tuple[ModuleFacts, ...] = ()
    """In the order of ``named_modules``."""
    calls: tuple[CheckpointCall, ...] = ()
    """What was seen of the model's own checkpointing."""
    returned_cache: bool | None = None
    """Whether the forward gave a cache back; None if it was not followed to its end."""
    unseen: str = ""
    """Why the forward was not followed to its end."""
    not_captured: str = ""
    """Why the step could not be captured."""
    outside_bytes: int = 0
    """What the model gives to a loss outside it; 0 if it returns its loss."""
    counts_loss: bool = False
    """Whether that loss is counted."""
    step: CapturedStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of trouble: plain data, and how to see it."""

    name: str
    """In kebab case."""
    severity: Severity = Severity.WARNING
    evidence: Callable[[Subject], str]
    """What was seen in a subject, ``""`` if nothing was."""
    cause: str
    fix: str


def examine(subject: Subject, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """Return what rules find, the worst first."""
    found = [
        Finding(rule=rule.name, severity=rule.severity, evidence=evidence, cause=rule.cause, fix=rule.fix)
        for rule in rules
        if (evidence := rule.evidence(subject))
    ]
    worst_first = list(Severity)
    return tuple(sorted(found, key=lambda finding: worst_first.index(finding.severity)))
