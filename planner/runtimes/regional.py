"""Runs each repeated block as planned graphs of its own, and the rest as eager PyTorch.

Blocks deliver their gradients as the backward goes, so communication overlaps with it as in eager
training; hooks, and so DDP's and FSDP2's, run around a block and not inside it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx, nn

from planner.capture.blocks.regions import AS_BLOCK, Block, Lower, Step, placeholders_given
from planner.capture.blocks.whole_step import prefixed, put_together
from planner.capture.failures import explain_failures, explain_forward
from planner.capture.forwards import forwards
from planner.capture.fsdp_internals import (
    ShardedUnit,
    computes_in_other_types,
    settings_of,
    types_of_shares,
    units_beside,
)
from planner.capture.gradients import found_by_autograd
from planner.capture.inputs import Inputs, check_plannable
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import NOT_CAPTURED, IsolatedCall
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph, lower
from planner.capture.module_facts import module_facts
from planner.capture.parallel import has_units, shards_of, units_of, whole
from planner.capture.sharding import ROOT, SHARES, WHOLE, Parameter, Unit, Units, resident
from planner.capture.torch_internals import Compiler, aot_backend
from planner.errors import PlanMismatchError, UsageError
from planner.findings.finding import Finding
from planner.ir.builder import StepContext
from planner.ir.graph import OperationCost, TrainingGraph, named_by
from planner.ir.layers import is_within
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import FINDS, SHARDS
from planner.measure.devices import device_spec
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._calls import (
    MAY_BE_ABOVE,
    CallsInSituations,
    Decided,
    StartsCalls,
    check_sharding,
    situation_of,
)
from planner.runtimes._gradients import watched
from planner.session.rank_consensus import plan_together
from planner.session.step import (
    LoweredStep,
    Options,
    are_no_larger,
    context_of,
    described,
    elsewhere_for,
    plan_lowered,
    static_memory_of,
)

SHARDING = "sharding"
"""In a plan's fingerprint: how the model is sharded, where that is not by default."""

GRADIENTS_IN_BUCKETS = "gradients in DDP's buckets"

BLOCK_BYTES = "block bytes"
"""In a plan's fingerprint: the peaks of all blocks, each alone, added up."""


class RegionalRuntime(CallsInSituations):
    """What ``model(...)`` runs while a plan is in force."""

    @property
    def kind(self) -> type[PlannedBlock]:
        """Return what runs a block."""
        return PlannedBlock

    def __init__(self, model: nn.Module, options: Options, **settings: Any) -> None:
        super().__init__(model, options, **settings)
        self._blocks: dict[Any, Planned] = {}
        """By what plans ask of them: what differs may be how gradients come and go."""

    def decide(self, inputs: Inputs) -> Decided:
        """Plan the blocks."""
        plan = self._plan(inputs)
        asked = tuple(plan.fingerprint[key] for key in ("blocks", "inputs", BLOCK_BYTES))
        key = (situation_of(self.model, inputs), asked, frozenset(plan.recomputations.items()))
        if key not in self._blocks:
            self._blocks[key] = Planned(self.model, plan, self.kind)
        return plan, partial(installed, self.model, self._blocks[key].forwards)

    def _plan(self, inputs: Inputs) -> Plan:
        """Plan a call, unless the plan at hand will do.

        Of a sharded model smaller inputs, say a last batch, take over its decisions: in every block less is alive
        whatever runs. A plan that was made before the model was sharded, or before DDP was put around it, knows nothing
        of a policy for other types, of parameters that stay, and of gradients that come otherwise.
        """
        plan, sharded = self.plan, has_units(self.model)
        knows_types = self.is_confirmed or not computes_in_other_types(self.model)
        is_for_this = plan is not None and not self._unknown_to(plan)
        is_for_shards = plan is not None and int(plan.fingerprint.get(SHARDS, 1)) == shards_of(self.model)
        is_near = sharded and is_for_this and is_for_shards and knows_types
        is_near |= self.must_match and (sharded or not is_for_this)
        if plan is not None and is_near and are_no_larger(described(inputs.tensors()), planned_for(plan)):
            self.is_confirmed = True
        else:
            with whole(self.model):
                plan = self._planned(inputs)
        if unknown := self._unknown_to(plan):
            said = (unknown.get(SHARDING) or unknown.get(FINDS) or "the model is sharded by default").partition(";")[0]
            warnings.warn(f"{said}, and the plan that was given does not count on that: {MAY_BE_ABOVE}", stacklevel=7)
        check_sharding(self.model, blocks_of(plan), int(plan.fingerprint.get(SHARDS, 1)))
        return plan

    def _unknown_to(self, plan: Plan) -> dict[str, str]:
        """Return how the model trains, if a plan was made for one that trains otherwise; else nothing."""
        now = how_it_trains(self.model, blocks_of(plan), self.options_for_call())
        is_known = all(plan.fingerprint.get(key, "") == said for key, said in now.items())
        return {} if is_known else now

    def _planned(self, inputs: Inputs) -> Plan:
        check_plannable(self.model, inputs)
        self.complete_options(inputs)
        options = self.options_for_call()
        # All ranks come here with their first batch; with a later one that is new to it, each plans for itself.
        options = replace(options, plan_collectively=options.plan_collectively and not self.is_confirmed)
        plan = self.plan_call(inputs, options)
        self.is_confirmed = True
        self.put_in_force(plan)
        return plan

    def plan_call(self, inputs: Inputs, options: Options) -> Plan:
        """Plan a call by the runtime itself."""
        return RUNTIME.plan(self.model, inputs, options, reuse=self.plan, must_match=self.must_match)


