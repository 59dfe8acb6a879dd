"""Numbers put in for symbols by functions of Python are those that sympy puts in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv, Max, Mod, PythonMod

from planner.capture.symbolic import as_function, evaluated

A, B = sympy.symbols("a b", integer=True, positive=True)
HALF = sympy.Symbol("half", real=True)

WHOLE = [
    4 * A,
    A * B**2 + 3 * A - 7,
    FloorDiv(A + B, 2) * 4,
    FloorDiv(A - B, 3),
    Mod(A, 4) + B,
    PythonMod(A - B, 3),
    Max(A, 2 * B) - 1,
    A - B * FloorDiv(A, B),
]
OTHERS = [A / 2, IntTrueDiv(A, B), HALF * 2, sympy.sqrt(A), sympy.Eq(A, B), sympy.Integer(3), sympy.true]


@pytest.mark.parametrize("expression", WHOLE, ids=str)
def test_whole_numbers_are_those_of_sympy(expression: Any) -> None:
    assert as_function(expression) is not None
    for a, b in itertools.product((1, 2, 3, 7, 64), repeat=2):
        found = evaluated(expression, {A: a, B: b})
        assert (found, type(found)) == (int(expression.xreplace({A: sympy.Integer(a), B: sympy.Integer(b)})), int)


@pytest.mark.parametrize("expression", OTHERS, ids=str)
def test_what_need_not_be_whole_is_left_to_sympy(expression: Any) -> None:
    assert as_function(expression) is None
    assert evaluated(IntTrueDiv(A, B), {A: 3, B: 2}) == 1.5
    assert evaluated(A / 2, {A: 4, B: 2}) == 2
