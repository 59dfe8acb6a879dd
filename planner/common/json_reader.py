"""JSON that is not trusted, read into dataclasses: each field has the type it declares, or its path is named.

A field that takes no part in comparisons is in no file. The ``metadata`` of the others may say how they stand there:

``at`` : the keys that lead to it, with dots between; by default its name
``signed`` : its number may be negative
``older`` : older files lack it, and mean its default
``left_out`` : it is left out where it is None, empty or 0
``columns`` : its rows stand column by column, since names of columns would be most of the file
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from planner.errors import PlanFileError, UsageError

_LARGEST_FILE_BYTES = 256 * 2**20
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 1e30
_LONGEST_TEXT = 10_000

T = TypeVar("T")
Where = tuple[Any, str | int | None]
"""Where a value stands: where its parent does, and its key there (None: it is a key itself). A root has no parent."""


def parse(text: str, what: str) -> Node:
    """Parse untrusted JSON; messages name the expected content, for example a ``"plan"``.

    A PlanFileError says that it is not JSON, is nested too deeply, repeats a key, or holds NaN or infinity.
    """
    if len(text) > _LARGEST_FILE_BYTES:
        raise PlanFileError(f"the {what} is over {_LARGEST_FILE_BYTES} bytes, which no real one is")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except PlanFileError:
        raise
    except json.JSONDecodeError as error:
        where = f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
        raise PlanFileError(f"not a whole {what}: {where}; save it again") from error
    except RecursionError as error:
        raise PlanFileError(f"not a {what}: it is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits, which Python will not convert
        raise PlanFileError(f"not a {what}: it contains a number of absurd length") from error
    return Node(value, (None, f"the {what}"))


def load(
    path: str | Path,
    what: str,
    read: Callable[[str], T],
    error: type[UsageError],
    largest_bytes: int = _LARGEST_FILE_BYTES,
) -> T:
    """Read a file's text, and what it holds; raise ``error`` if it cannot be read, is too large, or is refused."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(largest_bytes + 1)
    except (OSError, ValueError) as failed:
        raise error(f"cannot read {what} {path}: {getattr(failed, 'strerror', None) or failed}") from failed
    if len(content) > largest_bytes:
        raise error(f"{path} is over {largest_bytes} bytes, which no real {what} is")
    try:
        return read(content.decode("utf-8"))
    except UnicodeDecodeError as failed:
        raise error(f"{path} is not a {what}: it is not UTF-8 text") from failed
    except PlanFileError as failed:
        raise error(f"{path}: {failed}") from failed