def blocks_of(plan: Plan) -> list[str]:
    """Return the paths of the blocks that a plan is about."""
    return str(plan.fingerprint["blocks"]).split()


def how_it_trains(model: nn.Module, blocks: Iterable[str], options: Options) -> dict[str, str]:
    """Say how a model is sharded, and how its gradients come and go; ``""`` for what is by default."""
    settings = settings_of(model, blocks)
    if options.gradients.go_into_buckets:
        settings = "DDP is told gradient_as_bucket_view=True"
    accumulates = options.training.gradient_accumulation
    if units := [unit.unit for unit in units_of(model)]:
        finds = {what for unit in units for what in unit.as_planned(finds_gradients=accumulates).finds}
    elif options.training.data_parallel == "fsdp2":
        finds = {SHARES} if accumulates else set()
    else:
        finds = {GRADIENTS_IN_BUCKETS if options.gradients.are_in_buckets else WHOLE} if accumulates else set()
    found = ", ".join(f"{what} of earlier steps" for what in sorted(finds))
    return {SHARDING: settings, FINDS: found}


@contextmanager
def installed(model: nn.Module, planned: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Run planned blocks in place of the model's own."""
    with explain_failures(model), forwards(planned):
        yield


class Planned:
    """The blocks of a model, each with its part of a plan."""

    def __init__(self, model: nn.Module, plan: Plan, kind: type[PlannedBlock]) -> None:
        self.plan = plan
        self.bytes_left = int(plan.fingerprint[BLOCK_BYTES])
        equal: dict[Any, list[PlannedBlock]] = {}
        blocks = {path: model.get_submodule(path) for path in blocks_of(plan)}
        self.forwards = {
            block: kind(self, path, block, equal.setdefault(decisions_on(plan, path), []))
            for path, block in blocks.items()
        }

    def hold(self, path: str, peak_bytes: int) -> None:
        """Count what a block holds more than before, which is not to be more than was planned."""
        self.bytes_left -= peak_bytes
        if self.bytes_left < 0:
            raise PlanMismatchError(
                f"block {path} holds more than was planned: it is called with other sizes or element types than "
                "when the plan was made; plan again as the model now is"
            )


class PlannedBlock:
    """A block, compiled when it is first called, unless the code of an equal block serves it too."""

    compiler: Any = staticmethod(aot_backend)
    """Makes a backend of what parts a block's graph; see :class:`planner.capture.joint_capture.Backend`."""

    def __init__(self, planned: Planned, path: str, block: nn.Module, equal: list[PlannedBlock]) -> None:
        self.planned, self.path, self._block = planned, path, block
        self._equal = equal
        """Blocks of which the plan asks the same, and whose code is there."""
        self.code: PlannedBlock | None = None
        """Whose code runs."""
        self.peaks_bytes: list[int] = []
        """Of what was captured of it."""
        self.call = IsolatedCall(
            block,
            block.forward,
            self._partition,
            finish=watched,
            compiler=self.compiler,
            **AS_BLOCK,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; Dynamo's guards tell whether it is as the one whose code is at hand."""
        if self.code is None:
            for other in self._equal:
                if len(other.peaks_bytes) != 1:
                    continue  # which of its graphs would run, and so what it holds, is not known
                result = other.call.known(args, kwargs, self.call)
                if result is not NOT_CAPTURED:
                    self.code = other
                    self.planned.hold(self.path, *other.peaks_bytes)
                    return result
            self.code = self
            self._equal.append(self)
        result = NOT_CAPTURED if self.code is self else self.code.call.known(args, kwargs, self.call)
        return self.call(*args, **kwargs) if result is NOT_CAPTURED else result

    def _partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        given = placeholders_given(joint, [*self._block.parameters(), *self._block.buffers()])
        return self.parted(lower(joint, StepContext(alignment_bytes=1), given), given)

    def parted(self, lowered: LoweredGraph, _given: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward that carry out the block's part of the plan."""
        schedule = part_of(self.planned.plan, self.path, lowered.graph)
        self.hold(bytes_alone(lowered.graph, schedule))
        return extract_fwd_bwd(lowered, schedule)

    def hold(self, peak_bytes: int) -> None:
        """Count what a graph of the block holds alone; one of them runs in a step."""
        before = max(self.peaks_bytes, default=0)
        self.peaks_bytes.append(peak_bytes)
        self.planned.hold(self.path, max(0, peak_bytes - before))


def planned_for(plan: Plan) -> str:
    """Return the inputs of a plan, as :func:`described`."""
    return str(plan.fingerprint["inputs"])


def decisions_on(plan: Plan, path: str) -> frozenset[tuple[str, ...]]:
    """Return what a plan asks of a block, in names that are the same in every block."""
    return frozenset(
        tuple(name.removeprefix(path) for name in (key, *keys))
        for key, keys in plan.recomputations.items()
        if is_within(named_by(key)[0], path)
    )


def part_of(plan: Plan, path: str, graph: TrainingGraph) -> Schedule:
    """Return the schedule of a block's own graph that a plan for the whole step asks for.

    Raises PlanMismatchError if the plan names operations that the block does not have.
    """
    operations = [*enumerate(graph.operations)]
    index_of = {prefixed(path, key): index for index, operation in operations for key in operation.keys}
    first = {prefixed(path, operation.key) for _, operation in operations}  # what is one with it runs with it
    before: dict[int, tuple[int, ...]] = {}
    for key, keys in plan.recomputations.items():
        if not is_within(named_by(key)[0], path):
            continue
        missing = [k for k in (key, *keys) if k not in index_of]
        if missing:
            raise PlanMismatchError(
                f"block {path} does not have {missing[0]}, which the plan names: it is captured otherwise than when "
                "the plan was made (other element types, or a mask that was not needed then?); plan again as the model "
                "now is"
            )
        again = tuple(index_of[k] for k in keys if k in first)
        before[index_of[key]] = (*before.get(index_of[key], ()), *again)
    return Schedule.with_recomputations(graph, before)


@dataclass(frozen=True)
class Around:
    """A step that was followed around its blocks."""

    followed: Step
    lowered: LoweredStep
    """With the blocks as they were captured."""
    blocks: dict[str, Block]
    put_together: Callable[[Mapping[str, Block]], LoweredGraph]
    """Lowers the step once more, with other graphs of the same blocks."""


def lower_regional(model: nn.Module, inputs: Inputs, options: Options, compiler: Compiler = aot_backend) -> Around:
    """Follow one step of a model on fake tensors, and lower it with its blocks."""
    step = Step(model, inputs, elsewhere_for(model, options))
    blocks, left = step.capture_blocks(lowering(model, options), compiler)
    if not blocks:
        why = f": {next(iter(left))}: {next(iter(left.values()))}" if left else ""
        fills_cache = left and any(facts.fills_cache for facts in module_facts(model))
        without = "set model.config.use_cache = False (blocks write into the cache), or " if fills_cache else ""
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks (members of a ModuleList or Sequential, called once in a "
            f"step, with parameters) that could be planned one by one{why}; {without}take runtime='graph'"
        )
    around = lower_around(step, blocks, inputs, options)
    left |= {path: "its backward does not run" for path in blocks if path not in around.blocks}
    notes = tuple(
        Finding(
            rule="block-left-eager",
            evidence=f"block {path}",
            cause=f"it is not planned: {why}",
            fix="nothing to do, if it is a small part of the step; otherwise runtime='graph' plans it",
        )
        for path, why in left.items()
    )
    return replace(around, lowered=replace(around.lowered, warnings=notes))


def lowering(model: nn.Module, options: Options) -> Lower:
    """Return what lowers the graph of a block."""
    spec = device_spec(model, options.target.device)
    context = StepContext(alignment_bytes=spec.alignment_bytes, on_cpu=spec.kind == "cpu")
    return lambda joint, given: lower(joint, context, given)


def lower_around(step: Step, blocks: Mapping[str, Block], inputs: Inputs, options: Options) -> Around:
    """Follow the step around blocks, and lower it with those whose backward runs."""
    model = step.model
    spec = device_spec(model, options.target.device)
    everything = [*model.parameters(), *model.buffers(), *inputs.tensors()]
    around = static_memory_of(model, everything, spec, options)
    # Of the inputs only sizes and types are kept: whoever holds the step must not hold what sharding frees.
    shapes = [t.detach().to("meta") for t in inputs.tensors()]
    is_sharded = around.gradient_shards > 1
    beside = units_beside(model, blocks) if is_sharded else []
    units = _units(model, blocks, beside, options) if is_sharded else None
    accumulates = options.training.gradient_accumulation
    found = found_by_autograd(model, units.values() if units else None, accumulates=accumulates)
    modules = {unit.path: unit.modules for unit in beside}
    trace, used = step.trace(blocks, options.loss, replace(options.gradients, found=found), modules)
    if units is not None:
        units = _units(model, used, beside, options)
        around = resident(around, units, spec.alignment_bytes)
    around = around.without("gradients")  # they are seen in the step
    context = context_of(model, spec, around, options)
    facts = {key: said for key, said in how_it_trains(model, used, options).items() if said}

    def lowered_with(blocks: Mapping[str, Block]) -> LoweredGraph:
        return put_together(shapes, trace, blocks, context, units)

    lowered = LoweredStep(lowered_with(used), spec, around, {"blocks": " ".join(used), **facts})
    return Around(step, lowered, used, lowered_with)


def with_block_bytes(plan: Plan, blocks: Mapping[str, Block]) -> Plan:
    """Return a plan that says what its blocks hold, each alone."""
    graphs = {path: block.lowered.graph for path, block in blocks.items()}
    alone = sum(bytes_alone(graph, part_of(plan, path, graph)) for path, graph in graphs.items())
    return replace(plan, fingerprint={**plan.fingerprint, BLOCK_BYTES: alone})


def _units(model: nn.Module, blocks: Iterable[str], beside: Sequence[ShardedUnit], options: Options) -> Units:
    """Return the parameters of each block, of units beside them, and of the rest, as they are gathered together."""
    types, known = types_of_shares(model), {unit.path: unit.unit for unit in units_of(model)}
    path_beside = {one.name: unit.path for unit in beside for one in unit.unit.parameters}
    units: dict[str, list[Parameter]] = {path: [] for path in (*blocks, *(unit.path for unit in beside), ROOT)}
    for name, parameter in model.named_parameters():
        path = path_beside.get(name) or next((path for path in blocks if name.startswith(f"{path}.")), ROOT)
        share, spread = types.get(name, (parameter.dtype, parameter.dtype))
        units[path].append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                item_bytes=parameter.element_size(),
                share_item_bytes=share.itemsize,
                spread_item_bytes=spread.itemsize,
                trainable=parameter.requires_grad,
            )
        )
    default = {path: known.get(path, Unit(parameters=(), stays=path == ROOT)) for path in units}
    finds_gradients = options.training.gradient_accumulation
    return {
        path: replace(default[path].as_planned(finds_gradients=finds_gradients), parameters=parameters)
        for path, parameters in units.items()
    }


def bytes_alone(graph: TrainingGraph, schedule: Schedule) -> int:
    """Return what a block holds beyond what it is given, which may be part of something larger."""
    given = {v for operation in graph.operations if operation.target == GIVEN_TARGET for v in operation.outputs}
    values = [replace(value, size_bytes=0) if v in given else value for v, value in enumerate(graph.values)]
    graph = replace(graph, values=tuple(values))
    return simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), schedule).peak_bytes


