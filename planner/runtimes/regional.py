"""Runtime ``regional``: each repeated block as planned graphs with eager kernels, the rest eager.

Blocks deliver their gradients during the backward, so communication overlaps as in eager training; hooks, and so DDP's
and FSDP2's, run around a block and not inside it.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from planner.capture.blocks.regions import Step as FollowedStep
from planner.capture.failures import explain_forward
from planner.capture.fsdp_internals import computes_in_other_types
from planner.capture.inputs import Inputs, check_plannable
from planner.capture.model_facts import has_units, module_facts, shards_of, whole
from planner.capture.torch_internals import Compiler, aot_backend
from planner.errors import UsageError
from planner.findings.finding import Finding
from planner.ir.static_memory import FINDS, SHARDS
from planner.plans.plan import Plan
from planner.runtimes import ReplannedModel, _calls, _units
from planner.session.fingerprint import are_no_larger, described
from planner.session.rank_consensus import plan_together
from planner.session.step import LoweredStep, Options, elsewhere_for


class RegionalRuntime(_calls.CallsInSituations):
    """What ``model(...)`` runs while a plan is in force."""

    def __init__(self, model: nn.Module, options: Options, runtime: Regional, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._runtime = runtime
        self._blocks: dict[Any, _units.PlannedUnits] = {}
        """Keyed by situation and decisions: plans may differ in how gradients accumulate alone."""

    def decide(self, inputs: Inputs) -> _calls.Decided:
        """Plan the blocks."""
        plan = self._plan(inputs)
        asked = tuple(plan.fingerprint[key] for key in ("blocks", "inputs", _units.BLOCK_BYTES))
        key = (_calls.situation_of(self.model, inputs), asked, frozenset(plan.recomputations.items()), plan.offloading)
        if key not in self._blocks:
            self._blocks[key] = _units.PlannedUnits(self.model, plan, self._runtime.kind)
        return plan, partial(_units.installed, self.model, self._blocks[key].forwards)

    def _plan(self, inputs: Inputs) -> Plan:
        """Plan a call, unless the plan in force serves it.

        Smaller inputs of a sharded model, such as a last batch, reuse its decisions: every block then holds less. A
        plan made before the model was sharded or wrapped by DDP does not serve: it does not count mixed precision,
        parameters that stay gathered, and DDP's gradient buckets.
        """
        plan, sharded = self.plan, has_units(self.model)
        knows_types = self.is_confirmed or not computes_in_other_types(self.model)
        is_for_this = plan is not None and not self._unknown_to(plan)
        is_for_shards = plan is not None and int(plan.fingerprint.get(SHARDS, 1)) == shards_of(self.model)
        is_near = sharded and is_for_this and is_for_shards and knows_types
        is_near |= self.must_match and (sharded or not is_for_this)
        given = described(inputs.tensors())
        if plan is None or not (is_near and are_no_larger(given, str(plan.fingerprint["inputs"]))):
            with whole(self.model):
                check_plannable(self.model, inputs)
                self.complete_options(inputs)
                plan = self._runtime.plan(self.model, inputs, self.options_for_call(), **self.known)
            self.put_in_force(plan)
        self.is_confirmed = True
        if unknown := self._unknown_to(plan):
            said = unknown.get(_units.SHARDING) or unknown.get(FINDS) or "the model is sharded by default"
            said = said.partition(";")[0]
            warnings.warn(f"{said}, and the given plan does not count on that: {_calls.MAY_BE_ABOVE}", stacklevel=7)
        _calls.check_sharding(self.model, _units.blocks_of(plan), int(plan.fingerprint.get(SHARDS, 1)))
        return plan

    def _unknown_to(self, plan: Plan) -> dict[str, str]:
        """Return how the model trains now, if the plan was made for other training; else nothing."""
        now = _units.how_it_trains(self.model, _units.blocks_of(plan), self.options_for_call())
        is_known = all(plan.fingerprint.get(key, "") == said for key, said in now.items())
        return {} if is_known else now


def lower_regional(model: nn.Module, inputs: Inputs, options: Options, compiler: Compiler = aot_backend) -> _units.Step:
    """Record one step of a model on fake tensors, and lower it with its blocks."""
    followed = FollowedStep(model, inputs, elsewhere_for(model, options))
    blocks, left = followed.capture_blocks(_units.lowering(model, options), compiler)
    if not blocks:
        why = f": {next(iter(left))}: {next(iter(left.values()))}" if left else ""
        fills_cache = left and any(facts.fills_cache for facts in module_facts(model))
        without = "set model.config.use_cache = False (blocks write into the cache), or " if fills_cache else ""
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks (members of a ModuleList or Sequential, called once in a "
            f"step, with parameters) that could be planned one by one{why}; {without}use runtime='graph'"
        )
    step = _units.lower_around(followed, blocks, inputs, options)
    left |= {path: "its backward does not run" for path in blocks if path not in step.units}
    notes = tuple(
        Finding(
            rule="block-left-eager",
            evidence=f"block {path}",
            cause=f"it is not planned: {why}",
            fix="nothing to do, if it is a small part of the step; otherwise runtime='graph' plans it",
        )
        for path, why in left.items()
    )
    return replace(step, lowered=replace(step.lowered, warnings=notes))


class Regional(_calls.RuntimeOfCalls):
    """Plans the blocks of a step together with the eager operations around them."""

    name = "regional"
    summary = "every repeated block as planned graphs of its own, the rest eager: for DDP and FSDP2"
    runs_sharded = True
    compiler: Compiler = staticmethod(aot_backend)
    """The compiler that blocks are captured for."""
    kind: ClassVar[type[_units.PlannedUnit]] = _units.PlannedUnit
    """The class that runs a block."""

    def start(self, model: nn.Module, options: Options, **settings: Any) -> ReplannedModel:
        """Start the calls; see :meth:`planner.runtimes.Runtime.start`."""
        return RegionalRuntime(model, options, self, **settings)

    def plan(self, model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
        """Plan one step; see :meth:`planner.runtimes.RuntimePlugin.plan`."""
        begun = time.perf_counter()
        captured: list[_units.Step] = []

        def prepare() -> LoweredStep:
            options.search.tell("capturing each block")
            check_plannable(model, inputs)
            with explain_forward(model):
                captured.append(lower_regional(model, inputs, options, self.compiler))
            return replace(captured[0].lowered, capture_seconds=time.perf_counter() - begun)

        def planned(step: LoweredStep) -> Plan:
            return self.plan_units(model, replace(captured[0], lowered=step), options, **known)

        return plan_together(model, prepare, options, planned)

    def plan_units(self, model: nn.Module, step: _units.Step, options: Options, **known: Any) -> Plan:
        """Plan a step that was recorded around its blocks."""
        return step.plan(model, options, **known)


RUNTIME = Regional()
