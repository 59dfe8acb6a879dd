"""Change what Dynamo assumes of a program: branches on data, and ``is_compiling``; private torch APIs.

It refuses a jump on data: here somebody may say which way that goes. It says that the program is compiled: here it may
say what eager says.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import external_utils
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables import torch as functions_of_torch
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.node import has_side_effect

from planner.capture.hugging_face import COLLECTS_OUTPUTS

_ASKS = [code for name, code in dis.opmap.items() if re.fullmatch(".*JUMP.*IF_(TRUE|FALSE).*|UNARY_NOT", name)]
"""The instructions that ask whether something holds."""
_ASSERTION = "LOAD_ASSERTION_ERROR"

_KNOW_HOW_THEY_RUN = {__name__.partition(".")[0], torch.__name__}
"""Packages that are told the truth when they ask whether they are compiled: they do the same in either case."""

kept_by_tracing = has_side_effect
"""Lets calls of a function stay in a traced program though nobody reads what they return."""


@contextmanager
def deciding(decide: Callable[[fx.Node], bool | None], marker: Callable[[Any, bool], None]) -> Iterator[None]:
    """Let ``decide`` evaluate conditions of jumps while Dynamo traces; None leaves them to Dynamo.

    The traced program then calls ``marker(condition, held)`` where the jump was.
    """
    with ExitStack() as stack:
        for kind in _with_subclasses(InstructionTranslatorBase):
            table = list(kind.dispatch_table)
            for code in _ASKS:
                table[code] = partial(_jump, table[code], decide, marker)
            stack.enter_context(patch.object(kind, "dispatch_table", table))
        yield


def given_to(placeholder: fx.Node) -> Any:
    """Return the tensor or size that a program is given for a placeholder, None for a number that varies."""
    argument = placeholder.meta.get("grapharg")
    if argument is None or argument.pass_arg_as_tensor:
        return None
    example = argument.example
    return example.node.hint if isinstance(example, torch.SymInt) else example


_QUESTIONS = (
    torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
    torch._utils.is_compiling, external_utils.is_compiling,
)  # fmt: skip
"""By which a program asks whether it is compiled."""

_ANSWERED_NO = (
    torch.compiler.is_exporting, torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing,
)  # fmt: skip
"""Other questions of the kind, to which no is the truth; the last two cannot be traced."""

_MOST_TRACED = 200
"""Calls that may be traced from one asking to the next at the same place: more are of a loop over time, which a model
has in eager where it has none if it is compiled."""

_TOO_LONG = "it has too many operations"

_Place = tuple[tuple[CodeType, int], ...]
"""Where a program asks: the code and line of every call that it is in, from the innermost on."""


class _LongError(TorchDynamoException):
    """The program may be much shorter if ``is_compiling`` answers otherwise."""


@dataclass
class Answers:
    """Answers to ``is_compiling`` during a capture: no, as in eager, unless that cannot be captured."""

    told_yes: Mapping[_Place, str] = field(default_factory=dict)
    """The places where it is told yes, with the reason."""
    asked: dict[_Place, int] = field(default_factory=dict)
    """Where it asked, in order, and how many calls had been traced when it did so last."""
    long: _Place | None = None
    """The place after which there is too much for this capture to go on."""

    def answer(self, place: _Place, traced: int) -> bool:
        """Say whether it is compiled."""
        before = self.asked.pop(place, traced)
        self.asked[place] = traced
        if traced - before > _MOST_TRACED and place not in self.told_yes:
            self.long = place
            raise _LongError(_TOO_LONG)
        return place in self.told_yes

    def after(self, failure: TorchDynamoException) -> Answers | None:
        """Return other answers for another try: yes where it asked last, or everywhere if that was of no use."""
        why = str(failure)
        places = [self.long] if self.long else [place for place in reversed(self.asked) if place not in self.told_yes]
        if why not in self.told_yes.values():
            del places[1:]
        return Answers({**self.told_yes, **dict.fromkeys(places, why)}) if places else None


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Give a program these answers while Dynamo traces; torch's own code and ours get the truth."""

    def answer(plain: Callable[..., Any], function: Any, tracer: Any) -> Any:
        asking = _asking(tracer)
        if _knows_how_it_runs(asking) or answers.answer(_place(asking), len(tracer.output.graph.nodes)):
            return plain(function, tracer)
        return no(function, tracer)

    def no(_function: Any, _tracer: Any) -> Any:
        return ConstantVariable.create(False)

    def skipped(function: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
        return no(function, tracer) if function.value in _ANSWERED_NO else plainly(function, tracer, args, kwargs)

    plainly = SkipFunctionVariable.call_function
    handlers = functions_of_torch.TorchInGraphFunctionVariable._get_handlers()
    answered = {question: partial(answer, handlers[question]) for question in _QUESTIONS}
    with (
        patch.dict(handlers, {**answered, **dict.fromkeys(_ANSWERED_NO, no)}),
        patch.object(SkipFunctionVariable, "call_function", skipped),
    ):
        yield


def _asking(tracer: Any) -> Any:
    """Return the frame that asks; functions that only pass the question on are left out."""
    while tracer.parent is not None and tracer.f_code.co_name.startswith("is_"):
        tracer = tracer.parent
    return tracer


def _knows_how_it_runs(tracer: Any) -> bool:
    module = str(tracer.f_globals.get("__name__"))
    return module.partition(".")[0] in _KNOW_HOW_THEY_RUN or module == COLLECTS_OUTPUTS


def _place(tracer: Any) -> _Place:
    """Say where a frame is."""
    calls: list[tuple[CodeType, int]] = []
    while tracer is not None:
        calls.append((tracer.f_code, tracer.lineno))
        tracer = tracer.parent
    return tuple(calls)


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _jump(
    jump: Callable[[Any, Any], None],
    decide: Callable[[fx.Node], bool | None],
    marker: Callable[[Any, bool], None],
    tracer: Any,
    instruction: Any,
) -> None:
    condition = tracer.stack[-1].realize()
    held = decide(condition.as_proxy().node) if _is_data(condition) and _may_decide(tracer) else None
    if held is None:
        jump(tracer, instruction)
        return
    tracer.output.create_proxy("call_function", marker, (condition.as_proxy(), held), {})
    tracer.stack[-1] = known = ConstantVariable.create(held)
    jump(tracer, instruction)
    if tracer.stack and tracer.stack[-1] is known:  # as in ``a or b``, which gives a itself
        tracer.stack[-1] = condition


def _is_data(condition: Any) -> bool:
    if isinstance(condition, SymNodeVariable):
        number = condition.sym_num
        return isinstance(number, (torch.SymBool, torch.SymInt, torch.SymFloat)) and not number.node.has_hint()
    return isinstance(condition, TensorVariable)


def _may_decide(tracer: Any) -> bool:
    """Whether a jump is the program's own and no assertion, which Dynamo handles itself."""
    is_assertion = tracer.instructions[tracer.instruction_pointer].opname == _ASSERTION
    return tracer.output.current_tracer is tracer.output.root_tracer and not is_assertion


def leaves_results() -> bool:
    """Whether the program that Dynamo compiles now stores more than constants in objects that were there before.

    Results of its graph are then not only those that the call returns (``tests/runtimes/test_observed.py``).
    """
    try:
        effects = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:
        return True  # a graph between two graph breaks is captured again without Dynamo: its results go to code
    existing = (AttributeMutationExisting, ValueMutationExisting)
    for found in effects.id_to_variable.values():
        if isinstance(found.mutation_type, existing) and effects.is_modified(found):
            stored = effects.store_attr_mutations.get(found, {}).values()
            if not stored or not all(isinstance(one, ConstantVariable) for one in stored):
                return True
    return False
