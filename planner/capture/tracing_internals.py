"""What Dynamo answers a program that it traces; private torch APIs, tried by tests/capture.

It refuses a jump on data: here somebody may say which way that goes. It says that the program is compiled: here it may
say what eager says.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.source import RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables import torch as functions_of_torch
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.node import has_side_effect

_ASKS = [code for name, code in dis.opmap.items() if re.fullmatch(".*JUMP.*IF_(TRUE|FALSE).*|UNARY_NOT", name)]
"""The instructions that ask whether something holds."""
_ASSERTION = "LOAD_ASSERTION_ERROR"

kept_by_tracing = has_side_effect
"""Lets calls of a function stay in a traced program though nobody reads what they return."""


@contextmanager
def deciding(decide: Callable[[fx.Node], bool | None], marker: Callable[[Any, bool], None]) -> Iterator[None]:
    """While Dynamo traces, let ``decide`` say whether the condition of a jump holds: None if it cannot.

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


def is_drawn_on_host(placeholder: fx.Node) -> bool:
    """Whether a program takes for a placeholder what Python's random state gives, which is asked before it runs."""
    return isinstance(getattr(placeholder.meta.get("grapharg"), "source", None), RandomValueSource)


class Answers(dict[Any, Any]):
    """What a program is answered that asks how it runs."""

    def __init__(self) -> None:
        super().__init__(functions_of_torch.tracing_state_functions())
        self.were_asked = False
        """Whether it asked if it is compiled."""

    def __getitem__(self, function: Any) -> Any:
        self.were_asked |= function is torch.compiler.is_compiling
        return super().__getitem__(function)

    def as_eager(self) -> None:
        """Say from now on that it is not compiled."""
        self[torch.compiler.is_compiling] = False


@contextmanager
def answering(*, as_eager: bool = False) -> Iterator[Answers]:
    """While Dynamo traces, answer the program: as it does by itself, or as eager does."""
    answers = Answers()
    if as_eager:
        answers.as_eager()
    with patch.object(functions_of_torch, "tracing_state_functions", lambda: answers):
        yield answers


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
    """Whether a jump is one of the program itself, and no assertion: those Dynamo leaves to the program."""
    is_assertion = tracer.instructions[tracer.instruction_pointer].opname == _ASSERTION
    return tracer.output.current_tracer is tracer.output.root_tracer and not is_assertion
