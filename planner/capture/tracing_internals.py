"""What Dynamo answers a program that it traces; private torch APIs, tried by tests/capture.

It refuses a jump on data: here somebody may say which way that goes. It says that the program is compiled: here it may
say what eager says. It knows four functions of Python's that draw a random number: here it knows them all, and numpy's.
"""

from __future__ import annotations

import dis
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.source import FloatTensorSource, RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable, user_defined
from torch._dynamo.variables import torch as functions_of_torch
from torch._dynamo.variables.builder import GraphArg, wrap_fx_proxy
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.node import has_side_effect

_ASKS = [code for name, code in dis.opmap.items() if re.fullmatch(".*JUMP.*IF_(TRUE|FALSE).*|UNARY_NOT", name)]
"""The instructions that ask whether something holds."""
_ASSERTION = "LOAD_ASSERTION_ERROR"

_OF_PYTHON = frozenset(
    getattr(random, name)
    for name in (
        "random", "uniform", "triangular", "betavariate", "expovariate", "gammavariate",
        "gauss", "lognormvariate", "normalvariate", "paretovariate", "vonmisesvariate", "weibullvariate",
    )
)  # fmt: skip
"""Python's functions that draw one number."""

_WHOLE = frozenset((random.randint, random.randrange))
"""Those that draw a whole one."""

_OF_NUMPY = {
    "random": 0, "random_sample": 0, "rand": 0, "randn": 0, "standard_normal": 0, "exponential": 1, "weibull": 1,
    "pareto": 1, "chisquare": 1, "uniform": 2, "normal": 2, "beta": 2, "gamma": 2, "lognormal": 2, "laplace": 2,
    "vonmises": 2, "triangular": 3,
}  # fmt: skip
"""Numpy's that do so where no size is asked for, with how many arguments come before the size."""

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


@contextmanager
def drawing() -> Iterator[None]:
    """While Dynamo traces, let single numbers that Python and numpy draw be drawn before the program, which takes them.

    They come in the order in which the forward draws them, from the states that it draws from.
    """
    whole, skipped, plain = user_defined.call_random_fn, SkipFunctionVariable.call_function, NumpyVariable.call_function

    def of_c(function: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
        if function.value == random.random:
            return _drawn(tracer, random.random, args, kwargs)
        return skipped(function, tracer, args, kwargs)

    def of_python(tracer: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if function in _WHOLE:
            return whole(tracer, function, args, kwargs)
        return _drawn(tracer, function, args, kwargs)

    def of_numpy(function: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
        constant = all(x.is_python_constant() for x in (*args, *kwargs.values()))
        if constant and _draws_one(function.value, args, kwargs):
            return _drawn(tracer, function.value, args, kwargs)
        return plain(function, tracer, args, kwargs)

    functions = staticmethod(lambda: _OF_PYTHON | _WHOLE)
    with (
        patch.object(user_defined.UserDefinedObjectVariable, "_supported_random_functions", functions),
        patch.object(user_defined, "call_random_fn", of_python),
        patch.object(SkipFunctionVariable, "call_function", of_c),
        patch.object(NumpyVariable, "call_function", of_numpy),
    ):
        yield


def _drawn(tracer: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Return a number that is drawn before the program runs, which takes it in full precision, as Python has it."""
    args, kwargs = [x.as_python_constant() for x in args], {k: x.as_python_constant() for k, x in kwargs.items()}
    output = tracer.output
    source = RandomValueSource(len(output.random_calls))
    output.random_calls.append((function, args, kwargs))
    example = torch.tensor(0.5, dtype=torch.float64)  # any will do, and to draw one would leave another state
    fake = tracer.fake_mode.from_tensor(example, static_shapes=True)
    taken = output.root_tracer.create_graph_input(source.name, torch.Tensor, fake, source=FloatTensorSource(source))
    taken.node.meta["grapharg"] = GraphArg(
        source, example, pass_arg_as_tensor=True, fake_tensor=fake, is_tensor=False, example_strong_ref=example
    )
    return wrap_fx_proxy(tracer, output.create_proxy("call_method", "item", (taken,), {}))


def _draws_one(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of numpy's, called so, draws one number."""
    of_numpy = sys.modules["numpy"].random
    before = next((count for name, count in _OF_NUMPY.items() if function == getattr(of_numpy, name)), -1)
    given = [x.as_python_constant() for x in (*args, *kwargs.values())]
    return len(args) <= before and "size" not in kwargs and all(type(x) in (int, float) for x in given)


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
