"""Picks a runtime, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner import runtimes
from planner.runtimes import Prepare, Running

if TYPE_CHECKING:
    from torch import nn

    from planner.inputs import Inputs
    from planner.plan_types import Plan
    from planner.session import Options


class _Auto:
    name = "auto"
    summary = "the first of the others that can carry the model out"
    exact_bits = True
    exact_peak = True

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        name = _choose(reuse)
        options = replace(options, runtime=name)
        return runtimes.get(name).plan(model, inputs, options, reuse=reuse, must_match=must_match)

    def start(
        self,
        model: nn.Module,
        options: Options,
        *,
        plan: Plan | None = None,
        replan: bool = True,
        prepare: Prepare | None = None,
    ) -> Running:
        name = _choose(plan)
        options = replace(options, runtime=name)
        return runtimes.get(name).start(model, options, plan=plan, replan=replan, prepare=prepare)


def _choose(plan: Plan | None) -> str:
    return plan.runtime if plan is not None else "graph"


RUNTIME = _Auto()
