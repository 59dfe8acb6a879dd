"""Units: captured modules of a step that are planned together, each run in place of its module's forward.

Between units a step is eager; that part is recorded once, with stand-ins for the units. Hooks, and so DDP's and
FSDP2's, run around a unit and not inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx, nn

from planner.capture.blocks.regions import AS_BLOCK, Block, Lower, placeholders_given
from planner.capture.blocks.regions import Step as FollowedStep
from planner.capture.blocks.whole_step import prefixed, put_together
from planner.capture.failures import explain_failures
from planner.capture.fsdp_internals import settings_of
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import NOT_CAPTURED, Backend, IsolatedCall
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph, lower
from planner.capture.model_facts import of_model, units_of
from planner.capture.parallel_events import found_by_autograd
from planner.capture.planned_call import forwards
from planner.capture.sharding import ROOT, SHARES, WHOLE, Parameter, Unit, resident
from planner.capture.torch_internals import aot_backend
from planner.errors import PlanMismatchError
from planner.ir.builder import StepContext
from planner.ir.graph import OperationCost, TrainingGraph, named_by
from planner.ir.host import UNTIMED
from planner.ir.layers import is_within
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import FINDS
from planner.measure.devices import device_spec
from planner.plans.offload import OffloadedValue, with_offloads
from planner.plans.plan import Plan
from planner.rewrite.graphs import extract_fwd_bwd
from planner.runtimes._gradients import watched
from planner.session.step import LoweredStep, Options, context_of, outputs_of, plan_lowered, static_memory_of

SHARDING = "sharding"
"""Key of a plan's fingerprint: how the model is sharded, if not by default."""

GRADIENTS_IN_BUCKETS = "gradients in DDP's buckets"

BLOCK_BYTES = "block bytes"
"""Key of a plan's fingerprint: the sum of the peaks of all blocks, each alone."""


@dataclass(frozen=True)
class Step:
    """A step: its units, and the eager operations around them."""

    followed: FollowedStep
    lowered: LoweredStep
    """With the units as they were captured."""
    units: dict[str, Block]
    """By their paths."""
    put_together: Callable[[Mapping[str, Block]], LoweredGraph]
    """Lowers the step again with other graphs of the same units."""

    def plan(self, model: nn.Module, options: Options, **known: Any) -> Plan:
        """Plan all units together; ``known`` is for :func:`planner.session.step.plan_lowered`."""
        plan = plan_lowered(model, self.lowered, options, **known).plan
        graphs = {path: unit.lowered.graph for path, unit in self.units.items()}
        alone_bytes = sum(bytes_alone(graph, part_of(plan, path, graph)) for path, graph in graphs.items())
        return replace(plan, fingerprint={**plan.fingerprint, BLOCK_BYTES: alone_bytes})


def lowering(model: nn.Module, options: Options) -> Lower:
    """Return the function that lowers a block's graph."""
    spec = device_spec(of_model(model), options.target.device)
    context = StepContext(alignment_bytes=spec.alignment_bytes, on_cpu=spec.kind == "cpu")
    return lambda joint, given: lower(joint, context, given)


def lower_around(followed: FollowedStep, captured: Mapping[str, Block], inputs: Inputs, options: Options) -> Step:
    """Record a step around its captured units, and lower it with the units whose backward runs."""
    model = followed.model
    spec = device_spec(of_model(model), options.target.device)
    everything = [*model.parameters(), *model.buffers(), *inputs.tensors()]
    around = static_memory_of(model, everything, spec, options)
    # Of the inputs only sizes and types are kept: whoever holds the step must not hold what sharding frees.
    shapes = [t.detach().to("meta") for t in inputs.tensors()]
    accumulates, sharded = options.training.gradient_accumulation, None
    if around.gradient_shards > 1:  # as the model is sharded, else each block's parameters together, and the rest
        units = units_of(model) or _by_block(model, captured)
        sharded = {unit.path: unit.as_planned(finds_gradients=accumulates) for unit in units}
    found = found_by_autograd(model, sharded.values() if sharded else None, accumulates=accumulates)
    modules = {path: unit.modules for path, unit in (sharded or {}).items()}
    trace, used = followed.trace(
        captured, options.loss, replace(options.gradients, found=found), modules, outputs_of(options)
    )
    if sharded is not None:
        around = resident(around, sharded, spec.alignment_bytes)
    around = around.without("gradients")  # they are seen in the step
    context = context_of(model, spec, around, options)
    facts = {key: said for key, said in how_it_trains(model, used, options).items() if said}

    def lowered_with(blocks: Mapping[str, Block]) -> LoweredGraph:
        return put_together(shapes, trace, blocks, context, sharded)

    lowered = LoweredStep(lowered_with(used), spec, around, {"blocks": " ".join(used), **facts})
    return Step(followed, lowered, used, lowered_with)


