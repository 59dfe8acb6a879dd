"""Expressions in the symbols of sizes, made functions of Python once.

Putting numbers in for symbols takes sympy a tenth of a millisecond and more, and a step of a new size has many
expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

_KEPT = 2**14
"""How many functions are kept: more than the programs of any training have expressions."""

_SIGNS = {"Add": " + ", "Mul": " * ", "FloorDiv": " // ", "CleanDiv": " // ", "Mod": " % ", "PythonMod": " % "}
_FUNCTIONS = {"Max": "max", "Min": "min"}

Numbers = dict[Any, int]
"""What the symbols of symbolic sizes stand for."""


def expression_of(size: Any) -> Any:
    """Return what a number is in symbols; itself, if there are none in it."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def symbol_of(size: Any) -> Any:
    """Return the symbol that a symbolic size is; None for a number, or for what is computed from symbols."""
    expression = expression_of(size)
    return expression if getattr(expression, "is_Symbol", False) else None


def evaluated(expression: Any, numbers: Numbers) -> Any:
    """Return an expression's number for given symbols."""
    if not hasattr(expression, "xreplace"):
        return expression
    function = as_function(expression)
    if function is not None:
        with suppress(KeyError):  # a symbol that stands for nothing yet
            return function(numbers)
    found = expression.xreplace(numbers)
    return int(found) if getattr(found, "is_integer", False) else float(found)


def number_of(size: Any, numbers: Numbers) -> Any:
    """Return a size, symbolic or not, for given symbols; no guard is made."""
    return evaluated(size.node.expr, numbers) if isinstance(size, torch.SymInt) else size


@lru_cache(_KEPT)
def as_function(expression: Any) -> Callable[[Numbers], int] | None:
    """Return what gives a whole number for those of its symbols; None for an expression of any other kind.

    >>> import sympy
    >>> length = sympy.Symbol("length", integer=True)
    >>> as_function(4 * length**2 + 1)({length: 3})
    37
    >>> as_function(length / 2) is None
    True
    """
    names = {symbol: f"n{at}" for at, symbol in enumerate(expression.free_symbols)}
    text = _written(expression, names)
    if text is None or not names:
        return None
    function = eval(f"lambda {', '.join(names.values())}: {text}", {"max": max, "min": min})
    symbols = tuple(names)
    if len(symbols) == 1:
        return lambda numbers, symbol=symbols[0]: function(numbers[symbol])  # type: ignore[misc]
    return lambda numbers: function(*[numbers[symbol] for symbol in symbols])


def _written(expression: Any, names: Mapping[Any, str]) -> str | None:
    """Return an expression as Python has it; None unless it is made of whole numbers by what keeps them whole."""
    if expression.is_Symbol:
        return names[expression] if expression.is_integer else None
    if expression.is_Integer:
        return f"({int(expression)})"
    kind, parts = type(expression).__name__, expression.args
    if kind == "Pow":
        return _power(names, *parts)
    written = [_written(part, names) for part in parts]
    known = [text for text in written if text is not None]
    if len(known) < len(written) or not known:
        return None
    if kind in _FUNCTIONS:
        return f"{_FUNCTIONS[kind]}({', '.join(known)})"
    return f"({_SIGNS[kind].join(known)})" if kind in _SIGNS else None


def _power(names: Mapping[Any, str], base: Any, exponent: Any) -> str | None:
    written = _written(base, names)
    return f"({written} ** {int(exponent)})" if written and exponent.is_Integer and exponent > 0 else None
