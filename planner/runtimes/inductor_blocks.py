"""Runtime ``inductor_blocks``: each repeated block planned and compiled by Inductor, the rest eager.

Like ``block.compile()`` for each block, with a plan inside: hooks, and so DDP's and FSDP2's, run around blocks, and
equal blocks with equal decisions share their code. As under ``inductor`` the code's peak is what counts; the code is
drafted before anything is compiled, once for each kind of block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from planner.capture.blocks.regions import Block, placeholders_given
from planner.capture.blocks.whole_step import prefixed
from planner.capture.inductor_internals import Draft, compile_with_inductor, draft_with_inductor
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import Stopped
from planner.capture.lowering import LoweredGraph
from planner.capture.model_facts import is_fake
from planner.capture.torch_internals import PartitionFunction
from planner.ir.graph import OperationCost
from planner.ir.problem import Solution
from planner.ir.schedule import Schedule
from planner.measure.fusion import in_kernels
from planner.measure.workspace import effort_for
from planner.plans.block_kinds import with_few_kinds
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.rewrite.inductor_peak import with_code
from planner.runtimes._code import FREE, Attempt, CodeSearch, DraftedBeforeError, alone, as_compiled, host_of
from planner.runtimes._units import BLOCK_BYTES, PlannedUnit, Step, bytes_alone, decisions_on, lowering, part_of
from planner.runtimes.inductor import Compiles, check_can_compile
from planner.runtimes.regional import Regional
from planner.session.step import Options, PlannedStep, plan_lowered, study_lowered


def _carrying_out(plan: Plan, path: str, lowered: LoweredGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a block's forward and backward under a plan in which each fused kernel is one operation."""
    kernels = in_kernels(lowered)
    return extract_fwd_bwd(lowered, kernels.carried_out(part_of(plan, path, kernels.graph)))


def _with_few_kinds(step: PlannedStep, asked: Options) -> PlannedStep:
    """Return a step whose plan has fewer kinds of blocks to compile, if one fits the budget."""
    study, plan = step.study, step.plan
    problem, schedule = study.posed(asked.budget, host_of(step, asked)), plan.schedule_for(study.graph)
    few = with_few_kinds(problem, schedule)
    if few == schedule:
        return step
    solution = Solution.simulated(problem.evaluate(few), few, plan.solver, lower_bound_seconds=plan.lower_bound_seconds)
    if plan.offloading is not None:
        solution = replace(solution, alone_seconds=plan.offloading.alone_seconds)
    made = plan_from_solution(problem, solution, origin=study.origin, static_memory=study.static_memory, compare=False)
    return PlannedStep.of(step.step, study, made)