def how_it_trains(model: nn.Module, blocks: Collection[str], options: Options) -> dict[str, str]:
    """Describe how a model is sharded and which gradients it finds; ``""`` for the default."""
    settings = settings_of(model, blocks)
    if options.gradients.go_into_buckets:
        settings = "DDP sets gradient_as_bucket_view=True"
    accumulates = options.training.gradient_accumulation
    if units := units_of(model):
        finds = {what for unit in units for what in unit.as_planned(finds_gradients=accumulates).finds}
    elif options.training.data_parallel == "fsdp2":
        finds = {SHARES} if accumulates else set()
    else:
        finds = {GRADIENTS_IN_BUCKETS if options.gradients.are_in_buckets else WHOLE} if accumulates else set()
    found = ", ".join(f"{what} of earlier steps" for what in sorted(finds))
    return {SHARDING: settings, FINDS: found}


def _by_block(model: nn.Module, blocks: Collection[str]) -> list[Unit]:
    parameters: dict[str, list[Parameter]] = {path: [] for path in (*blocks, ROOT)}
    for name, parameter in model.named_parameters():
        path, size = next((path for path in blocks if name.startswith(f"{path}.")), ROOT), parameter.element_size()
        sizes = dict.fromkeys(("item_bytes", "share_item_bytes", "spread_item_bytes"), size)
        parameters[path].append(
            Parameter(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad, **sizes)
        )
    return [
        Unit(path=path, modules=(model.get_submodule(path),), parameters=of_it, stays=path == ROOT)
        for path, of_it in parameters.items()
    ]


def bytes_alone(graph: TrainingGraph, schedule: Schedule) -> int:
    """Return the peak of a block without its inputs, which may be part of larger storages."""
    given = {v for operation in graph.operations if operation.target == GIVEN_TARGET for v in operation.outputs}
    values = [replace(value, size_bytes=0) if v in given else value for v, value in enumerate(graph.values)]
    graph = replace(graph, values=tuple(values))
    return simulate(graph, [OperationCost(seconds=0.0)] * len(graph.operations), schedule, UNTIMED).peak_bytes


def blocks_of(plan: Plan) -> list[str]:
    """Return the paths of a plan's blocks."""
    return str(plan.fingerprint["blocks"]).split()


def decisions_on(plan: Plan, path: str) -> frozenset[Any]:
    """Return a plan's decisions on a block, under names without the block's path."""

    def own(key: str) -> str:
        return key.removeprefix(path)

    runs = plan.recomputations.items()
    again = (tuple(map(own, (key, *keys))) for key, keys in runs if is_within(named_by(key)[0], path))
    return frozenset((*again, *(value.named(own) for value in _offloading_of(plan, path))))


def _offloading_of(plan: Plan, path: str) -> tuple[OffloadedValue, ...]:
    values = plan.offloading.values if plan.offloading is not None else ()
    return tuple(value for value in values if is_within(named_by(value.operation)[0], path))


def part_of(plan: Plan, path: str, graph: TrainingGraph, *, names_may_differ: bool = False) -> Schedule:
    """Return the schedule of a block's graph under a plan for the whole step.

    Raises PlanMismatchError if the plan names operations that the block does not have, unless ``names_may_differ``:
    these are then left out, and what they would have freed is held.
    """
    operations = [*enumerate(graph.operations)]
    index_of = {prefixed(path, key): index for index, operation in operations for key in operation.keys}
    first = {prefixed(path, operation.key) for _, operation in operations}  # what is one with it runs with it
    before: dict[int, tuple[int, ...]] = {}
    for key, keys in plan.recomputations.items():
        if not is_within(named_by(key)[0], path):
            continue
        missing = [k for k in (key, *keys) if k not in index_of]
        if missing and not names_may_differ:
            raise PlanMismatchError(
                f"block {path} does not have {missing[0]}, which the plan names: it is captured differently than when "
                "the plan was made (other element types, or a mask that was not needed then?); make a new plan"
            )
        again = tuple(index_of[k] for k in keys if k in first)
        if key in index_of:
            before[index_of[key]] = (*before.get(index_of[key], ()), *again)
    schedule = Schedule.with_recomputations(graph, before)
    if not (values := _offloading_of(plan, path)):
        return schedule
    assert plan.offloading is not None
    return with_offloads(graph, schedule, replace(plan.offloading, values=values), partial(prefixed, path))


