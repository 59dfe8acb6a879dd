"""Dataclasses out of JSON: every field is held to its type, and what is wrong is named by its path."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from planner.common.json_reader import load, parse, to_data
from planner.errors import PlanFileError, UsageError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    size: int
    late: bool = field(default=False, metadata={"older": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    name: str
    colour: Colour
    kind: Literal["a", "b"]
    share: float
    moved: int = field(metadata={"signed": True})
    inner: int = field(metadata={"at": "outer.inner"})
    limit: float | None
    hashes: dict[str, str | int]
    sizes: tuple[tuple[int, ...], ...]
    part: Row | None = field(default=None, metadata={"left_out": True})
    table: tuple[Row, ...] = field(default=(), metadata={"columns": True})
    secret: int = field(default=0, compare=False)


THING = Thing(
    name="now", colour=Colour.BLUE, kind="b", share=0.5, moved=-3, inner=4, limit=None, hashes={"a": -1, "b": "x"},
    sizes=((1, 2), ()), part=Row(name="p", size=1), table=(Row(name="r", size=2), Row(name="s", size=3, late=True)),
)  # fmt: skip


def read(data: Any) -> Thing:
    return parse(json.dumps(data), "thing").read(Thing)


def test_what_is_written_is_read_again() -> None:
    data = to_data(replace(THING, secret=7))
    assert data["outer"] == {"inner": 4} and "secret" not in data
    assert data["table"] == {"name": ["r", "s"], "size": [2, 3], "late": [False, True]}
    assert read(data) == THING and read(data).secret == 0
    bare = replace(THING, part=None, table=())
    assert "part" not in to_data(bare) and read(to_data(bare)) == bare


def test_older_files_are_read() -> None:
    data = to_data(THING)
    del data["part"]["late"], data["table"]["late"]
    found = read({**data, "a key of tomorrow": 1})
    assert found == replace(THING, table=(Row(name="r", size=2), Row(name="s", size=3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name must be text, not 1"),
        ({"name": "\x1b[2J"}, "name holds characters that cannot be printed"),
        ({"name": "x" * 20_000}, "name is longer than 10000 characters"),
        ({"colour": "green"}, "colour must be 'red' or 'blue', not \"green\""),
        ({"kind": ["a"]}, "kind must be 'a' or 'b', not a list"),
        ({"share": -0.5}, "share must be a number that is not negative below 1e+30, not -0.5"),
        ({"share": 1e308}, "share must be a number that is not negative below 1e+30, not 1e+308"),
        ({"share": True}, "share must be a number that is not negative, not true"),
        ({"moved": 2**63}, "moved must be an integer below 2**63, not 9223372036854775808"),
        ({"moved": 1.0}, "moved must be an integer, not 1.0"),
        ({"outer": {}}, "outer.inner is missing"),
        ({"outer": []}, "outer must be an object, not a list"),
        ({"limit": "none"}, 'limit must be a number that is not negative, not "none"'),
        ({"hashes": {"a": 0.5}}, "hashes.a must be an integer, not 0.5"),
        ({"hashes": {"\n": 1}}, "a key of hashes holds characters that cannot be printed"),
        ({"sizes": [[1], [2, -1]]}, "sizes[1][1] must be an integer that is not negative below 2**63, not -1"),
        ({"part": None}, "part must be an object, not null"),
        ({"part": {"name": "p"}}, "part.size is missing"),
        ({"table": {"name": ["r"], "size": []}}, "table: its columns are not of one length"),
        ({"table": {"name": ["r"], "size": ["s"]}}, 'table.size[0] must be an integer that is not negative, not "s"'),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read({**to_data(THING), **change})
    assert str(caught.value) == message


def test_what_is_no_object_is_named() -> None:
    with pytest.raises(PlanFileError, match="the thing must be an object, not a list"):
        read([])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    for content, message in (
        (None, "cannot read thing"),
        (b"\xff\xfe\x00", "is not a thing: it is not UTF-8"),
        (b" " * 101, "is over 100 bytes"),
        (b"{", "thing.json: not a whole"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            load(path, "thing", lambda text: parse(text, "thing").read(Thing), UsageError, 100)
