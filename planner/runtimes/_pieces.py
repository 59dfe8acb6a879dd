"""One graph between two graph breaks, at certain sizes: its memory, and the code that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from planner.analysis.study import Study
from planner.capture.failures import explain_forward
from planner.capture.inductor_internals import draft_with_inductor, with_settings
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Backend, Stopped, differentiable_outputs
from planner.capture.model_facts import of_model
from planner.capture.pieces import Piece
from planner.capture.state_restore import random_states_kept
from planner.capture.torch_internals import FakeTensor, entered
from planner.common.units import round_up
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.static_memory import LossMemory
from planner.plans.budget_split import Needs, needs_of
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._gradients import watched
from planner.runtimes.inductor import InductorRuntime, check_can_compile
from planner.session.step import Options, PlannedStep, lower_as_run, study_lowered
from planner.session.step_planning import plan_step


class Program:
    """A graph at certain sizes: its memory, and the eager code that first runs it."""

    def __init__(self, model: nn.Module, piece: Piece, settings: dict[str, Any], name: str) -> None:
        self.model, self.piece, self.settings, self.name = model, piece, settings, name

    def look(self, options: Options) -> bool:
        """Compute the program's lowest peak and its peak without recompute; False if nothing requires gradients."""
        if options.runtime.name == "inductor":
            check_can_compile(self.model, options)
        seen: list[Study] = []

        def lowest(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            step = lower_as_run(self.model, joint, options)
            study = study_lowered(self.model, step, options)
            schedule = _lowest(study, options)
            seen.append(study)
            self.first_needs = needs_of(study.graph, study.costs, schedule)
            assert study.in_place is not None
            return extract_fwd_bwd(step.lowered, study.in_place.carried_out(schedule), study.in_place.over)

        self.first_run = self._compile(lowest)
        if not seen:
            return False
        study = seen[0]
        if options.runtime.name == "inductor":  # whose graphs are others, and hold other tensors
            study = self._as_inductor_has_it(options)
        keep_all = Schedule.keep_all(study.graph)
        self.lowest = needs_of(study.graph, study.costs, _lowest(study, options))
        self.whole = needs_of(study.graph, study.costs, keep_all)
        self.alignment_bytes = study.graph.alignment_bytes
        self.resident_bytes = study.graph.total_static_bytes - study.graph.static_bytes["inputs"]
        left = sum(v.size_bytes for v in study.graph.values if v.retained and v.kind in ("gradient", "output"))
        passed_on = (t for t in self.piece.inputs if t.requires_grad and not t.is_leaf)
        self.left_bytes = max(0, left - sum(round_up(t.nbytes, self.alignment_bytes) for t in passed_on))
        return True

    def _as_inductor_has_it(self, options: Options) -> Study:
        def stop(joint: JointGraph) -> Any:
            raise Stopped(study_lowered(self.model, lower_as_run(self.model, joint, options), options))

        try:
            self._compile(stop, compiler=lambda partition: partial(draft_with_inductor, partition))
        except Stopped as stopped:
            return stopped.args[0]
        raise AssertionError("a program that has a backward has one for Inductor too")

    def _compile(self, partition: Any, **options: Any) -> Callable[..., Any]:
        captured = Backend(partition, choose_outputs=differentiable_outputs, finish=watched, **options)
        with explain_forward(self.model), with_settings(self.settings), self.piece.surroundings():
            return captured(self.piece.program, self.piece.inputs)

    def own_inputs(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """Return a call's inputs other than the tensors of its model."""
        pairs = zip(self.piece.positions, self.piece.inputs, strict=True)
        return [given[at] for at, known in pairs if isinstance(known, FakeTensor)]

    def planned(self, options: Options) -> Made:
        """Plan and compile the program."""
        with entered(of_model(self.model, *self.piece.inputs)), random_states_kept():
            if options.runtime.name == "inductor":
                runtime = InductorRuntime(self.model, options)
                run = self._compile(runtime.partition, compiler=runtime.compiler)
                step = runtime.step
            else:
                steps: list[PlannedStep] = []

                def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
                    steps.append(plan_step(self.model, joint, options))
                    return extract_fwd_bwd(steps[-1].lowered, steps[-1].schedule, steps[-1].over)

                run = self._compile(partition)
                step = steps[-1]
        assert step is not None
        loss, plan = options.loss or LossMemory(), step.plan
        needs = needs_of(step.study.graph, step.study.costs, plan.schedule_for(step.study.graph))
        peak_bytes = plan.peak_bytes - plan.total_static_bytes
        needs = Needs(
            kept_bytes=needs.kept_bytes - loss.working_bytes - loss.held_bytes,
            forward_bytes=needs.forward_bytes if needs.peak_bytes == peak_bytes else peak_bytes,
            backward_bytes=(needs.backward_bytes if needs.peak_bytes == peak_bytes else peak_bytes) - loss.held_bytes,
        )
        return Made(plan, run, needs, peak_bytes, options.loss)


def _lowest(study: Study, options: Options) -> Schedule:
    problem = Problem(graph=study.graph, costs=study.costs, budget_bytes=0)
    return study.lowest(problem, effort=options.search)


@dataclass(frozen=True)
class Made:
    """A planned program and its code."""

    plan: Plan
    run: Callable[..., Any]
    needs: Needs
    """Memory of the program alone."""
    peak_bytes: int
    """Peak including the calls after it."""
    loss: LossMemory | None
    """Memory of the calls after it."""

    def peak_with(self, loss: LossMemory | None) -> int:
        """Return the peak if other calls come after it."""
        if loss == self.loss:
            return self.peak_bytes
        loss = loss or LossMemory()
        return self.needs.followed_by(loss.working_bytes, loss.held_bytes)
