"""Rules on the checkpointing that a model does itself: where it gives wrong numbers, and where it costs too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.findings.finding import Severity, collapsed
from planner.findings.rules import Rule
from planner.findings.subject import CheckpointCall, Subject

_LEAVE_IT_TO_A_PLAN = "or turn the model's own checkpointing off and use planner.auto_wrap"


def _of_calls(which: Callable[[CheckpointCall], object], told: str, things: str = "") -> Callable[[Subject], str]:
    """See whether there are such calls; what is told has their ``regions``, and the ``things`` that they note."""

    def evidence(subject: Subject) -> str:
        calls = [call for call in subject.calls if which(call)]
        noted = [thing for call in calls for thing in getattr(call, things)] if things else []
        return told.format(regions=_regions(calls), things=collapsed(noted)) if calls else ""

    return evidence


def _already_on(subject: Subject) -> str:
    if subject.calls:
        return f"{_regions(subject.calls)}; calls of torch.utils.checkpoint in one forward: {len(subject.calls)}"
    switched = [module.label for module in subject.modules if module.checkpointing_on]
    return f"{collapsed(switched)}; modules that checkpoint themselves: {len(switched)}" if switched else ""


def _regions(calls: Sequence[CheckpointCall]) -> str:
    return collapsed([call.region for call in calls])


RULES = (
    Rule(
        name="random-state-not-kept",
        severity=Severity.ERROR,
        evidence=_of_calls(
            lambda call: call.draws and not call.preserves_random_state,
            "preserve_rng_state=False in {regions}, which draw: {things}",
            "draws",
        ),
        cause="the backward draws other random numbers than the forward did, so gradients are those of another step",
        fix="pass preserve_rng_state=True (transformers: leave it out of activation_checkpointing_kwargs), "
        f"{_LEAVE_IT_TO_A_PLAN}",
    ),
    Rule(
        name="reentrant-without-gradient",
        severity=Severity.ERROR,
        evidence=_of_calls(
            lambda call: call.reentrant and call.trainable and not (call.gets_gradient or call.nested),
            "use_reentrant=True in {regions}: no argument requires a gradient",
        ),
        cause="the reentrant kind links a region to the backward only through its inputs, so these parameters "
        "get no gradient at all",
        fix="pass use_reentrant=False, or let the input require a gradient "
        "(transformers: enable_input_require_grads())",
    ),
    Rule(
        name="state-updated-twice",
        severity=Severity.ERROR,
        evidence=_of_calls(lambda call: call.updates, "{regions}: {things}", "updates"),
        cause="plain checkpointing runs the region again in the backward, so running statistics and other buffers "
        "change twice in each step",
        fix=f"checkpoint around these modules, {_LEAVE_IT_TO_A_PLAN}, which updates them once",
    ),
    Rule(
        name="routing-recomputed",
        evidence=_of_calls(lambda call: call.chooses, "{regions}: {things}", "chooses"),
        cause="what is chosen by rank is chosen again in the backward: where kernels are not deterministic, a token "
        "may go to other experts than in the forward",
        fix=f"checkpoint the experts without the router, {_LEAVE_IT_TO_A_PLAN} on deterministic kernels",
    ),
    Rule(
        name="nested-checkpoints",
        evidence=_of_calls(lambda call: call.nested, "{regions}: inside regions that are checkpointed already"),
        cause="the inner region runs three times in a step: in the forward, again for the outer region, and once more "
        "for itself",
        fix=f"checkpoint either the outer or the inner modules, {_LEAVE_IT_TO_A_PLAN}",
    ),
    Rule(
        name="checkpointing-already-on",
        evidence=_already_on,
        cause="the model recomputes whole regions by itself, whatever the budget; a plan takes its place in a "
        "captured step, elsewhere the two add up",
        fix="turn it off before planning: activation_checkpointing_disable() in transformers "
        "(gradient_checkpointing_disable() in older ones), disable_gradient_checkpointing() in diffusers",
    ),
)
"""Most of them need the forward to be followed; see ``planner.diagnose.observe``."""