def to_data(value: Any) -> Any:
    """Return a dataclass as plain data that :meth:`Node.read` reads back."""
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {key: to_data(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    data: dict[str, Any] = {}
    kind: Any = type(value)
    for field, declared in _fields(kind):
        content = getattr(value, field.name)
        if "left_out" in field.metadata and not content:
            continue
        *outer, key = _keys(field)
        inner = data
        for name in outer:
            inner = inner.setdefault(name, {})
        if "columns" in field.metadata:
            columns = _fields(get_args(declared)[0])
            inner[key] = {f.name: [to_data(getattr(row, f.name)) for row in content] for f, _ in columns}
        else:
            inner[key] = to_data(content)
    return data


def attributes(of: Any, *names: str) -> dict[str, Any]:
    """Return some attributes of an object, fields and properties, as data by their names."""
    return {name: to_data(getattr(of, name)) for name in names}


class Node:
    """A parsed JSON value, and where it stands."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: Where) -> None:
        self.value = value
        self.where = where

    def __getitem__(self, key: str) -> Node:
        """Return a field of an object; it must be there."""
        if not self.has(key):
            raise PlanFileError(f"{_path((self.where, key))} is missing")
        return Node(self.value[key], (self.where, key))

    def has(self, key: str) -> bool:
        """Whether the object, which this must be, has a field."""
        return key in _object(self.value, self.where)

    def names(self) -> tuple[str, ...]:
        """Return the names of an object's fields."""
        return tuple(_text(key, (self.where, None)) for key in _object(self.value, self.where))

    def read(self, kind: type[T]) -> T:
        """Return the value as a type: a dataclass, or whatever a field of one may be declared to be.

        Texts are printable, integers fit into 64 bits, numbers are finite and of sensible size, and neither is
        negative unless the field says so. Keys of an object that the dataclass does not have are passed over.
        A PlanFileError names the first place where the value is not that.
        """
        return _read(kind, self.value, self.where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanFileError(f"not valid JSON: key {twice[:80]!r} appears twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise PlanFileError(f"not valid JSON: it contains {name}, and every number must be finite")


def _path(where: Where) -> str:
    """Write out where a value stands, for example ``"predicted.peak_at.module"``."""
    parent, key = where
    if parent is None:
        return str(key)
    if key is None:
        return f"a key of {_path(parent)}"
    if isinstance(key, int):
        return f"{_path(parent)}[{key}]"
    key = key if len(key) <= 120 else key[:117] + "..."
    return key if parent[0] is None else f"{_path(parent)}.{key}"


def _fail(value: Any, where: Where, wanted: str) -> NoReturn:
    raise PlanFileError(f"{_path(where)} must be {wanted}, not {shown(value)}")


def shown(value: object) -> str:
    """Return a wrong value as messages show it."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value, default=str)[:40]


def _is(kind: type[T], wanted: str, value: Any, where: Where) -> T:
    if not isinstance(value, kind):
        _fail(value, where, wanted)
    return value


_object: Callable[[Any, Where], dict[str, Any]] = partial(_is, dict, "an object")
_list: Callable[[Any, Where], list[Any]] = partial(_is, list, "a list")
_string: Callable[[Any, Where], str] = partial(_is, str, "text")
_truth: Callable[[Any, Where], bool] = partial(_is, bool, "true or false")


def _text(value: Any, where: Where) -> str:
    """Return a text of sensible length without control characters, which could play with a terminal."""
    text = _string(value, where)
    if len(text) > _LONGEST_TEXT:
        raise PlanFileError(f"{_path(where)} is longer than {_LONGEST_TEXT} characters")
    if not text.isprintable():
        raise PlanFileError(f"{_path(where)} contains characters that cannot be printed")
    return text


def _integer(value: Any, where: Where, signed: bool = False) -> int:
    wanted = "an integer" if signed else "an integer that is not negative"
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(value, where, wanted)
    if abs(value) > _LARGEST_INTEGER or (value < 0 and not signed):
        _fail(value, where, wanted + " below 2**63")
    return value


def _number(value: Any, where: Where, signed: bool = False) -> float:
    wanted = "a number" if signed else "a number that is not negative"
    if isinstance(value, int) and not isinstance(value, bool):
        return float(_integer(value, where, signed))
    if not isinstance(value, float):
        _fail(value, where, wanted)
    if not abs(value) <= _LARGEST_NUMBER or (value < 0 and not signed):
        _fail(value, where, f"{wanted} below {_LARGEST_NUMBER}")
    return value


_SIMPLE: dict[Any, Callable[[Any, Where, bool], Any]] = {
    bool: lambda value, where, _: _truth(value, where),
    str: lambda value, where, _: _text(value, where),
    int: _integer,
    float: _number,
}


def _read(kind: Any, value: Any, where: Where, signed: bool = False) -> Any:
    """Return a value as a type; numbers in it may be negative only if they are ``signed``."""
    if (simple := _SIMPLE.get(kind)) is not None:
        return simple(value, where, signed)
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _read_all(inside[0], value, where, signed)
    if origin in (dict, Mapping):
        named = _object(value, where).items()
        return {_text(key, (where, None)): _read(inside[1], item, (where, key)) for key, item in named}
    if origin is UnionType and inside[-1] is NoneType:
        return None if value is None else _read(inside[0], value, where, signed)
    if origin is UnionType:  # of a fingerprint, with hashes in it
        return _text(value, where) if isinstance(value, str) else _integer(value, where, signed=True)
    if is_dataclass(kind):
        make: Any = kind
        return make(**_read_fields(kind, value, where))
    allowed = inside if origin is Literal else tuple(kind)
    if value not in allowed:
        _fail(value, where, " or ".join(repr(str(one)) for one in allowed))
    return value if origin is Literal else kind(value)


def _read_all(kind: Any, value: Any, where: Where, signed: bool = False) -> tuple[Any, ...]:
    return tuple([_read(kind, item, (where, index), signed) for index, item in enumerate(_list(value, where))])


def _read_fields(kind: Any, value: Any, where: Where, read: Callable[..., Any] = _read) -> dict[str, Any]:
    found = {}
    for field, hint in _fields(kind):
        inner, place = value, where
        for key in (keys := _keys(field)):
            container, place = _object(inner, place), (place, key)
            if key not in container:
                if key == keys[-1] and not _MAY_BE_MISSING.isdisjoint(field.metadata):
                    break
                raise PlanFileError(f"{_path(place)} is missing")
            inner = container[key]
        else:
            if "columns" in field.metadata:
                found[field.name] = _rows(get_args(hint)[0], inner, place)
            else:
                found[field.name] = read(hint, inner, place, "signed" in field.metadata)
    return found


_MAY_BE_MISSING = frozenset({"older", "left_out"})


def _rows(row: Any, value: Any, where: Where) -> tuple[Any, ...]:
    columns = _read_fields(row, value, where, _read_all)
    if len({len(column) for column in columns.values()}) > 1:
        raise PlanFileError(f"{_path(where)}: its columns are not of one length")
    return tuple(row(**dict(zip(columns, cells, strict=True))) for cells in zip(*columns.values(), strict=True))


@cache
def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Return the fields that files have, with their types; None that is left out is in no file."""
    hints = get_type_hints(kind)
    found = []
    for field in (field for field in fields(kind) if field.compare):
        hint = hints[field.name]
        is_never_none = "left_out" in field.metadata and NoneType in get_args(hint)
        found.append((field, get_args(hint)[0] if is_never_none else hint))
    return found


def _keys(field: Field[Any]) -> list[str]:
    return str(field.metadata.get("at", field.name)).split(".")