class Regional(StartsCalls):
    """Plans the blocks of a step, and what is eager around them."""

    calls = RegionalRuntime
    name = "regional"
    summary = "every repeated block as planned graphs of its own, the rest eager: for DDP and FSDP2"
    runs_sharded = True
    compiler: Compiler = staticmethod(aot_backend)
    """What blocks are captured for."""

    def plan(
        self, model: nn.Module, inputs: Inputs, options: Options, *, reuse: Plan | None = None, must_match: bool = False
    ) -> Plan:
        """Plan one step; see :meth:`planner.runtimes.Runtime.plan`."""
        begun = time.perf_counter()
        captured: list[Around] = []

        def prepare() -> LoweredStep:
            options.search.tell("capturing each block")
            check_plannable(model, inputs)
            with explain_forward(model):
                captured.append(lower_regional(model, inputs, options, self.compiler))
            return replace(captured[0].lowered, capture_seconds=time.perf_counter() - begun)

        def planned(step: LoweredStep) -> Plan:
            around = replace(captured[0], lowered=step)
            return self.plan_around(model, around, options, reuse=reuse, must_match=must_match)

        return plan_together(model, prepare, options, planned)

    def plan_around(
        self, model: nn.Module, around: Around, options: Options, *, reuse: Plan | None, must_match: bool
    ) -> Plan:
        """Plan a step that was followed around its blocks."""
        plan = plan_lowered(model, around.lowered, options, reuse=reuse, must_match=must_match).plan
        return with_block_bytes(plan, around.blocks)


RUNTIME = Regional()
