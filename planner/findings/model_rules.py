"""Rules on modules and settings, on the checkpointing that a model does itself, and on whether it can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.common.units import format_bytes
from planner.findings.finding import Severity, collapsed
from planner.findings.rules import CheckpointCall, Rule, Subject
from planner.ir.layers import is_within

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


def _cache(subject: Subject) -> str:
    if subject.returned_cache is False:
        return ""
    filling = [f"{module.label} ({module.kind})" for module in subject.modules if module.fills_cache]
    return f"config.use_cache=True in {collapsed(filling)}, in training mode" if filling else ""


def _sharded_within(subject: Subject) -> str:
    own = [module.path for module in subject.modules if module.checkpointing_on]
    # A wrapper that is sharded as a whole is in the right order, though it calls what it wraps.
    outer = {module.path for module in subject.modules if module.checkpointing_on and not module.sharded}
    outer |= {call.region for call in subject.calls if call.region not in own}
    sharded = (module for module in subject.modules if module.sharded)
    inside = [module.label for module in sharded if any(not path or is_within(module.path, path) for path in outer)]
    return f"{collapsed(inside)}: sharded inside a region that is checkpointed" if inside else ""


def _statistics(subject: Subject) -> str:
    if any(call.updates for call in subject.calls):
        return ""
    updating = [module.label for module in subject.modules if module.updates_statistics]
    return f"{collapsed(updating)}; modules with running statistics: {len(updating)}" if updating else ""


def _loss(subject: Subject) -> str:
    if not subject.outside_bytes or subject.counts_loss:
        return ""
    return f"the model returns {format_bytes(subject.outside_bytes)} for a loss outside, and no loss"


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
        cause="the recompute chooses experts again: where kernels are not deterministic, a token may go to other "
        "experts than in the forward",
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
    Rule(
        name="not-captured",
        evidence=lambda subject: subject.not_captured,
        cause="a plan needs the whole step as one graph, with fixed shapes",
        fix="move what is named out of the forward, or put it under 'if not torch.compiler.is_compiling()'",
    ),
    Rule(
        name="full-backward-hooks",
        evidence=lambda subject: collapsed([one.label for one in subject.modules if one.full_backward_hooks]),
        cause="the backward of a captured step has no modules whose hooks could be called, so the model is refused",
        fix="remove them (handle.remove()), or hook the output: output.register_hook(...)",
    ),
    Rule(
        name="use-cache",
        evidence=_cache,
        cause="keys and values of all layers are returned for a generation that does not follow, and stay alive; "
        "a layer that returns more than its activations cannot be checkpointed",
        fix="set model.config.use_cache = False for training",
    ),
    Rule(
        name="sharded-inside-checkpoint",
        evidence=_sharded_within,
        cause="each recompute gathers the parameters again, beside the gather that the backward does",
        fix="checkpoint first, shard after: fully_shard (or FSDP) goes around the checkpointed module",
    ),
    Rule(
        name="loss-not-counted",
        evidence=_loss,
        cause="a loss that is computed outside the captured step needs memory that no plan knows of",
        fix="return the loss from the model, or pass loss_fn (a factory: as its third value); auto_wrap observes it",
    ),
    Rule(
        name="batch-norm",
        severity=Severity.NOTE,
        evidence=_statistics,
        cause="under torch.utils.checkpoint they would update their running statistics twice in each step",
        fix="planner.auto_wrap updates them once; keep plain checkpointing away from them",
    ),
    Rule(
        name="not-followed",
        severity=Severity.NOTE,
        evidence=lambda subject: subject.unseen,
        cause="the forward could not be run to its end on tensors without data, so rules on the model's own "
        "checkpointing saw only a part of it",
        fix="do not rely on these rules alone",
    ),
)
"""Those on the model's own checkpointing need the forward to be followed; see ``planner.diagnose.observe``."""
