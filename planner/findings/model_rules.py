"""Rules on modules and settings, and on whether the step could be captured."""

from __future__ import annotations

from planner.common.units import format_bytes
from planner.findings.finding import Severity, collapsed
from planner.findings.rules import Rule
from planner.findings.subject import Subject
from planner.ir.layers import is_within


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
    inside = [
        m.label for m in subject.modules if m.sharded and any(not path or is_within(m.path, path) for path in outer)
    ]
    return f"{collapsed(inside)}: sharded inside a region that is checkpointed" if inside else ""


def _statistics(subject: Subject) -> str:
    if any(call.updates for call in subject.calls):
        return ""
    updating = [module.label for module in subject.modules if module.updates_statistics]
    return f"{collapsed(updating)}; modules with running statistics: {len(updating)}" if updating else ""


def _loss(subject: Subject) -> str:
    if not subject.outside_bytes or subject.counts_loss:
        return ""
    return f"the model gives {format_bytes(subject.outside_bytes)} to what comes after it, and no loss"


RULES = (
    Rule(
        name="not-captured",
        evidence=lambda subject: subject.not_captured,
        cause="a plan needs the whole step as one graph, with fixed shapes",
        fix="take what is named out of the forward, or put it under 'if not torch.compiler.is_compiling()'",
    ),
    Rule(
        name="full-backward-hooks",
        evidence=lambda subject: collapsed([one.label for one in subject.modules if one.full_backward_hooks]),
        cause="a captured step has no modules in its backward that hooks could be called for, so it is refused",
        fix="remove them (handle.remove()), or hook the output: output.register_hook(...)",
    ),
    Rule(
        name="use-cache",
        evidence=_cache,
        cause="keys and values of all layers are given back for a generation that does not follow, and stay alive; "
        "with them a layer's output is more than its activations, and checkpointing them is ruled out",
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
        fix="trust silence on these rules less",
    ),
)
