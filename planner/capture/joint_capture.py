"""Capture a model's forward and backward as one joint graph, for planning and for running.

Dynamo captures the call, AOTAutograd traces it, and our partition function receives the joint graph. Planning stops
there (:func:`capture`); running goes on with the graphs that ``planner.rewrite.graphs`` writes.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from planner.capture.branches import Branches, branches_decided, example_of, take_out
from planner.capture.capture_speedups import nothing_beside
from planner.capture.common_subexpressions import eliminate_common_subexpressions
from planner.capture.failures import explain_failures, explain_forward, first_line, raised_at
from planner.capture.fake_internals import is_without_data, mode_of, shapes_of_capture
from planner.capture.fake_kernels import eager_results, kernel_types_and_views
from planner.capture.hugging_face import install_output_hooks
from planner.capture.in_place import merge_windows, update_in_place
from planner.capture.inputs import Inputs, Varying, check_capturable, expected_losses, state_of
from planner.capture.joint import JointGraph, drop_unused_statistics, tensors_of
from planner.capture.module_internals import hooks_on_all_modules, switches_and_sizes
from planner.capture.planned_call import as_its_class, parts_as_written
from planner.capture.programs import MakeProgram, Program, Programs, may_stand_in, plainly
from planner.capture.provenance import places_of, short_path
from planner.capture.state_restore import put_back, random_states_kept
from planner.capture.symbolic import OtherProgramError
from planner.capture.target_device import TargetDevice, meant
from planner.capture.torch_internals import (
    GUARDS_PARAMETERS,
    Compiler,
    FakeTensor,
    FakeTensorMode,
    OwnedFunction,
    TorchDynamoException,
    aot_backend,
    call_implementation,
    dynamo_settings,
    hint_of,
    holding,
    is_drawn,
    other_state,
    storage_id,
    with_symbolic_sizes,
)
from planner.capture.tracing_internals import Answers, answering, leaves_results
from planner.errors import CaptureError, PlannerError, UnsupportedModelError
from planner.ir.static_memory import LossMemory

Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]

ChooseOutputs = Callable[[fx.GraphModule], list[int]]

_counter = itertools.count()

_log = logging.getLogger("planner")


class Stopped(BaseException):
    """Carries a result out of the compiler past every ``except Exception``."""

    def __str__(self) -> str:
        return "stopped"  # torch notes it down, and every tensor of the result would be printed


@contextmanager
def run_without_data(model: nn.Module, inputs: Inputs) -> Iterator[tuple[FakeTensorMode, Any, Any]]:
    """Run a model on inputs without data, in the mode that is given first, beside what it returns and what it read.

    When the block ends the model is as it was.
    """
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    mode = mode_of([*state.values(), *inputs.tensors()])

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    fakes = inputs.map_tensors(fake)
    with put_back(model, inputs), parts_as_written(model), mode:
        with torch.enable_grad(), other_state(model, {name: fake(tensor) for name, tensor in state.items()}):
            outputs = call_implementation(model)(*fakes.args, **fakes.kwargs)
        yield mode, outputs, (fakes.args, fakes.kwargs, list(state.values()))


def capture(model: nn.Module, inputs: Inputs, **options: Any) -> JointGraph:
    """Capture forward and backward of one call as a joint graph; nothing is run. About 1 ms for each fx node.

    The model, real or built under :func:`fake_mode`, is left as it was. Options are those of :func:`until_stopped`.
    A CaptureError names the line and the cause if the model cannot be captured whole.
    """
    return until_stopped(model, inputs, _stop, **options)


def _stop(joint: JointGraph) -> Any:
    raise Stopped(joint)


def until_stopped(
    model: nn.Module,
    inputs: Inputs,
    partition: Partition,
    *,
    implementation: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Compile one call until :class:`Stopped` is raised, and return its argument.

    ``implementation`` is captured in place of the model's call: its ``forward``, say, without its hooks. For the other
    options see :class:`Backend`.
    """
    call = IsolatedCall(model, implementation or call_implementation(model), Backend(partition, **options))
    check_capturable(model, inputs)
    return until_stopped_by(model, lambda: call(*inputs.args, **inputs.kwargs))