@contextmanager
def installed(model: nn.Module, planned: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Run planned blocks in place of the model's own."""
    with explain_failures(model), forwards(planned):
        yield


class PlannedUnits:
    """The blocks of a model, each with its part of a plan."""

    def __init__(self, model: nn.Module, plan: Plan, kind: type[PlannedUnit]) -> None:
        self.plan = plan
        self.held_bytes: dict[str, int] = {}
        """The highest peak of each block so far."""
        equal: dict[Any, list[PlannedUnit]] = {}
        blocks = {path: model.get_submodule(path) for path in blocks_of(plan)}
        self.forwards = {
            block: kind(self, path, block, equal.setdefault(decisions_on(plan, path), []))
            for path, block in blocks.items()
        }

    def hold(self, path: str, peak_bytes: int) -> None:
        """Note a block's peak; PlanMismatchError if all blocks together exceed what was planned."""
        self.held_bytes[path] = max(peak_bytes, self.held_bytes.get(path, 0))
        if sum(self.held_bytes.values()) > int(self.plan.fingerprint[BLOCK_BYTES]):
            raise PlanMismatchError(
                f"block {path} needs more than was planned: it is called with other sizes or element types than "
                "when the plan was made; make a new plan"
            )


class PlannedUnit:
    """A block, compiled at its first call unless an equal block's code serves it."""

    compiler: Any = staticmethod(aot_backend)
    """Makes a backend of a partition function; see :class:`planner.capture.joint_capture.Backend`."""

    def __init__(self, planned: PlannedUnits, path: str, block: nn.Module, equal: list[PlannedUnit]) -> None:
        self.planned, self.path, self._block = planned, path, block
        self._equal = equal
        """Blocks with equal decisions that have code."""
        self.code: PlannedUnit | None = None
        """The block whose code runs."""
        self.names_may_differ = False
        """Whether the graph that is written now was captured with symbols: it may have a view more, or fewer."""
        self.peaks_bytes: list[int] = []
        """Peaks of the graphs that were captured of it."""
        self.call: Any = self.captured_by(block)

    def captured_by(self, block: nn.Module) -> Any:
        """Return what captures the block's calls."""
        backend = Backend(self.partition, finish=watched, compiler=self.compiler, **AS_BLOCK)
        return IsolatedCall(block, block.forward, backend)

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], of: PlannedUnit) -> Any:
        """Run what was captured for a call of an equal block, or return ``NOT_CAPTURED``."""
        return self.call.known(args, kwargs, of.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, by an equal block's code if Dynamo's guards hold for it."""
        if self.code is None:
            for other in self._equal:
                if len(other.peaks_bytes) != 1:
                    continue  # which of its graphs would run, and so what it holds, is not known
                result = other.known(args, kwargs, self)
                if result is not NOT_CAPTURED:
                    self.code = other
                    self.planned.hold(self.path, *other.peaks_bytes)
                    return result
            self.code = self
            self._equal.append(self)
        result = NOT_CAPTURED if self.code is self else self.code.known(args, kwargs, self)
        return self.captured(args, kwargs) if result is NOT_CAPTURED else result

    def captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block by its own code, captured first where there is none."""
        return self.call(*args, **kwargs)

    def partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Write the forward and backward of a captured graph."""
        given = placeholders_given(joint, [*self._block.parameters(), *self._block.buffers()])
        return self.parted(lower(joint, StepContext(alignment_bytes=1), given), given)

    def parted(self, lowered: LoweredGraph, _given: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward that carry out the block's part of the plan."""
        schedule = part_of(self.planned.plan, self.path, lowered.graph, names_may_differ=self.names_may_differ)
        self.hold(bytes_alone(lowered.graph, schedule))
        return extract_fwd_bwd(lowered, schedule)

    def hold(self, peak_bytes: int) -> None:
        """Record the peak of one graph of the block; one of them runs in a step."""
        self.peaks_bytes.append(peak_bytes)
        self.planned.hold(self.path, peak_bytes)
