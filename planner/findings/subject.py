"""What rules look at: plain data on a model, on its forward, and on the captured step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module of the tree, as far as rules ask.

    Parameters
    ----------
    path : str
        As ``named_modules`` has it, ``""`` for the model itself.
    kind : str
        Name of its class.
    parameter_bytes : int
        Of its own and its children's parameters.
    trainable : bool
        Whether any of them requires a gradient.
    updates_statistics : bool
        Whether each call changes running statistics: BatchNorm in training.
    checkpointing_on : bool
        Whether it checkpoints itself: a wrapper, or a switch of Hugging Face's.
    fills_cache : bool
        Whether its configuration asks for keys and values to be cached.
    finds_unused, sharded : bool
        Whether it is DDP's wrapper with ``find_unused_parameters``; a unit of FSDP.
    """

    path: str
    kind: str
    parameter_bytes: int = 0
    trainable: bool = False
    updates_statistics: bool = False
    full_backward_hooks: bool = False
    checkpointing_on: bool = False
    fills_cache: bool = False
    finds_unused: bool = False
    sharded: bool = False

    @property
    def label(self) -> str:
        """Its path, or its class where it is the model itself."""
        return self.path or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCall:
    """One call of ``torch.utils.checkpoint.checkpoint`` that was seen in the forward.

    Parameters
    ----------
    region : str
        The module that it runs, or the function's name.
    reentrant, preserves_random_state : bool
        How it was called.
    selective : bool
        Whether a ``context_fn`` chooses what is saved.
    nested : bool
        Whether another call was under way.
    gets_gradient : bool
        Whether a tensor among its arguments requires a gradient.
    trainable : bool
        Whether anything else that it reads does: a parameter.
    draws, updates, overwrites, chooses : tuple of str
        Operations with their module: those that draw random numbers, write into parameters or buffers, write into
        the result of a matrix product, and choose by rank.
    """

    region: str
    reentrant: bool = False
    preserves_random_state: bool = True
    selective: bool = False
    nested: bool = False
    gets_gradient: bool = True
    trainable: bool = True
    draws: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    chooses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured step, and a schedule of it: that of a plan, or the one without recompute."""

    problem: Problem
    schedule: Schedule
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """All that rules may look at; what is not known is left out.

    Parameters
    ----------
    modules : tuple of ModuleFacts
        In the order of ``named_modules``.
    calls : tuple of CheckpointCall
        What was seen of the model's own checkpointing.
    cast_while_tied : tuple of str
        Parameters with two names or more that the forward casts to another type, ``"head.weight = tokens.weight"``.
    returned_cache : bool, optional
        Whether the forward gave a cache back; None if it was not followed to its end.
    unseen : str
        Why the forward was not followed to its end.
    not_captured : str
        Why the step could not be captured.
    outside_bytes : int
        What the model gives to a loss outside it; 0 if it returns its loss.
    counts_loss : bool
        Whether that loss is counted.
    """

    modules: tuple[ModuleFacts, ...] = ()
    calls: tuple[CheckpointCall, ...] = ()
    cast_while_tied: tuple[str, ...] = ()
    returned_cache: bool | None = None
    unseen: str = ""
    not_captured: str = ""
    outside_bytes: int = 0
    counts_loss: bool = False
    step: CapturedStep | None = None
