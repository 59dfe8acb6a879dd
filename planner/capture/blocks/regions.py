"""Capture repeated blocks, or the largest modules that can be, and record the eager step around them.

That step runs on fake tensors, with a stand-in for every block that has its inputs and outputs and no insides. Around
the blocks it is eager PyTorch, so it is followed and not modelled: what runs, and when each storage is freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from traceback import walk_stack
from typing import Any

import torch
from torch import fx, nn

from planner.capture import torch_internals as internals
from planner.capture.autograd_accumulation import EngineSums
from planner.capture.fake_internals import mode_of
from planner.capture.hugging_face import as_with_data, masking_of
from planner.capture.inputs import Inputs, OutsideLoss, alike, are_dropped, differentiated, of_its_kind, state_of
from planner.capture.joint import JointGraph, reach_of, tensors_of, written_by
from planner.capture.joint_capture import Captures, Partition, differentiable_outputs, until_stopped
from planner.capture.lowering import GIVEN_TARGET, LoweredGraph
from planner.capture.model_facts import kinds_of
from planner.capture.parallel_events import Gradients, UnitCalls
from planner.capture.planned_call import forwards, parts_as_written
from planner.capture.state_restore import RandomStates, put_back, written_back
from planner.capture.storages import Run, StepRecorder
from planner.capture.target_device import TargetDevice, calls_of
from planner.capture.trees import leaves_of, mapped, tensors_in
from planner.common.options import HELD
from planner.errors import CaptureError, UnsupportedModelError
from planner.ir.graph import Phase
from planner.ir.layers import find_blocks, is_within
from planner.ir.static_memory import LossMemory

AS_BLOCK: dict[str, Any] = {"choose_outputs": differentiable_outputs, "branches": False}
"""How the call of a block is captured."""

Lower = Callable[[JointGraph, list[fx.Node]], LoweredGraph]
"""Lowers the graph of a block, of which some placeholders are given by the rest of the step."""


@dataclass(frozen=True)
class Block:
    """A block captured on its own, with fake tensors in place of what it was called with."""

    path: str
    lowered: LoweredGraph
    places: list[torch.Tensor | int]
    """For every placeholder the fake parameter or buffer, or which of the call's tensors it is."""
    given: list[fx.Node]
    """The placeholders that are tensors of the call."""
    outputs: list[fx.Node]
    """The nodes of its results, in the order of their tensors."""
    results: Any
    """What it gave, on fake tensors."""
    inputs: Inputs
    """What it was called with, as fake tensors."""

    @property
    def tangents(self) -> list[tuple[fx.Node, int]]:
        """The backward's placeholders, each with the index of the output whose gradient it is."""
        joint = self.lowered.joint
        raw = joint.output_descriptors[0]
        descriptors = [node.meta["desc"] for node in joint.tangents]
        results = [joint.outputs[0][raw.index(descriptor.output)] for descriptor in descriptors]
        return [(node, self.outputs.index(result)) for node, result in zip(joint.tangents, results, strict=True)]

    def held_of(self, arrived: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the gradients of outputs that autograd holds to the end of the backward.

        None, but where some do not come: then what runs the block has a hook on its end, which is told of them.
        """
        is_watched = reach_of(self.lowered.joint) is not None and any(arrived[at] is None for _, at in self.tangents)
        return [gradient for gradient in arrived if is_watched and gradient is not None]

    def value(self, node: fx.Node) -> int:
        """Return the value that a node's output is, or is a view of."""
        (value,) = self.lowered.storage_of[node]
        return value


@dataclass(frozen=True)
class SeenCall:
    """A call of a module in a forward, with fake tensors in place of what it was given and gave back."""

    module: nn.Module
    inputs: Inputs
    outputs: Any
    has_settings: bool
    """Whether the model has switched gradients or autocast around it."""


@dataclass
class Passage:
    """The forward of a block, its backward, or the loss.

    ``reads`` are storages; for a block, one for each given placeholder or for each tangent, None for what is resident.
    ``makes`` are too; for a block from its own values to them.
    """

    phase: Phase
    module: str = ""
    reads: Sequence[int | None] = ()
    makes: dict[int, int] = field(default_factory=dict)


class Recorder(StepRecorder[Passage]):
    """Records a step on fake tensors, under their mode."""

    def __init__(self, fakes: Any, sums: EngineSums, resident: Any, names: dict[nn.Module, str]) -> None:
        super().__init__(fakes, sums, resident, names)
        self.checkpoints = False
        """Whether something ran under ``torch.utils.checkpoint``."""
        self.found: list[int] = []
        """Storages of gradients that earlier backwards have left."""
        self.gradients: dict[str, int] = {}
        """The storage of each parameter's gradient at the end, by the parameter's name."""
        self._turns: list[int] = []
        self._at_work: list[str] = []
        """From the operation of each number on, in forward order, the module that is at work."""

    def passage(self, phase: Phase, module: str = "", reads: Sequence[int | None] = ()) -> Passage:
        """Begin a passage; storages freed from now on are freed after it."""
        self.checkpoints |= _is_checkpointed()
        passage = Passage(phase, module, reads)
        self.events.append(passage)
        return passage

    def note(self, function: Any, args: Any, kwargs: Any, result: Any) -> Run | None:
        """Record a call, and the call whose derivative it belongs to."""
        run = super().note(function, args, kwargs, result)
        self.checkpoints |= _is_checkpointed()
        if run is not None and (number := internals.number_at_work()) is not None:
            turn = bisect_right(self._turns, number)
            run.derivative_of = self._at_work[turn - 1] if turn else ""
        return run

    def entered(self, module: nn.Module, inputs: Any) -> None:
        """Note that a module's forward begins."""
        super().entered(module, inputs)
        self._turn()

    def left(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note that a module's forward ends."""
        super().left(module, inputs, outputs)
        self._turn()

    @contextmanager
    def caller(self) -> Iterator[None]:
        """Attribute the derivative to the calling module."""
        *outside, inside = self.within
        self.within = outside
        self._turn()
        try:
            yield
        finally:
            self.within.append(inside)
            self._turn()

    def _turn(self) -> None:
        self._turns.append(internals.next_number())
        self._at_work.append(self.module)


def _is_checkpointed() -> bool:
    return any(frame.f_code is internals.CHECKPOINT for frame, _ in walk_stack(None))


class Step:
    """One step of a model, which is left as it was: on fake tensors, or a real one, where data decide what runs."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, elsewhere: TargetDevice | None = None, *, real: bool = False
    ) -> None:
        self.model, self.elsewhere, self.is_real = model, elsewhere, real
        self.begins_with: RandomStates | None = None
        """The random states that a step begins with, where these are not the ones at hand."""
        self.masking = masking_of(model, inputs)
        state = state_of(model)
        self.mode = mode_of([*state.values(), *inputs.tensors()])
        fakes = {id(tensor): self._fake(tensor) for tensor in state.values()}
        self.state = {name: fakes[id(tensor)] for name, tensor in state.items()}
        self._fakes = fakes
        self.inputs = inputs.map_tensors((lambda x: x.detach().requires_grad_(x.requires_grad)) if real else self._fake)
        self.known = [*(state.values() if real else fakes.values()), *self.inputs.tensors()]
        self.checkpoints = False
        """Whether the step that was traced last calls ``torch.utils.checkpoint`` itself."""
        self.draws = False
        """Whether the forward that was followed last drew from a random state."""
        self._meant = {id(fakes[id(tensor)]): tensor for tensor in state.values()} if real else {}
        """By the identity of what stands for it in captures, the tensor that a real step has."""

    def find_blocks(self) -> dict[str, nn.Module]:
        """Return the blocks of the model that have parameters, by their paths; see :mod:`planner.ir.layers`."""
        recorder = self._recorder()
        with self._following({}, recorder):
            self._forward()
        forward = Counter(event.module for event in recorder.events if isinstance(event, Run))
        found = {path: self.model.get_submodule(path) for path in find_blocks(forward, kinds_of(self.model))}
        return {path: block for path, block in found.items() if any(True for _ in block.parameters())}

    def capture_blocks(
        self, lower: Lower, compiler: internals.Compiler = internals.aot_backend
    ) -> tuple[dict[str, Block], dict[str, str]]:
        """Capture every block that can be captured; return the reasons for the others, by their paths."""
        return self._capture(self._seen(self.find_blocks()), lower, compiler)

    def _capture(
        self, seen: Mapping[str, Sequence[SeenCall]], lower: Lower, compiler: internals.Compiler = internals.aot_backend
    ) -> tuple[dict[str, Block], dict[str, str]]:
        """Capture modules in their order, but for what is inside one that was."""
        blocks: dict[str, Block] = {}
        left: dict[str, str] = {}
        captures = Captures(elsewhere=self.elsewhere, compiler=compiler, **AS_BLOCK)
        for path, calls in seen.items():
            if any(is_within(path, outer) for outer in blocks):
                continue
            try:
                blocks[path] = self._captured(path, calls, captures, lower)
            except CaptureError as error:
                left[path] = str(error)
        return blocks, left

    def _captured(self, path: str, calls: Sequence[SeenCall], captures: Captures, lower: Lower) -> Block:
        if len(calls) > 1:
            raise UnsupportedModelError(f"it is called {len(calls)} times in a step")
        call = calls[0]
        if call.has_settings:
            raise UnsupportedModelError("it is called under settings of its own (autocast, no_grad)")
        own = self.state_of(path)
        with internals.other_state(call.module, own):
            joint = captures.of(call.module, call.inputs, call.module.forward)
        return _block(path, joint, own, call.inputs, call.outputs, lower)

    def state_of(self, path: str) -> dict[str, torch.Tensor]:
        """Return the fake parameters and buffers of a module."""
        state = state_of(self.model.get_submodule(path))
        return {name: self._fakes[id(tensor)] for name, tensor in state.items()}

    def compiled(self, block: Block, partition: Partition, compiler: internals.Compiler) -> Any:
        """Compile a block until :class:`Stopped` is raised, and return its argument."""
        module = self.model.get_submodule(block.path)
        with internals.other_state(module, self.state_of(block.path)):
            return until_stopped(
                module, block.inputs, partition, implementation=module.forward, compiler=compiler, **AS_BLOCK
            )

    def calls(self) -> dict[str, list[SeenCall]]:
        """Run a forward, and return the calls of every module in it, by its path."""
        return self._seen({path: module for path, module in self.model.named_modules() if path})

    def capture_parts(
        self, seen: Mapping[str, Sequence[SeenCall]], lower: Lower
    ) -> tuple[dict[str, Block], dict[str, str]]:
        """Capture the largest modules that can be captured; return the reasons for the others that run.

        Modules of torch's own that have no parts are left out: there is nothing inside them to choose from.
        """
        return self._capture({path: calls for path, calls in seen.items() if not _is_single(calls[0].module)}, lower)

    def trace(
        self,
        blocks: Mapping[str, Block],
        loss: LossMemory | None = None,
        gradients: Gradients | None = None,
        units: Mapping[str, Sequence[nn.Module]] | None = None,
        outputs: str = HELD,
    ) -> tuple[Recorder, dict[str, Block]]:
        """Record the step with stand-ins for blocks; with a known loss the gradients of outputs are freed after use.

        ``outputs`` are held or dropped, see :class:`planner.common.options.Training`.

        ``units`` are the modules that FSDP2 gathers together, by the path of the first; their turns are noted.

        A block whose backward does not run saves all the same, for as long as what it returned lives. That is what
        eager does, so it is recorded as eager, and left out of the blocks that come second.
        """
        recorder = self._recorder()
        replacing: dict[nn.Module, Callable[..., Any]] = {
            self.model.get_submodule(path): self._stand_in(block, recorder) for path, block in blocks.items()
        }
        for path, modules in (units or {}).items():
            calls = UnitCalls(path, modules)
            for each in modules:
                run = replacing.get(each, each.forward)
                replacing[each] = partial(calls.followed, recorder.turn, each, run)
        found = (gradients or Gradients()).followed(recorder, self.state)
        with self._following(replacing, recorder), found as recorder.found:
            self._follow(recorder, loss, outputs)
        self.checkpoints = recorder.checkpoints
        differentiated = {p.module for p in recorder.events if isinstance(p, Passage) and p.phase is Phase.BACKWARD}
        used = {path: block for path, block in blocks.items() if path in differentiated or not block.tangents}
        if blocks and not used:
            raise CaptureError(f"no backward of {next(iter(blocks))} or another captured module runs")
        return (recorder, used) if len(used) == len(blocks) else self.trace(used, loss, gradients, units, outputs)

    def _stand_in(self, block: Block, recorder: Recorder) -> _StandIn:
        places = [self._meant.get(id(place), place) for place in block.places]
        return _StandIn(block, recorder, places, self.model.get_submodule(block.path).forward if self.is_real else None)

    def _recorder(self) -> Recorder:
        with nullcontext() if self.is_real else self.mode:
            sums = EngineSums(self.known[0].device)
        return Recorder(self.mode, sums, self.known, {module: name for name, module in self.model.named_modules()})

    def _forward(self) -> Any:
        return internals.call_implementation(self.model)(*self.inputs.args, **self.inputs.kwargs)

    def _follow(self, recorder: Recorder, loss: LossMemory | None, outputs: str) -> None:
        tensors = tensors_in(self._forward())
        torch.clear_autocast_cache()  # as where a loop's forward ends
        recorder.mark(tensors, "output")
        losses = differentiated(tensors, loss)
        if not losses:
            raise CaptureError(f"{type(self.model).__name__} needs no backward: no output requires gradients")
        recorder.sums.watch(losses)
        passage = recorder.passage(Phase.LOSS, reads=recorder.numbers(tensors))
        like = [(t.shape, t.dtype, t.device) for t in losses]
        if are_dropped(outputs, losses, loss):
            tensors = [t for t in tensors if not t.dim()]

        def tangents() -> list[torch.Tensor]:
            with recorder.silent():
                made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            passage.makes = {i: recorder.made(t, kind="tangent") for i, t in enumerate(made)}
            return made

        if loss is not None:
            with recorder.silent():
                value = OutsideLoss.apply(tangents, *losses)
                start = torch.ones_like(value)
            losses.clear()  # nobody else may hold them
            torch.autograd.backward([value], [start])
        else:
            torch.autograd.backward(losses, tangents())
        recorder.mark([tensor.grad for tensor in self.known], "gradient")
        recorder.gradients = recorder.gradients_of(self.state.items())
        recorder.finish()
        for tensor in self.known:
            tensor.grad = None

    def _seen(self, modules: Mapping[str, nn.Module]) -> dict[str, list[SeenCall]]:
        seen: dict[str, list[SeenCall]] = {path: [] for path in modules}
        around: Any = None

        def run(path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            has_settings = _settings(self.known[0].device) != around
            with self.mode:
                like = cache(alike)  # one tensor for one that is given twice
                inputs = Inputs(args, kwargs).map_tensors(like)
            outputs = forward(*args, **kwargs)
            with self.mode:
                noted = mapped(alike, outputs)
            seen[path].append(SeenCall(module, inputs, noted, has_settings))
            return outputs

        with self._following({module: partial(run, path, module, module.forward) for path, module in modules.items()}):
            around = _settings(self.known[0].device)
            before = RandomStates()
            self._forward()
            self.draws = before != RandomStates()
        return {path: calls for path, calls in seen.items() if calls}

    @contextmanager
    def _following(
        self, replacing: Mapping[nn.Module, Callable[..., Any]], recorder: Recorder | None = None
    ) -> Iterator[None]:
        """Run the model's code on fake tensors, with some modules' forwards replaced."""
        with (
            put_back(self.model, self.inputs),
            parts_as_written(self.model),
            forwards(replacing),
            recorder.modules() if recorder else nullcontext(),
            written_back(self.known) if self.is_real else self._without_data(),
            torch.enable_grad(),
            recorder or nullcontext(),
        ):
            if self.begins_with is not None:
                self.begins_with.restore()
            torch.clear_autocast_cache()  # copies that were made when the model was followed before would go unseen
            yield

    @contextmanager
    def _without_data(self) -> Iterator[None]:
        in_their_place = internals.other_state(self.model, self.state)
        with as_with_data(self.masking), calls_of(self.elsewhere), self.mode, in_their_place:
            yield

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, internals.FakeTensor):
            return tensor
        with self.mode:
            return of_its_kind(tensor)


def _block(
    path: str, joint: JointGraph, own: Mapping[str, torch.Tensor], inputs: Inputs, outputs: Any, lower: Lower
) -> Block:
    position_of = {id(tensor): position for position, tensor in enumerate(inputs.tensors())}
    places = [position_of.get(id(tensor), tensor) for tensor in joint.inputs]
    given = placeholders_given(joint, own.values())
    raw = [n for n in joint.outputs[0] if isinstance(n, fx.Node)]
    if [t.shape for t in tensors_in(outputs)] != [t.shape for n in raw for t in tensors_of(n)]:
        raise UnsupportedModelError(f"block {path} overwrites an input, or returns one")
    lowered = lower(joint, given)
    crossing = [n for n in (*raw, *joint.outputs[1]) if isinstance(n, fx.Node)]
    made_here = {v for o in lowered.graph.operations if o.target != GIVEN_TARGET for v in o.outputs}
    if any(len(lowered.storage_of[n]) != 1 or lowered.storage_of[n][0] not in made_here for n in crossing):
        raise UnsupportedModelError(f"block {path} returns a view of an input")
    if any(not isinstance(place, int) for node, place in zip(joint.placeholders, places, strict=True) if node in given):
        raise UnsupportedModelError(f"block {path} reads a tensor that is neither its own nor an input")
    if not all(x is None or isinstance(x, (torch.Tensor, bool, int, float, str)) for x in leaves_of(outputs)):
        raise UnsupportedModelError(f"block {path} returns an object that may contain tensors")
    if any(written in given for node in joint.graph.nodes for written in written_by(node)):
        raise UnsupportedModelError(f"block {path} writes into an input")
    return Block(path, lowered, places, given, raw, outputs, inputs)


def placeholders_given(joint: JointGraph, own: Iterable[torch.Tensor]) -> list[fx.Node]:
    """Return the placeholders of a block's graph that are not the block's own parameters and buffers."""
    known = {id(tensor) for tensor in own}
    return [node for node, tensor in zip(joint.placeholders, joint.inputs, strict=True) if id(tensor) not in known]


def _is_single(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that has no parts."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Return what a forward may switch around a call of a module."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), internals.autocast_dtype(device.type)


class _StandIn:
    """Stands for a block while the step around it is recorded; in a real step ``forward`` gives its outputs."""

    def __init__(
        self, block: Block, recorder: Recorder, places: Sequence[torch.Tensor | int], forward: Callable[..., Any] | None
    ) -> None:
        self.block, self.recorder, self.places, self.forward = block, recorder, places, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = Inputs(args, kwargs).tensors()
        given = [called[place] if isinstance(place, int) else place for place in self.places]
        results = self.block.results
        with self.recorder.caller():
            made = _Through.apply(self, *given)
        if self.forward is not None:
            with self.recorder.silent(), torch.no_grad():
                results = self.forward(*args, **kwargs)
                for tensor, result in zip(made, tensors_in(results), strict=True):
                    tensor.copy_(result)
        left = iter(made)
        return mapped(lambda _: next(left), results)

    def like(self, node: fx.Node) -> torch.Tensor:
        """Return a tensor with the layout of what a node makes, of the kind that the step runs on."""
        (like,) = tensors_of(node)
        if self.forward is None:
            return like
        with self.recorder.silent():
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def new(self, nodes: list[Any], made: dict[int, int]) -> list[torch.Tensor | None]:
        """Allocate tensors for nodes that leave the block, one storage for each value."""
        bases: dict[int, torch.Tensor] = {}

        def tensor_of(node: fx.Node) -> torch.Tensor:
            (like,) = tensors_of(node)
            value = self.block.value(node)
            if value in bases:
                return bases[value].as_strided(like.shape, like.stride(), like.storage_offset())
            bases[value] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            if self.forward is not None:
                bases[value].zero_()  # a real step goes on with it
            made[value] = self.recorder.made(bases[value])
            return bases[value]

        with self.recorder.silent():
            return [tensor_of(node) if isinstance(node, fx.Node) else None for node in nodes]


class _Through(torch.autograd.Function):
    """Autograd function in place of a block: runs and saves nothing, since the block's own graph does.

    It takes gradients as AOTAutograd's function does: where torch knows ``boxed_grads_call`` in a list that
    it may empty, so that each is freed after its last use; else in a tuple that lives as long as the call.
    """

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, stand_in: _StandIn, *tensors: torch.Tensor) -> Any:
        block, recorder = stand_in.block, stand_in.recorder
        ctx.set_materialize_grads(False)
        ctx.stand_in = stand_in
        given = dict(zip(block.lowered.joint.placeholders, tensors, strict=True))
        passage = recorder.passage(Phase.FORWARD, block.path, [recorder.number(given[node]) for node in block.given])
        made = stand_in.new(block.outputs, passage.makes)
        differentiable = {position for _, position in block.tangents}
        ctx.mark_non_differentiable(*(t for i, t in enumerate(made) if i not in differentiable))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        stand_in: _StandIn = ctx.stand_in
        block, recorder = stand_in.block, stand_in.recorder
        if torch.is_grad_enabled():  # forces are derivatives of an energy, say
            raise CaptureError(f"the forward differentiates {block.path} twice (create_graph=True)")
        boxed: list[Any] = arrived[0] if arrived and isinstance(arrived[0], list) else list(arrived)
        held, tangents = block.held_of(boxed), []
        for node, position in block.tangents:
            like = stand_in.like(node)
            tangent = boxed[position]
            if tangent is None:
                tangent = torch.zeros_like(like)
            elif tangent.stride() != like.stride():  # as AOTAutograd does, which compiled for one layout
                tangent = torch.empty_like(like).copy_(tangent)
            tangents.append(tangent)
        reads = [recorder.number(tangent) for tangent in tangents]
        tangent = None
        tangents.clear()
        boxed.clear()  # what is freed by that lives as long as the block's own operations read it
        passage = recorder.passage(Phase.BACKWARD, block.path, reads)
        gradients = stand_in.new(block.lowered.joint.outputs[1], passage.makes)
        held.clear()
        return (None, *gradients)