def until_stopped_by(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a call of a model until :class:`Stopped` is raised, and return its argument."""
    try:
        with explain_forward(model), random_states_kept(), torch.enable_grad(), as_its_class(model):
            run()
    except Stopped as stopped:
        return stopped.args[0]
    raise CaptureError(
        f"{type(model).__name__} needs no backward: no parameter and no input that requires gradients "
        "leads to an output (is everything frozen?)"
    )


class Captures:
    """Captures calls of modules, and reuses a capture whose guards hold."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._calls: list[IsolatedCall] = []

    def of(self, module: nn.Module, inputs: Inputs, implementation: Callable[..., Any]) -> JointGraph:
        """Return the graph of a call with the module's own tensors for inputs, as :func:`capture` does."""
        own = IsolatedCall(module, implementation, _SharedCapture(_stop, **self._options))

        def run() -> None:
            for call in self._calls:
                call.known(inputs.args, inputs.kwargs, own)
            self._calls.append(own)
            own(*inputs.args, **inputs.kwargs)

        check_capturable(module, inputs)
        return until_stopped_by(module, run)


_AS_WRITTEN = {"L['implementation'].__self__": "self", "L['args']": "args", "L['kwargs']": "kwargs"}
"""What Dynamo calls, in the function that it compiles, what a module's author writes."""

NOT_CAPTURED = object()
"""What a call that has no graph returns instead of its result."""


class IsolatedCall:
    """A module's call, or its ``forward``, compiled with a :class:`Backend`; it shares no graph with any other."""

    def __init__(self, module: nn.Module, implementation: Callable[..., Any], backend: Backend) -> None:
        self.module, self.implementation, self._backend = module, implementation, backend
        self._answers = Answers()
        """What the program was answered when it was last captured."""
        self._functions: dict[Any, OwnedFunction] = {}
        """What is compiled, for each state that guards do not see; before torch 2.13 they see not what trains."""
        self._forwards: dict[type[nn.Module], Any] = {}
        """The forwards that classes had when they were captured: guards see only one that an object has of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph for these arguments; capture it first if there is none."""
        result = self.known(args, kwargs)
        if result is NOT_CAPTURED:
            result = self._captured(args, kwargs)
            kinds = {type(module) for module in self.module.modules()}
            # One that is another object whenever it is asked for cannot be compared.
            self._forwards = {kind: kind.forward for kind in kinds if kind.forward is kind.forward}
        # Where torch leaves the function alone (it is being exported, say) nothing is planned.
        return self.implementation(*args, **kwargs) if result is NOT_CAPTURED else result

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], of: IsolatedCall | None = None) -> Any:
        """Run the graph whose guards hold for these arguments, or return ``NOT_CAPTURED``.

        ``of`` is the call of another module: a graph serves it too where guards see no difference between the two.
        """
        call = of or self
        return self._function(call.module).run((call.implementation, *args), kwargs)

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the guard of the last capture that a call fails, as Python; ``""`` if none fails."""
        given = {"implementation": self.implementation, "args": args, "kwargs": kwargs}
        condition, *lines = self._function(self.module).difference(given).split("  # ")
        for name, as_written in _AS_WRITTEN.items():
            condition = condition.replace(name, as_written)
        at = f" (at {lines[-1].rpartition('/')[2]})" if lines else ""
        return f"{condition.strip()}{at}"

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        install_output_hooks(self.module, kwargs)
        work = _Work(self._backend)
        deciding = branches_decided() if self._backend.branches else nullcontext()
        quiet, typed = nothing_beside(), kernel_types_and_views()
        with random_states_kept(if_it_fails=True), dynamo_settings(), quiet, deciding, typed, holding(_work, work):
            try:
                return self._compiled(args, kwargs)
            except TorchDynamoException:
                raise
            except Exception:
                if work.is_done:
                    raise  # the graph is there, and it is its run that fails
                with explain_forward(self.module):
                    raise
            finally:
                for shapes in work.shapes:
                    # Its guards are written, and these inputs are in a cycle through autograd's nodes, never collected.
                    shapes.tracked_fakes = None

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile the call and run it; ``is_compiling`` is true in it only if eager's code cannot be captured."""
        answers = Answers(self._answers.told_yes)
        while True:
            try:
                with answering(answers):
                    given = (self.implementation, *args)
                    result = self._function(self.module).compiled(_backend_at_work, given, kwargs)
            except TorchDynamoException as refusal:
                others = answers.after(refusal) if _is_of_capture(refusal) else None
                if others is None:
                    raise
                answers = others
            except Stopped:
                self._captured_with(answers, args, kwargs)
                raise
            else:
                self._captured_with(answers, args, kwargs)
                return result

    def _captured_with(self, answers: Answers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the answers, and say which of them are not eager's; without data a mask cannot be looked at anyway."""
        given = chain(state_of(self.module).values(), Inputs(args, kwargs).tensors())
        if not any(map(is_without_data, given)):
            lines = {at: why for (at, *_), why in answers.told_yes.items()}
            for at in lines.keys() - {at for at, *_ in self._answers.told_yes}:
                self._say(*at, lines[at])
        self._answers = answers

    def _say(self, code: CodeType, line: int, why: str) -> None:
        warnings.warn(
            f"{type(self.module).__name__} asks whether it is compiled (at {short_path(code.co_filename)}:{line}). The "
            f"answer is yes, because its eager branch cannot be captured ({first_line(why)}), so results may differ "
            "from eager; planner.verify compares the two",
            stacklevel=2,
        )

    def _function(self, module: nn.Module) -> OwnedFunction:
        if any(kind.forward is not forward for kind, forward in self._forwards.items()):
            self._functions, self._forwards = {}, {}
        state = hooks_on_all_modules(), None if GUARDS_PARAMETERS else switches_and_sizes(module)
        if state not in self._functions:

            def planned(implementation: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                return implementation(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else NOT_CAPTURED

            self._functions[state] = OwnedFunction(planned, f"planned_{next(_counter)}")
        return self._functions[state]


class CallOfAnySize:
    """A module's call, captured at the sizes of a call or, where these vary, with symbols."""

    def __init__(self, module: nn.Module, implementation: Callable[..., Any], backend: Backend) -> None:
        self._module = module
        self.fixed, self.sized = (IsolatedCall(module, implementation, backend) for _ in range(2))
        self.may_vary = True
        """Whether no capture with symbols has failed."""

    def known(self, args: tuple[Any, ...], kwargs: dict[str, Any], of: CallOfAnySize | None = None) -> Any:
        """Run what was captured for a call, perhaps ``of`` an equal module, or return ``NOT_CAPTURED``."""
        fixed, sized = (of.fixed, of.sized) if of is not None else (None, None)
        result = self.fixed.known(args, kwargs, fixed)
        if result is NOT_CAPTURED:
            with suppress(OtherProgramError):  # raised before anything was run
                return self.sized.known(args, kwargs, sized)
        return result

    def captured(self, inputs: Inputs, symbolic: Sequence[Varying]) -> Any:
        """Capture and run a call, with varying sizes as symbols if possible, else with fixed sizes."""
        fails = False
        if symbolic:
            try:
                with with_symbolic_sizes(symbolic), explain_failures(self._module):
                    return self.sized(*inputs.args, **inputs.kwargs)
            except OtherProgramError:
                pass
            except CaptureError as error:
                _log.info("sizes that vary cannot be symbols, so each is captured: %s", error)
                fails = True
        result = self.fixed(*inputs.args, **inputs.kwargs)
        self.may_vary = self.may_vary and not fails  # it is the symbols that cannot be captured
        return result


def _is_of_capture(refusal: TorchDynamoException) -> bool:
    """Whether an error is about capturing the program, not about planning it."""
    inner = getattr(refusal, "inner_exception", None)
    return isinstance(inner, CaptureError) or not isinstance(inner, PlannerError)


@dataclass
class _Work:
    """A call that is being compiled."""

    backend: Backend
    begun: float = field(default_factory=time.perf_counter)
    is_done: bool = False
    shapes: list[Any] = field(default_factory=list)
    """Torch's record of the sizes of its inputs."""


_work: ContextVar[_Work] = ContextVar("call that is being compiled")


def _backend_at_work(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile by the backend of the current capture: torch keeps every backend that it was ever given."""
    work = _work.get()
    work.shapes.append(shapes_of_capture())
    with _explain_unknown_sizes(graph_module):
        run = work.backend(graph_module, example_inputs)
    work.is_done = True
    return run


@contextmanager
def _explain_unknown_sizes(graph_module: fx.GraphModule) -> Iterator[None]:
    """Explain captures that fail because sizes or positions depend on data."""
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, PlannerError) and not isinstance(error, UnsupportedModelError)
        unknown = None if is_known else next(filter(_is_unknown, graph_module.graph.nodes), None)
        if unknown is None:
            raise
        if isinstance(unknown.meta["example_value"], torch.Tensor):
            source = places_of(graph_module.graph)[unknown].source
            called = getattr(unknown.target, "__name__", None) or str(unknown.target)
            what = f"with the result of {called}, whose size depends on data{f' (at {source})' if source else ''}"
        else:
            what = f"with a whole number that it draws or reads from a tensor (randint, int(x)){raised_at(error)}"
        raise CaptureError(f"the forward computes {what}, so sizes or positions differ from call to call") from error


def _is_unknown(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return any(map(is_drawn, value.shape if isinstance(value, torch.Tensor) else [value]))


@dataclass(frozen=True, eq=False)
class Backend:
    """A ``torch.compile`` backend around a partition function.

    Outputs that carry no loss are detached first, or their gradients, all zeros, would be allocated and computed with.
    ``planner.runtimes.graph`` gives them a way back for the step in which a gradient does arrive.
    """

    partition: Partition
    _: KW_ONLY
    choose_outputs: ChooseOutputs | None = None
    """The positions of the outputs that a backward starts from; :func:`loss_outputs` if nothing is said."""
    finish: Callable[..., Callable[..., Any]] | None = None
    """``finish(run, graph_module, differentiable, joint)`` wraps what AOTAutograd returns; without a joint graph
    nothing requires gradients."""
    make_program: MakeProgram | None = None
    """Makes what runs a program, at some sizes where these are symbolic; by default what ``partition`` gives."""
    elsewhere: TargetDevice | None = None
    """The device that the step is for, where that is not here."""
    branches: bool = True
    """Whether branches may be taken by what inputs hold; those that take others then end in
    :class:`~planner.capture.branches.OtherBranchError`."""
    compiler: Compiler = aot_backend
    """Makes a backend of the partition function: AOTAutograd's, or Inductor's."""

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile what Dynamo captured."""
        work = _work.get(None)  # the user's own torch.compile may call it, who knows since when
        begun = work.begun if work is not None else time.perf_counter()
        _check_not_recurrent(graph_module)
        branches = take_out(graph_module)
        differentiable = (self.choose_outputs or loss_outputs)(graph_module)
        narrowed = detach_others(graph_module, differentiable)
        if self.elsewhere is not None:
            self.elsewhere.replace_calls(narrowed)
        is_sized = any(isinstance(x, torch.SymInt) for x in example_inputs) or _takes_numbers(narrowed)
        own = weakref.ref(self)  # what is compiled must not keep the model: AOTAutograd keeps these functions

        def make_program(joint: JointGraph, given: Sequence[Any]) -> Program:
            backend = own()
            assert backend is not None
            return (backend.make_program or partial(plainly, backend.partition))(joint, given)

        is_made_later = is_sized or (self.make_program is not None and self.compiler is aot_backend)
        programs = Programs(make_program, is_sized=is_sized) if is_made_later else None
        leaves = leaves_results()
        joints: list[JointGraph] = []
        tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]

        def partition(
            joint: fx.GraphModule, _joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            backend = own()
            assert backend is not None
            captured = backend.captured(
                joint,
                num_fwd_outputs,
                inputs=list(tensors),
                outside_bytes=gradients_outside(narrowed, differentiable),
                varies=is_sized,
                leaves_results=leaves,
                branches=branches.taken if branches else (),
                capture_seconds=time.perf_counter() - begun,
            )
            joints.append(captured)
            if programs is not None:
                return programs.captured(captured)
            return backend.partition(captured)

        # Inductor compiles what tracing makes.
        with eager_results(self.elsewhere) if self.compiler is aot_backend else nullcontext():
            if programs is None:
                run: Callable[..., Any] = self.compiler(partition)(narrowed, example_inputs)
            else:
                run = programs.compiled(partition, narrowed, example_inputs)
        tensors.clear()  # in torch 2.11 these are what the first step holds
        if self.finish is not None:
            run = self.finish(run, graph_module, differentiable, joints[-1] if joints else None)
        joints.clear()
        return run if branches is None else partial(_checked, branches, run)

    def captured(self, joint: fx.GraphModule, num_forward_outputs: int, **facts: Any) -> JointGraph:
        """Return a joint graph with equal operations merged; UnsupportedModelError for what no plan can hold."""
        for node in joint.graph.nodes:
            node.target = meant(node.target)
        graph, functional = eliminate_common_subexpressions(joint.graph), self.compiler is not aot_backend
        drop_unused_statistics(graph)
        if not (functional or facts["varies"]):
            merge_windows(joint, graph)
            update_in_place(graph)
        made = JointGraph(joint, graph, num_forward_outputs, functional=functional, elsewhere=self.elsewhere, **facts)
        _check_strided(made)
        _check_stay(made)
        _check_apart(made)
        return made


class _SharedCapture(Backend):
    """A compiled call that stops with the captured graph, shared by modules of the same code."""

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return super().__call__(graph_module, example_inputs)
        except Stopped as stopped:
            joint: JointGraph = stopped.args[0]

        def run(*given: Any) -> Any:
            raise Stopped(replace(joint, inputs=[x for x in given if isinstance(x, torch.Tensor)]))

        return run


def _takes_numbers(graph_module: fx.GraphModule) -> bool:
    """Whether a program takes numbers that change, which Dynamo passes as tensors."""
    items = graph_module.graph.find_nodes(op="call_method", target="item")
    read = [node.args[0] for node in items if isinstance(node.meta.get("example_value"), torch.SymFloat)]
    return any(node.op == "placeholder" and may_stand_in(node.meta.get("example_value")) for node in read)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _check_not_recurrent(graph_module: fx.GraphModule) -> None:
    """Raise an UnsupportedModelError for recurrent layers: tracing loses their kernels, and dropout between layers."""
    graph = graph_module.graph
    for stack in _RECURRENT:
        for node in graph.find_nodes(op="call_function", target=stack, sort=False):
            source = places_of(graph)[node].source
            raise UnsupportedModelError(
                f"recurrent layers ({stack.__name__}{f' at {source}' if source else ''}) run as one kernel each in "
                "eager, which a captured graph cannot contain: the runtime 'modules' runs them as they are"
            )


def _check_strided(joint: JointGraph) -> None:
    """Raise UnsupportedModelError for sparse tensors."""
    for node in joint.graph.nodes:
        if any(tensor.layout is not torch.strided for tensor in tensors_of(node)):
            source = places_of(joint.graph)[node].source
            raise UnsupportedModelError(
                f"{node.target}{f' ({source})' if source else ''} makes a sparse tensor, whose memory depends on data"
            )


def _check_stay(joint: JointGraph) -> None:
    """Raise UnsupportedModelError for inputs that are given other memory (``.data =``)."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.set_.source_Tensor):
        source = places_of(joint.graph)[node.args[1]].source
        raise UnsupportedModelError(
            f"the forward gives a parameter or a buffer new memory by .data ={f' ({source})' if source else ''}: "
            "write into it in place, under torch.no_grad()"
        )


def _check_apart(joint: JointGraph) -> None:
    """Raise UnsupportedModelError where AOTAutograd merges inputs that are views of one tensor."""
    if not joint.varies and len(joint.placeholders) < len(joint.inputs):
        raise UnsupportedModelError("it writes into one of several inputs that share memory: pass copies, x.clone()")


def _checked(branches: Branches, run: Callable[..., Any], *inputs: Any) -> Any:
    branches.check(inputs)
    return run(*inputs)


def differentiable_outputs(graph_module: fx.GraphModule) -> list[int]:
    """Return the positions of the outputs that require gradients."""
    return [i for i, value in enumerate(_output_values(graph_module)) if value is not None and value.requires_grad]


def loss_outputs(graph_module: fx.GraphModule, loss: LossMemory | None = None) -> list[int]:
    """Return the positions of the outputs that a backward starts from; see ``capture.inputs.expected_losses``."""
    values, differentiable = _output_values(graph_module), differentiable_outputs(graph_module)
    shapes = [tuple(map(hint_of, values[i].shape)) for i in differentiable]  # to compare symbols would pin them
    return [differentiable[i] for i in expected_losses(shapes, loss, [values[i] for i in differentiable])]


def _output_values(graph_module: fx.GraphModule) -> list[Any]:
    return list(map(example_of, graph_module.graph.output_node().args[0]))  # type: ignore[arg-type]


def gradients_outside(graph_module: fx.GraphModule, differentiable: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of gradients that reach outputs and not the graph, for which there is one to a storage.

    What arrives for views of one storage is added up before the graph sees the sum; what arrives for an
    output that is an input, or a view of one, goes past the graph.
    """
    values = _output_values(graph_module)
    given = {storage_id(v) for n in graph_module.graph.find_nodes(op="placeholder") if (v := example_of(n)) is not None}
    of_storage: defaultdict[int, list[int]] = defaultdict(list)
    for value in (values[position] for position in differentiable):
        of_storage[storage_id(value)].append(value.numel() * value.element_size())
    found: list[int] = []
    for storage, sizes in of_storage.items():
        if storage in given:
            found += sizes
        elif len(sizes) > 1:  # each but the one that the graph counts, and their sum
            found += [*sizes[1:], max(sizes)]
    return tuple(found)


def detach_others(graph_module: fx.GraphModule, differentiable: Sequence[int]) -> fx.GraphModule:
    """Return the graph module with all outputs detached but the named ones."""
    graph = fx.Graph()
    flat: list[Any] = list(graph.graph_copy(graph_module.graph, {}))  # type: ignore[arg-type]
    for position, value in enumerate(_output_values(graph_module)):
        if position not in differentiable and value is not None and value.requires_grad:
            flat[position] = graph.call_method("detach", (flat[position],))
            flat[position].meta = {"example_value": value.detach()}
    graph.output(tuple(flat))
    graph.output_node().meta = dict(graph_module.graph.output_node().meta)
    narrowed = fx.GraphModule(graph_module, graph)
    narrowed.meta = graph_module.meta
    return narrowed