class CompiledUnit(PlannedUnit):
    """A block that Inductor compiles."""

    def parted(self, lowered: LoweredGraph, given: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward that carry out the block's part of the plan."""
        self._captured = lowered, given
        return _carrying_out(self.planned.plan, self.path, lowered)

    def compiler(self, partition: PartitionFunction) -> Any:
        """Return a backend that drafts the code, counts what it holds, and compiles it."""
        return partial(self._compiled, partition)

    def _compiled(self, partition: PartitionFunction, graph_module: fx.GraphModule, inputs: Any) -> Any:
        drafts = draft_with_inductor(partition, graph_module, inputs)
        lowered, given = self._captured
        code = with_code(
            lowered, given, drafts, [FREE] * len(lowered.graph.operations), effort_for(is_fake=is_fake(self._block))
        )
        self.hold(bytes_alone(code.graph, Schedule.keep_all(code.graph)))
        run = compile_with_inductor(partition, graph_module, inputs, drafts)
        del self._captured  # it has what the block was called with
        return run


class _Code:
    """Peaks of the code of a step's blocks, drafted once for each kind of block."""

    def __init__(self, model: nn.Module, step: Step, options: Options) -> None:
        self._model, self._step = model, step
        self._lower = lowering(model, options)
        self._tell = options.search.tell
        self._known: dict[Any, LoweredGraph] = {}

    def attempt(self, step: PlannedStep) -> Attempt[int]:
        """Return what a planned step holds, and as its code the sum of its blocks' peaks, each alone."""
        costs = {o.key: cost for o, cost in zip(step.lowered.graph.operations, step.single_costs, strict=True)}
        blocks = {path: self._compiled(block, step.plan, costs) for path, block in self._step.units.items()}
        graph = self._step.put_together(blocks).graph
        around = [FREE if o.region else costs[o.key] for o in graph.operations]
        each = (block.lowered.graph for block in blocks.values())
        return Attempt.of(step, sum(bytes_alone(g, Schedule.keep_all(g)) for g in each), graph, around)

    def _compiled(self, block: Block, plan: Plan, costs: dict[str, OperationCost]) -> Block:
        """Return a block with its code in place of its operations."""
        lowered = block.lowered
        key = lowered.joint.graph, decisions_on(plan, block.path)
        if key not in self._known:
            self._tell(f"drafting Inductor's code of {block.path}")
            of_block = [costs.get(prefixed(block.path, o.key), FREE) for o in lowered.graph.operations]
            self._known[key] = self._drafted(block, plan, of_block)
        code = self._known[key]
        return replace(block, lowered=replace(lowered, graph=code.graph, operation_nodes=code.operation_nodes))

    def _drafted(self, block: Block, plan: Plan, costs: Sequence[OperationCost]) -> LoweredGraph:
        followed = self._step.followed
        own = followed.state_of(block.path).values()
        parted: list[tuple[LoweredGraph, Sequence[fx.Node]]] = []

        def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            given = placeholders_given(joint, own)
            lowered = self._lower(joint, given)
            parted.append((lowered, given))
            return _carrying_out(plan, block.path, lowered)

        def drafted(partition: PartitionFunction, graph_module: fx.GraphModule, inputs: Any) -> Any:
            raise Stopped(draft_with_inductor(partition, graph_module, inputs))

        drafts: list[Draft] = followed.compiled(block, partition, lambda p: partial(drafted, p))
        return with_code(*parted[-1], drafts, costs, effort_for(is_fake=is_fake(self._model)))


class _InductorBlocks(Compiles, Regional):
    kind = CompiledUnit
    name = "inductor_blocks"
    summary = "every repeated block compiled by Inductor, the rest eager: for DDP and FSDP2"
    runs_compiled_parts = True

    @staticmethod
    def compiler(partition: PartitionFunction) -> Any:
        """Return a backend that captures a block as the graph that Inductor compiles."""
        return partial(draft_with_inductor, partition)

    def plan(self, model: nn.Module, inputs: Inputs, options: Options, **known: Any) -> Plan:
        check_can_compile(model, options)
        return super().plan(model, inputs, options, **known)

    def plan_units(self, model: nn.Module, step: Step, options: Options, **known: Any) -> Plan:
        """Plan a step by the peaks of its blocks' code."""
        reuse, must_match = known.get("reuse"), known.get("must_match", False)
        code = _Code(model, step, options)
        study = study_lowered(model, step.lowered, options)

        def plan(asked: Options, **given: Any) -> PlannedStep:
            planned = plan_lowered(model, step.lowered, asked, study=study, **given)
            return planned if given.get("must_match") else _with_few_kinds(planned, asked)

        search = CodeSearch[int](options.search.tell, must_match=must_match)
        with suppress(DraftedBeforeError):
            is_enough = False
            while not is_enough:
                is_enough = search.is_enough(code.attempt(search.plan(plan, options, reuse)))
        found = search.found()
        made = as_compiled(found, alone(options) if must_match else options).plan
        return replace(made, fingerprint={**made.fingerprint, BLOCK_BYTES: found.code})


RUNTIME = _InductorBlocks()
